"""Feature rows that the disk still has are asked for before they are needed, sorted, all of a batch at once.

Read one after another as they are touched, rows would cost a trip to the disk each. The page cache that they land in
is shared by all processes of the host.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import DenseFeatures, SparseFeatures

_SAMPLE = 64
"""Pages looked at to learn whether a batch's rows are in memory already, as they are once an epoch went by."""
_NEAR_PAGES = 8
"""Wanted pages no further apart are asked for together: a longer read costs less than another."""


def read_ahead(features: DenseFeatures | SparseFeatures | None, rows: Sequence[NDArray[np.int64]]) -> int:
    """Ask for the pages of the feature rows of some micro-batches (each ascending); the number of requests made.

    Does nothing where the arrays are not mapped from files, where their pages are in memory, or on systems that
    offer no such request.
    """
    if features is None or not rows:
        return 0
    wanted = np.unique(np.concatenate(rows)) if len(rows) > 1 else rows[0]
    if isinstance(features, DenseFeatures):
        size = features.x.strides[0]
        return _request(features.x, wanted * size, (wanted + 1) * size)
    starts, stops = features.indptr[wanted], features.indptr[wanted + 1]
    return sum(
        _request(array, starts * array.itemsize, stops * array.itemsize) for array in (features.indices, features.data)
    )


def _request(array: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> int:
    """Ask for the bytes [start, stop) of an array, both ascending."""
    system = _system()
    if system is None or not _is_mapped(array) or not starts.size:
        return 0
    page = mmap.PAGESIZE
    address = array.ctypes.data
    first, last = (address + starts) // page, (address + np.maximum(stops, starts + 1) - 1) // page
    if _all_in_memory(system, first, page):
        return 0
    cuts = np.flatnonzero(first[1:] - last[:-1] > _NEAR_PAGES) + 1
    begins = first[np.concatenate(([0], cuts))]
    ends = last[np.concatenate((cuts - 1, [first.size - 1]))] + 1
    for begin, end in zip((begins * page).tolist(), (ends * page).tolist(), strict=True):
        system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_WILLNEED)
    return int(begins.size)


def _is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a view of a mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _all_in_memory(system: Any, pages: NDArray[np.int64], page: int) -> bool:
    """Whether a sample of the pages is in memory, as far as this system can tell."""
    found = ctypes.c_ubyte()
    for number in pages[:: -(-pages.size // _SAMPLE)].tolist():
        failed = system.mincore(ctypes.c_void_p(number * page), ctypes.c_size_t(page), ctypes.byref(found))
        if not failed and not found.value & 1:
            return False
    return True


@cache
def _system() -> Any:
    """The C library, where it has madvise and mincore."""
    if not hasattr(mmap, "MADV_WILLNEED") or sys.platform not in ("linux", "darwin"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "madvise") and hasattr(library, "mincore") else None
