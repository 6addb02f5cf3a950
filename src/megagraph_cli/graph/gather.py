"""Rows of a table gathered by a compiled kernel: those that follow are on their way while one is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.prefetch import prefetch_once

_AHEAD = 8
"""Rows that are under way together."""
_LINE = 64  # bytes of a cache line


@njit(nogil=True, cache=True)
def _fetch(table: NDArray[Any], row: np.uint64, width: np.uint64, step: np.uint64) -> None:
    start = row * width
    for column in range(np.uint64(0), width, step):
        prefetch_once(table, start + column)


@njit(nogil=True, cache=True)
def _gather(table: NDArray[Any], rows: NDArray[np.int64], width: int, out: NDArray[Any]) -> None:
    """``table`` and ``out`` are flat."""
    # Unsigned places: see slots.find_slot.
    count, columns = np.uint64(rows.shape[0]), np.uint64(width)
    ahead, step = np.uint64(_AHEAD), np.uint64(max(1, _LINE // table.itemsize))
    for i in range(min(ahead, count)):
        _fetch(table, np.uint64(rows[i]), columns, step)
    for i in range(count):
        if i + ahead < count:
            _fetch(table, np.uint64(rows[i + ahead]), columns, step)
        start, own = np.uint64(rows[i]) * columns, i * columns
        for column in range(columns):
            out[own + column] = table[start + column]


def gather_rows(table: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """``table[rows]`` as float32, of a contiguous table [., F] of float32 or float16; ``rows`` int64 lie within it."""
    assert table.flags.c_contiguous
    assert rows.size == 0 or (rows.min() >= 0 and rows.max() < table.shape[0])
    kind = np.uint16 if table.dtype == np.float16 else np.float32  # numba knows no float16
    out = np.empty((rows.size, table.shape[1]), dtype=table.dtype)
    # A plain view of one type, whether the table is mapped or not: kernels compile once.
    flat = table.view(np.ndarray).reshape(-1).view(kind)
    flat.flags.writeable = False
    _gather(flat, np.ascontiguousarray(rows), table.shape[1], out.reshape(-1).view(kind))
    return out.astype(np.float32, copy=False)
