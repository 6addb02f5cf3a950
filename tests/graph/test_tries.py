"""Searches without branches find what a plain search finds."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from megagraph_cli.graph.choice import either
from megagraph_cli.graph.tries import pick


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 50, 257])
def test_the_first_entry_above_the_point_is_picked(size: int) -> None:
    rng = np.random.default_rng(size)
    cdf = np.sort(rng.integers(0, 2**32, size + 5)).astype(np.uint32)
    cdf[2 + size // 2] = cdf[2 + size // 2 - 1]  # an entry of weight 0
    cdf[1 + size] = 2**32 - 1
    row = cdf[2 : 2 + size]
    points = np.concatenate((rng.integers(0, 2**32, 300, dtype=np.uint64), row, row - 1, [0, 2**32 - 1])).astype(
        np.uint64
    )
    for point in np.minimum(points, 2**32 - 1):
        # The last fraction stands for one: no point is at it or above.
        expected = np.searchsorted(row, min(int(point), 2**32 - 2), side="right")
        assert pick(np.uint64(point << np.uint64(32)), cdf, 2, 2 + size) == 2 + expected, point


@njit
def _larger(a: int, b: int) -> int:
    return int(either(a > b, a, b))


@njit
def _mixed(a: int, b: float) -> float:
    return float(either(a > b, a, b))


def test_either_number_is_chosen_and_only_one_of_the_same_kind() -> None:
    assert [_larger(3, 5), _larger(5, 3), _larger(-1, -1)] == [5, 5, -1]
    with pytest.raises(TypingError):
        _mixed(1, 2.0)
