"""Dense feature tables that are read block by block: what is larger than memory still becomes a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

BLOCK_ENTRIES = 1 << 20
"""Of a block of rows: 4 MB in float32."""


@dataclass(frozen=True)
class Rows:
    """A table [V, F] whose rows come in blocks, in order.

    ``shape`` and ``dtype`` are known before any row is read. ``blocks``, given a folder for what must lie on the disk
    meanwhile, reads the table anew each time and raises MgraphError (exit 2) where the file turns out to be damaged.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[Path], Iterator[NDArray[Any]]]

    @property
    def ndim(self) -> int:
        """Of a table 2; files hold others, which are refused by their shape."""
        return len(self.shape)


def block_rows(columns: int) -> int:
    """Rows of one block of a table with so many columns."""
    return max(1, BLOCK_ENTRIES // max(1, columns))


def cuts(indptr: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of blocks of CSR rows of at most so many entries, or of one row."""
    first, rows = 0, indptr.size - 1
    while first < rows:
        last = int(np.searchsorted(indptr, indptr[first] + BLOCK_ENTRIES, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def rows_of(array: NDArray[Any] | sparse.csr_matrix) -> Rows:
    """The rows of an array or a CSR matrix, in memory or mapped."""
    return Rows(tuple(array.shape), np.dtype(array.dtype), lambda _scratch: slices(array))


def slices(array: Any) -> Iterator[NDArray[Any]]:
    """Dense blocks of rows of an array or a CSR matrix."""
    rows, columns = array.shape
    step = block_rows(columns)
    for first in range(0, rows, step):
        block = array[first : first + step]
        yield block.toarray() if sparse.issparse(block) else block
