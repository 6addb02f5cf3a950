"""Allocations that a profile saw and ends that it did not: each counts once, and in its place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megagraph_cli.runtime.live import End, changes_in
from megagraph_cli.runtime.meters import metered
from tests.ranks import run_ranks
from tests.runtime.small import CPU

A, B = 4096, 8192
OPERATIONS = 40

CASES = {
    "an end that the profile does not see": ([(1, 8, A)], [End(3, A, 2)], [(1, 8), (3, -8)]),
    "one that it sees first": ([(1, 8, A), (2, -8, A)], [End(3, A, 1)], [(1, 8), (2, -8)]),
    "one that it sees later": ([(1, 8, A), (4, -8, A)], [End(3, A, 2)], [(1, 8), (3, -8)]),
    "a storage that went through two collectives": ([(1, 8, A)], [End(4, A, 2), End(4, A, 3)], [(1, 8), (4, -8)]),
    "an address taken before the end is told": (
        [(1, 8, A), (3, 6, A)],
        [End(4, A, 2)],
        [(1, 8), (3, -8), (3, 6)],
    ),
    "an address taken in the moment it is free": (
        [(2, 6, A), (2, -8, A), (1, 8, A)],
        [],
        [(1, 8), (2, -8), (2, 6)],
    ),
    "an address taken after an unseen end": (
        [(1, 8, A), (4, 6, A), (5, -6, A)],
        [End(3, A, 2)],
        [(1, 8), (3, -8), (4, 6), (5, -6)],
    ),
    "something older": ([(1, 8, B)], [End(3, A, 2)], [(1, 8)]),
}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_a_profile_saw_allocated_ends_once(case: str, watched: bool) -> None:
    told, ends, expected = CASES[case]
    assert list(changes_in(told, ends, watched)) == expected


def test_the_end_of_something_older_is_told_by_the_watch_or_by_the_profile() -> None:
    told = [(2, -8, A)]
    assert list(changes_in(told, [], watched=True)) == []
    assert list(changes_in(told, [], watched=False)) == [(2, -8)]


def _exchange(size: int) -> None:
    own = torch.zeros(size)
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own)
    dist.broadcast(parts[0], src=0)
    dist.all_reduce(own)
    dist.all_to_all_single(torch.empty_like(own), own)


def _collectives(_rank: int) -> list[tuple[int, int]]:
    """(left at the end, risen to) beyond the start, over many exchanges of a size of their own, metered both ways."""
    found = []
    for from_zero in (True, False):
        with metered(CPU, from_zero=from_zero) as reading:
            for i in range(OPERATIONS):
                _exchange(1000 + 2 * i)
        found.append((reading.end_bytes - reading.start_bytes, reading.peak_bytes - reading.start_bytes))
    return found


@pytest.mark.ranks
def test_tensors_of_collectives_are_seen_to_end() -> None:
    # own, two parts and what gloo gathers into; those of the exchange before may live a moment longer.
    whole = 5 * 4 * (1000 + 2 * OPERATIONS)
    for left, risen in (reading for readings in run_ranks(2, _collectives) for reading in readings):
        assert left == 0
        assert 0 < risen <= 2 * whole
