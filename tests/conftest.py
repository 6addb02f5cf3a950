"""What all tests share: the folder of real data, when there is one, and settings that must stand before any import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megagraph_cli.kernelcache import kernel_folder


def pytest_configure(config: pytest.Config) -> None:
    """One thread for torch in each test process, and one place for compiled kernels, whoever compiles them first.

    Test processes run beside each other, and several threads in each of several processes make all of them slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.pluginmanager.hasplugin("cacheprovider"):  # -p no:cacheprovider leaves kernels to numba
        os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_folder(config.cache.mkdir("kernels"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: two test processes that share files out then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that MGRAPH_DATA names; skips the test where there is none."""
    named = os.environ.get("MGRAPH_DATA", "")
    if not named or not Path(named).is_dir():
        pytest.skip("the environment variable MGRAPH_DATA names no folder of raw data")
    return Path(named)
