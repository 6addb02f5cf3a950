"""What all tests share: the folder of real data, when there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that MGRAPH_DATA names; skips the test where there is none."""
    named = os.environ.get("MGRAPH_DATA", "")
    if not named or not Path(named).is_dir():
        pytest.skip("the environment variable MGRAPH_DATA names no folder of raw data")
    return Path(named)
