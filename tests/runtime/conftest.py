"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.small import one_rank


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the one rank of a process group."""
    with one_rank():
        yield
