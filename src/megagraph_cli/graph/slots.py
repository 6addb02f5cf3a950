"""An open-addressed set of positions into a list of members, for compiled kernels.

``slots`` int32 holds positions or -1, its size a power of two at least four times the members it may come to
hold; ``shift`` is 64 minus the logarithm of that size.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def make_slots(capacity: int) -> tuple[NDArray[np.int32], np.uint64]:
    """Empty slots for up to ``capacity`` members, and their shift."""
    shift = np.uint64(63)
    size = 2
    while size < 4 * capacity:
        size *= 2
        shift -= np.uint64(1)
    return np.full(size, -1, dtype=np.int32), shift


@njit(nogil=True, cache=True)
def find_slot(slots: NDArray[np.int32], shift: np.uint64, members: NDArray[np.int32], key: np.int32) -> int:
    """Where ``key`` stands, or would stand, in an open-addressed set of positions into ``members``."""
    slot = np.int64((np.uint64(key) * _GOLDEN) >> shift)
    while slots[slot] >= 0 and members[slots[slot]] != key:
        slot = (slot + 1) & (slots.shape[0] - 1)
    return int(slot)


@njit(nogil=True, cache=True)
def add_member(
    slots: NDArray[np.int32], shift: np.uint64, members: NDArray[np.int32], count: int, key: np.int32
) -> int:
    """Position of ``key`` among the members; it is appended, at ``count``, if it was not there."""
    slot = find_slot(slots, shift, members, key)
    if slots[slot] < 0:
        slots[slot] = count
        members[count] = key
    return int(slots[slot])
