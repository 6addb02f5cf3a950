"""A Bloom filter with one hash for every row of neighbours: what is not in a row is nearly always told by one bit.

The filter of a row of n entries has n bytes and lies where the row lies: bit b is bit b % 8 of byte b // 8 counted from
the row's start. About one bit in nine is set; asked of both rows, one pair in seventy that is no edge seems to be one.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B1)
_LOW = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(8)
_HALF = np.uint64(32)


@njit(nogil=True, cache=True)
def hash_id(key: int | np.uint64) -> np.uint64:
    """32 bits of an id."""
    return (np.uint64(key) * _GOLDEN) & _LOW


@njit(nogil=True, cache=True)
def filter_bit(hashed: np.uint64, size: np.uint64) -> np.uint64:
    """Which bit of the filter of a row of ``size`` entries, less than 2^29, an id has."""
    return (hashed * (size * _BITS)) >> _HALF


@njit(nogil=True, cache=True)
def row_filters(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The filters of all rows, uint8 [nnz]."""
    filters = np.zeros(indices.shape[0], dtype=np.uint8)
    for row in range(indptr.shape[0] - 1):
        start, size = indptr[row], np.uint64(indptr[row + 1] - indptr[row])
        for entry in range(indptr[row], indptr[row + 1]):
            bit = filter_bit(hash_id(indices[entry]), size)
            filters[start + np.int64(bit >> np.uint64(3))] |= np.uint8(1 << np.int64(bit & np.uint64(7)))
    return filters
