"""Layer splits: their number, their enumeration, counts and smallest limits under caps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.cost.partition import (
    balanced,
    count_splits,
    count_within,
    first_split,
    fits,
    non_dominated,
)


def enumerate_splits(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    """All splits in lexicographic order."""
    for cuts in itertools.combinations(range(1, num_layers), pp - 1):
        ends = (*cuts, num_layers)
        yield tuple(end - begin for begin, end in zip((0, *cuts), ends, strict=True))


def test_24_layers_on_4_stages_have_1771_splits() -> None:
    assert count_splits(24, 4) == 1771
    found = list(enumerate_splits(24, 4))
    assert len(found) == len(set(found)) == 1771
    assert all(sum(split) == 24 and min(split) >= 1 for split in found)
    assert found == sorted(found)


@pytest.mark.parametrize(("layers", "pp", "expected"), [(1, 1, 1), (5, 1, 1), (5, 5, 1), (4, 5, 0), (10, 3, 36)])
def test_edges_of_the_count(layers: int, pp: int, expected: int) -> None:
    assert count_splits(layers, pp) == expected
    assert len(list(enumerate_splits(layers, pp))) == expected


@given(layers=st.integers(1, 11), caps=st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_counting_within_caps_equals_filtering(layers: int, caps: list[int]) -> None:
    if len(caps) > layers:
        return
    within = [
        split
        for split in enumerate_splits(layers, len(caps))
        if all(held <= cap for held, cap in zip(split, caps, strict=True))
    ]
    assert count_within(caps, layers) == len(within)
    assert fits(caps, layers) == bool(within)
    if within:
        assert first_split(caps, layers) == within[0]


@given(total=st.integers(1, 60), parts=st.integers(1, 12))
def test_balanced_differs_by_one_at_most(total: int, parts: int) -> None:
    split = balanced(total, parts)
    assert (sum(split), len(split)) == (total, parts)
    assert max(split) - min(split) <= 1


def test_non_dominated_points_keep_the_leanest_of_equal_times() -> None:
    import numpy as np

    time = np.array([2.0, 1.0, 1.0, 3.0, 2.5])
    peak = np.array([5, 9, 8, 5, 4])
    assert non_dominated(time, peak) == [2, 0, 4]
