"""An open-addressed set of positions into a list of members, for compiled kernels.

``slots`` int16 holds positions or -1, its size a power of two at least sixteen times the members it may come to hold:
what is not a member is nearly always told by one empty slot. ``shift`` is 64 minus the logarithm of that size.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def make_slots(capacity: int) -> tuple[NDArray[np.int16], np.uint64]:
    """Empty slots for up to ``capacity`` members, less than 2^15, and their shift."""
    shift = np.uint64(63)
    size = 2
    while size < 16 * capacity:
        size *= 2
        shift -= np.uint64(1)
    return np.full(size, -1, dtype=np.int16), shift


@njit(nogil=True, cache=True)
def find_slot(slots: NDArray[np.int16], shift: np.uint64, members: NDArray[np.int32], key: np.int32) -> np.uint64:
    """Where ``key`` stands, or would stand, in an open-addressed set of positions into ``members``."""
    # Unsigned places: numba reads signed ones from the end where they are negative, which costs a test each time.
    slot = (np.uint64(key) * _GOLDEN) >> shift
    while slots[slot] >= 0 and members[np.uint64(slots[slot])] != key:
        slot = (slot + np.uint64(1)) & np.uint64(slots.shape[0] - 1)
    return slot


@njit(nogil=True, cache=True)
def add_member(
    slots: NDArray[np.int16], shift: np.uint64, members: NDArray[np.int32], count: int, key: np.int32
) -> int:
    """Position of ``key`` among the members; it is appended, at ``count``, if it was not there."""
    slot = find_slot(slots, shift, members, key)
    if slots[slot] < 0:
        slots[slot] = count
        members[count] = key
    return int(slots[slot])
