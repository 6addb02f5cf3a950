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
def environment(pytestconfig: pytest.Config) -> dict[str, str]:
    """The environment of a command: its kernels are compiled once for all runs of the tests, into pytest's cache."""
    assert pytestconfig.cache is not None
    return os.environ | {"NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("numba"))}
