"""Tries in the making, and what the kernels of all arms do with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.choice import either
from megagraph_cli.graph.prefetch import prefetch
from megagraph_cli.graph.streams import HALF, LOW

BLOCK = 4096
"""Most tries that are made together."""
_NONE, _ONE = np.uint64(0), np.uint64(1)
_FEW = np.uint64(64)
"""Among so few entries it does not pay to fetch what a search reads next."""


class Block(NamedTuple):
    """Tries in the making.

    ``state`` uint64 their streams, ``target`` int64 whom they are for, ``arm`` int8, ``node`` int64 where they stand
    and, in the end, what they drew (-1: a dead end). The rest is scratch, int64: ``active`` lists tries, ``place`` is
    where a try's step leads, ``starts`` [4] where the tries of an arm are listed.
    """

    state: NDArray[np.uint64]
    target: NDArray[np.int64]
    arm: NDArray[np.int8]
    node: NDArray[np.int64]
    active: NDArray[np.int64]
    place: NDArray[np.int64]
    starts: NDArray[np.int64]


@njit(nogil=True, cache=True)
def make_block() -> Any:
    """A block whose tries are yet to be made. What is not written of it, the arms of super nodes, nobody looks at."""
    return Block(
        np.empty(BLOCK, np.uint64),
        np.empty(BLOCK, np.int64),
        np.empty(BLOCK, np.int8),
        np.empty(BLOCK, np.int64),
        np.empty(BLOCK, np.int64),
        np.empty(BLOCK, np.int64),
        np.empty(4, np.int64),
    )


@njit(nogil=True, cache=True)
def pick(word: np.uint64, cdf: NDArray[np.uint32], start: int, stop: int) -> int:
    """The entry of a row drawn by its cumulative fractions (tables.py); entries of weight 0 are never drawn."""
    # Below the last fraction, 2^32 - 1: the entry is the first whose fraction is above the point.
    point = min(word >> HALF, LOW - _ONE)
    low, left = np.uint64(start), np.uint64(stop - start)  # unsigned: see slots.find_slot
    while left > _ONE:
        half = left >> _ONE
        left -= half
        if left > _FEW:  # a choice without a branch waits for what it reads: both that may come next are fetched
            further = low + (left >> _ONE) - _ONE
            prefetch(cdf, further)
            prefetch(cdf, further + half)
        low += either(np.uint64(cdf[low + half - _ONE]) <= point, half, _NONE)
    return int(low)
