"""What the tests of the runtime share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.runtime.small import one_rank


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the one rank of a process group."""
    with one_rank():
        yield


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a command, with the folder of kernels that all tests share."""
    return dict(os.environ)
