"""Compiled loops over rows that fill the sampler's tables (tables.py says what they hold).

Those of features take some rows at a time, and what the rows before have left.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.nibbles import ERROR, LARGEST_CODE, OFFSET, SCALE, UPPER_ERROR, plane_bytes, write_digits

_ONE = 4294967296.0  # 2^32, the whole of a row in fixed point
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_ANYTHING = np.float32(2.0)  # an error with which no cosine decides


@njit(nogil=True, cache=True)
def fixed(fraction: float) -> np.uint32:
    """A fraction of a row in 32-bit fixed point."""
    return np.uint32(min(fraction * _ONE, _ONE - 1.0))


@njit(nogil=True, cache=True)
def row_sums(indptr: NDArray[np.int64], indices: NDArray[np.int32], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of ``weight[column]`` of every row."""
    sums = np.zeros(indptr.shape[0] - 1)
    for row in range(sums.shape[0]):
        for entry in range(indptr[row], indptr[row + 1]):
            sums[row] += weight[indices[entry]]
    return sums


@njit(nogil=True, cache=True)
def row_cdfs(indptr: NDArray[np.int64], indices: NDArray[np.int32], weight: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Cumulative fractions of ``weight[column]`` along every row; uint32, one per entry."""
    # The total is summed in the order of the running sum, so that the last fraction is exactly 1.
    totals = row_sums(indptr, indices, weight)
    cdf = np.empty(indices.shape[0], dtype=np.uint32)
    for row in range(totals.shape[0]):
        running = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            running += weight[indices[entry]]
            cdf[entry] = fixed(running / totals[row])
    return cdf


@njit(nogil=True, cache=True)
def rows_ascend(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> bool:
    """Whether the columns of every row ascend."""
    for row in range(indptr.shape[0] - 1):
        for entry in range(indptr[row] + 1, indptr[row + 1]):
            if indices[entry] <= indices[entry - 1]:
                return False
    return True


@njit(nogil=True, cache=True)
def write_codes(
    x: NDArray[np.float32], norms: NDArray[np.float64], code: NDArray[np.uint8], tail: NDArray[np.float32]
) -> None:
    """Fill coded rows (nibbles.py), zero so far; ``tail`` float32 [V, W/4] is the same memory. Rows of norm 0 stay
    zero; those whose norm float32 cannot hold in full precision are left to the rows themselves."""
    codes = np.empty(x.shape[1], dtype=np.int64)
    end = plane_bytes(x.shape[1]) // tail.itemsize
    for row in range(norms.shape[0]):
        if norms[row] == 0.0:
            continue
        if not (_SMALLEST <= norms[row] <= _LARGEST):
            tail[row, end + UPPER_ERROR] = tail[row, end + ERROR] = _ANYTHING
            continue
        largest = 0.0
        for column in range(x.shape[1]):
            largest = max(largest, abs(np.float64(x[row, column])))
        scale = np.float32(largest / norms[row] / LARGEST_CODE)
        square, coarse = 0.0, 0.0
        for column in range(x.shape[1]):
            value = np.float64(x[row, column]) / norms[row]
            codes[column] = round(value / np.float64(scale))
            square += (value - np.float64(scale) * codes[column]) ** 2
            coarse += (value - np.float64(scale) * (codes[column] + OFFSET >> 4 << 4)) ** 2
        write_digits(codes, code[row])
        tail[row, end + SCALE] = scale
        tail[row, end + UPPER_ERROR] = np.sqrt(coarse) * (1.0 + 1e-6)  # float32 rounds by less
        tail[row, end + ERROR] = np.sqrt(square) * (1.0 + 1e-6)


@njit(nogil=True, cache=True)
def sparse_norms(indptr: NDArray[np.int64], data: NDArray[np.float32]) -> NDArray[np.float64]:
    """The Euclidean norm of every row."""
    norms = np.empty(indptr.shape[0] - 1)
    for row in range(norms.shape[0]):
        square = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            square += np.float64(data[entry]) * np.float64(data[entry])
        norms[row] = np.sqrt(square)
    return norms


@njit(nogil=True, cache=True)
def dense_norms(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The Euclidean norm of every row."""
    norms = np.empty(x.shape[0])
    for row in range(x.shape[0]):
        square = 0.0
        for column in range(x.shape[1]):
            square += np.float64(x[row, column]) * np.float64(x[row, column])
        norms[row] = np.sqrt(square)
    return norms


@njit(nogil=True, cache=True)
def row_counts(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """Non-zero entries of the rows before each row, and of all: int64 [rows + 1]."""
    indptr = np.zeros(x.shape[0] + 1, np.int64)
    for row in range(x.shape[0]):
        indptr[row + 1] = indptr[row]
        for column in range(x.shape[1]):
            indptr[row + 1] += x[row, column] != 0.0
    return indptr


@njit(nogil=True, cache=True)
def nonzeros(x: NDArray[np.float32], indptr: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Columns and values of the non-zero entries, row by row; ``indptr`` is that of ``row_counts``."""
    indices = np.empty(indptr[-1], dtype=np.int32)
    data = np.empty(indptr[-1], dtype=np.float32)
    for row in range(indptr.shape[0] - 1):
        entry = indptr[row]
        for column in range(x.shape[1]):
            if x[row, column] != 0.0:
                indices[entry] = column
                data[entry] = x[row, column]
                entry += 1
    return indices, data


@njit(nogil=True, cache=True)
def add_column_sums(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    norms: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    """Adds |x_if| / ||x_i|| of some nodes to the sum of every feature f."""
    for row in range(norms.shape[0]):
        if norms[row] > 0.0:
            for entry in range(indptr[row], indptr[row + 1]):
                sums[indices[entry]] += abs(np.float64(data[entry])) / norms[row]


@njit(nogil=True, cache=True)
def fill_columns(
    first: int,
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    norms: NDArray[np.float64],
    sums: NDArray[np.float64],
    cursor: NDArray[np.int64],
    running: NDArray[np.float64],
    rows: NDArray[np.int32],
    cdf: NDArray[np.uint32],
) -> None:
    """The nodes of every feature, ascending, and the cumulative fractions of |x_if| / ||x_i|| among them: of the nodes
    from ``first`` on, each column from its ``cursor`` and ``running`` sum on. ``cdf`` is zero so far."""
    for row in range(norms.shape[0]):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            if norms[row] > 0.0:
                running[column] += abs(np.float64(data[entry])) / norms[row]
            rows[cursor[column]] = first + row
            # A column of zeros has no sum; its fractions stay 0 and no row ever leads to it.
            if sums[column] > 0.0:
                cdf[cursor[column]] = fixed(running[column] / sums[column])
            cursor[column] += 1


@njit(nogil=True, cache=True)
def similarity_cdfs(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    sums: NDArray[np.float64],
    cdf: NDArray[np.uint32],
) -> None:
    """Cumulative fractions of |x_if| * sums[f] along every node's features (its norm cancels); zero so far."""
    for row in range(indptr.shape[0] - 1):
        total = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            total += abs(np.float64(data[entry])) * sums[indices[entry]]
        running = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            running += abs(np.float64(data[entry])) * sums[indices[entry]]
            if total > 0.0:
                cdf[entry] = fixed(running / total)
