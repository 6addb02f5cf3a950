"""What a worker does about the pages of a mapped graph before they are touched.

Feature rows that the disk still has are asked for before they are needed, sorted, all of a batch at once: read one
after another as they are touched, rows would cost a trip to the disk each. Arrays that are in memory already are
entered in the process's tables at once: page by page as they are touched, that would slow the first thousands of
sequences down. The page cache is shared by all processes of the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.hostmemory import available_bytes

_SAMPLE = 64
"""Rows looked at to learn whether a batch's rows are in memory already, as they are once an epoch went by."""
_NEARLY_ALL = 0.98  # of an array's pages
_WORTH_BYTES = 1 << 26  # the processor finds its way about less without large pages
_AT_ONCE_BYTES = 1 << 28
_PLENTIFUL = 0.5  # of the free memory, at most, for all of a graph
_LARGE_PAGES = 14  # MADV_HUGEPAGE
_POPULATE_READ = 22  # MADV_POPULATE_READ
_NEAR_PAGES = 8
"""Wanted pages no further apart are asked for together: a longer read costs less than another."""


def read_ahead(features: DenseFeatures | SparseFeatures | None, rows: Sequence[NDArray[np.int64]]) -> int:
    """Ask for the pages of the feature rows of some micro-batches (each ascending); the number of requests made.

    Does nothing where the arrays are not mapped from files, where their pages are in memory, or on systems that
    offer no such request.
    """
    system = _system()
    if features is None or not rows or system is None:
        return 0
    needed = np.concatenate(rows)
    sample = needed[:: max(1, -(-needed.size // _SAMPLE))]
    if _tells(features) and _all_in_memory(system, _pages(features, sample)):
        return 0
    return sum(_request(system, first, last) for first, last in _pages(features, np.unique(needed)))


def enter_resident(graph: Graph) -> int:
    """Enter the pages of mapped arrays in this process's tables, where nearly all of an array is in memory; the bytes
    entered.

    At most a fiftieth of an array is read from the disk. Does nothing on systems without such a request (Linux before
    5.14), and for files of which the system does not tell what is in memory. Where memory is plentiful, large pages are
    asked for: most of what a draw waits for is the processor's search for the places of small ones. They come with what
    is read from the disk from then on (``large_pages``). Where a graph is larger than the memory that is free, a page
    that is missing is read alone: what systems read beside it, up to megabytes, would drive out what is needed.
    """
    system, entered = _system(), 0
    if system is None or sys.platform != "linux":
        return 0
    arrays = [array for array in _arrays(graph) if array.nbytes and _file_of(array)]
    whole = sum(array.nbytes for array in arrays)
    large, scarce = _is_plentiful(whole), whole > available_bytes()
    if scarce:
        # Labels are small, and a split reads them one after another.
        for start, length in [_piece(array) for array in arrays if array is not graph.labels]:
            system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_RANDOM)
    for start, length in [_piece(array) for array in arrays if _tells_of(array)]:
        found = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        place, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        if large:
            system.madvise(place, size, _LARGE_PAGES)  # it may not know that: small ones then
        if system.mincore(place, size, found.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))):
            continue
        if np.count_nonzero(found & 1) < _NEARLY_ALL * found.size:
            continue
        if not system.madvise(place, size, _POPULATE_READ):
            entered += length
    return entered


def large_pages(graph: Graph, folder: Path, begin: Callable[[], None]) -> None:
    """Have what memory holds of a graph just written lie there in large pages, where memory is plentiful.

    Files that are written page by page lie in small ones, and stay there until they are read from the disk again: so
    they are let go of and read. ``graph`` is mapped from the files of ``folder``, and by nobody else yet.
    ``begin`` is called before that is done. Nothing happens on systems that cannot read them back at once (Linux before
    5.14).
    """
    system = _system()
    if system is None or sys.platform != "linux":
        return
    pieces = [_piece(array) for array in _arrays(graph) if array.nbytes and _file_of(array)]
    size = sum(length for _, length in pieces)
    if size < _WORTH_BYTES or not _is_plentiful(size) or not _populates(system, pieces[0][0]):
        return
    begin()
    with suppress(OSError):  # the store is whole already: all that is at stake is how fast it is drawn from
        for path in sorted(folder.glob("*.npy")):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # what is not on the disk yet would be kept
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for start, length in pieces:
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _LARGE_PAGES)
        for at in range(start, start + length, _AT_ONCE_BYTES):  # a signal comes through between two requests
            most = min(_AT_ONCE_BYTES, start + length - at)
            system.madvise(ctypes.c_void_p(at), ctypes.c_size_t(most), _POPULATE_READ)


def _populates(system: Any, start: int) -> bool:
    """Whether the system reads mapped pages in at once when it is asked to."""
    return not system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), _POPULATE_READ)


def _piece(array: NDArray[Any]) -> tuple[int, int]:
    """(address, bytes) of the memory from the beginning of an array's first page to its end."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return start, array.ctypes.data + array.nbytes - start


def _is_plentiful(needed_bytes: int) -> bool:
    return needed_bytes <= _PLENTIFUL * available_bytes()


def _arrays(graph: Graph) -> list[NDArray[Any]]:
    """All arrays of a graph that batches are made from."""
    own: list[NDArray[Any]] = [
        graph.indptr,
        graph.indices,
        graph.labels,
        graph.clusters,
        graph.coarse_indptr,
        graph.coarse_indices,
    ]
    features = graph.features
    if isinstance(features, DenseFeatures):
        own.append(features.x)
    elif features is not None:
        own += [features.indptr, features.indices, features.data]
    return [*own, *graph.tables.values()]


Pages = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First and last page of some pieces of memory."""


def _pages(features: DenseFeatures | SparseFeatures, rows: NDArray[np.int64]) -> list[Pages]:
    """The pages of some rows, for each mapped array that holds a part of them."""
    arrays: tuple[NDArray[Any], ...]
    if isinstance(features, DenseFeatures):
        arrays = (features.x,)
        starts, stops = rows, rows + 1
    else:
        arrays = (features.indices, features.data)
        starts, stops = features.indptr[rows], features.indptr[rows + 1]
    return [_pages_of(array, starts, stops) for array in arrays if _file_of(array)]


def _pages_of(array: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Pages:
    address, step = array.ctypes.data, array.strides[0]
    last_bytes = np.maximum(stops * step, starts * step + 1) - 1
    return (address + starts * step) // mmap.PAGESIZE, (address + last_bytes) // mmap.PAGESIZE


def _request(system: Any, first: NDArray[np.int64], last: NDArray[np.int64]) -> int:
    """Ask for pieces of memory, ascending, those that lie near each other together; the number of requests."""
    cuts = np.flatnonzero(first[1:] - last[:-1] > _NEAR_PAGES) + 1
    begins = first[np.concatenate(([0], cuts))] * mmap.PAGESIZE
    ends = (last[np.concatenate((cuts - 1, [first.size - 1]))] + 1) * mmap.PAGESIZE
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_WILLNEED)
    return int(begins.size)


def _file_of(array: NDArray[Any]) -> Path | None:
    """The file that an array is a mapped view of; None where it is none."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.filename is not None:
            return Path(base.filename)
        base = base.base
    return None


def _tells(features: DenseFeatures | SparseFeatures) -> bool:
    return _tells_of(features.x if isinstance(features, DenseFeatures) else features.data)


def _tells_of(array: NDArray[Any]) -> bool:
    """Whether the system says which pages of an array are in memory.

    Of files that are not ours, and that we may not write, Linux says that all of them are.
    """
    path = _file_of(array)
    return path is None or _is_own(path)


@cache
def _is_own(path: Path) -> bool:
    return path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)


def _all_in_memory(system: Any, pieces: list[Pages]) -> bool:
    """Whether the first page of every piece is in memory, as far as this system can tell."""
    found = ctypes.c_ubyte()
    told, size = ctypes.byref(found), ctypes.c_size_t(mmap.PAGESIZE)
    for first, _ in pieces:
        for place in map(ctypes.c_void_p, (first * mmap.PAGESIZE).tolist()):
            if not system.mincore(place, size, told) and not found.value & 1:
                return False
    return True


@cache
def _system() -> Any:
    """The C library, where it has madvise and mincore."""
    if not hasattr(mmap, "MADV_WILLNEED") or sys.platform not in ("linux", "darwin"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "madvise") and hasattr(library, "mincore") else None
