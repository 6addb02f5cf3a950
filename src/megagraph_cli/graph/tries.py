"""Tries in the making, and what the kernels of all arms do with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.nibbles import plane_bytes
from megagraph_cli.graph.streams import HALF, LOW

BLOCK = 4096
"""Most tries that are made together."""
WINDOW = 24
"""Tries whose proposals by similarity are under way together."""
_ONE = np.uint64(1)


class Block(NamedTuple):
    """Tries in the making.

    ``state`` uint64 their streams, ``target`` int64 whom they are for, ``arm`` int8, ``node`` int64 where they stand
    and, in the end, what they drew (-1: a dead end). The rest is scratch: ``active`` lists tries, ``place`` is where a
    try's step leads, ``level``, ``proposals``, ``stage`` and ``product`` are of a try's proposal by similarity. Of the
    targets of those under way, ``codes`` int16 holds the features' codes, ``own`` float64 [WINDOW, 3] the sum of
    these, their scale and their error.
    """

    state: NDArray[np.uint64]
    target: NDArray[np.int64]
    arm: NDArray[np.int8]
    node: NDArray[np.int64]
    active: NDArray[np.int64]
    place: NDArray[np.int64]
    level: NDArray[np.float64]
    proposals: NDArray[np.int64]
    stage: NDArray[np.int64]
    product: NDArray[np.float64]
    codes: NDArray[np.int16]
    own: NDArray[np.float64]


@njit(nogil=True, cache=True)
def make_block(columns: int) -> Any:
    """An empty block for nodes of so many coded features."""
    return Block(
        np.zeros(BLOCK, np.uint64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int8),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.float64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.float64),
        np.zeros(WINDOW * 2 * plane_bytes(columns), np.int16),
        np.zeros((WINDOW, 3)),
    )


@njit(nogil=True, cache=True)
def pick(word: np.uint64, cdf: NDArray[np.uint32], start: int, stop: int) -> int:
    """The entry of a row drawn by its cumulative fractions (tables.py); entries of weight 0 are never drawn."""
    # Below the last fraction, 2^32 - 1, so that the search always ends at an entry.
    point = min(word >> HALF, LOW - np.uint64(1))
    low, high = np.uint64(start), np.uint64(stop - 1)  # unsigned: see slots.find_slot
    while low < high:
        middle = (low + high) >> _ONE
        if np.uint64(cdf[middle]) > point:
            high = middle
        else:
            low = middle + _ONE
    return int(low)
