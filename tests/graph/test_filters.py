"""Filters of rows: no entry is missed, few others pass."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph_cli.graph.filters import filter_bit, hash_id, row_filters


def is_set(filters: np.ndarray, start: int, size: int, key: int) -> bool:
    bit = int(filter_bit(hash_id(key), np.uint64(size)))
    assert bit < 8 * size
    return bool(filters[start + bit // 8] >> (bit % 8) & 1)


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.sets(st.integers(0, 2**31 - 2), max_size=40), max_size=8))
def test_every_entry_is_found(rows: list[set[int]]) -> None:
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    indices = np.array([key for row in rows for key in sorted(row)], dtype=np.int32)
    filters = row_filters(indptr, indices)
    assert filters.shape == indices.shape
    for row, start in zip(rows, indptr.tolist(), strict=False):
        assert all(is_set(filters, start, len(row), key) for key in row)


def test_others_pass_as_seldom_as_by_chance() -> None:
    rng = np.random.default_rng(0)
    keys = rng.choice(1 << 24, 60_000, replace=False).astype(np.int32)
    size = 20_000
    filters = row_filters(np.array([0, size]), np.sort(keys[:size]))
    passed = np.mean([is_set(filters, 0, size, key) for key in keys[size:]])
    chance = 1 - np.exp(-1 / 8)
    assert abs(passed - chance) < 5 * np.sqrt(chance / 40_000)
    # Neighbours with consecutive ids do not fall together.
    filters = row_filters(np.array([0, size]), np.arange(size, dtype=np.int32))
    passed = np.mean([is_set(filters, 0, size, key) for key in range(size, 3 * size)])
    assert passed < 1 / 7
