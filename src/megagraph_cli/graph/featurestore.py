"""Feature rows into the store, and the rows of super nodes after them: the mean of each cluster's.

Dense rows go by in blocks and are added up on their way, so that features larger than memory are read once.

Legend: V nodes, Q clusters, F input features.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.graph.coarsen import Coarse
from megagraph_cli.graph.density import count_entries
from megagraph_cli.graph.readers.features import finite_blocks, is_sparse, super_blocks
from megagraph_cli.graph.readers.rows import BLOCK_ENTRIES, Rows, slices
from megagraph_cli.graph.reserved import Spool, scratch_array
from megagraph_cli.graph.writer import ArrayWriter


def write_features(
    origin: str, features: Rows | sparse.csr_matrix | None, coarse: Coarse, dtype: str, writer: ArrayWriter
) -> int:
    """Checked features [V, F] as ``dtype``, float32 or float16: CSR stays CSR, rows become CSR below 25 % density and
    dense otherwise. Returns how many of the nodes' entries are not zero.

    Raises MgraphError (exit 2) on NaN or infinite values, and where a file turns out to be damaged.
    """
    nonzero = 0
    if isinstance(features, Rows):
        nonzero, features = _write_dense(origin, features, coarse, dtype, writer)
    return nonzero if features is None else _write_sparse(features, coarse, dtype, writer)


def _write_dense(
    origin: str, features: Rows, coarse: Coarse, dtype: str, writer: ArrayWriter
) -> tuple[int, sparse.csr_matrix | None]:
    """(entries that are not zero, None) where the features are dense. They turn out to be sparse when all went by: then
    the CSR to keep stands beside their number."""
    num_nodes, columns = features.shape
    num_clusters = coarse.sizes.shape[0]
    weights = (1.0 / coarse.sizes).astype(np.float32)
    means = scratch_array(writer.folder, np.float32, (num_clusters, columns))
    nonzero = first = 0
    with writer.stream("features_x", dtype, (num_nodes + num_clusters, columns)) as out:
        for block in finite_blocks(origin, features, dtype, writer.folder):
            out.write(block)
            nonzero += int(np.count_nonzero(block))
            _add_rows(_single(block), coarse.clusters[first : first + block.shape[0]], weights, means)
            first += block.shape[0]
        if is_sparse(nonzero, features.shape):
            out.give_up()
            return nonzero, _csr(out.rows(num_nodes), writer.folder)
        for block in slices(means):
            out.write(block.astype(dtype, copy=False))
    return nonzero, None


def _single(block: NDArray[Any]) -> NDArray[np.float32]:
    """Rows as kernels read them: numba knows no float16 on a CPU."""
    return np.ascontiguousarray(block, dtype=np.float32)


@njit(nogil=True, cache=True)
def _add_rows(
    block: NDArray[np.float32], clusters: NDArray[np.int32], weights: NDArray[np.float32], sums: NDArray[np.float32]
) -> None:
    """Adds each row to its cluster's, in float32: over ascending blocks, members are added in ascending order."""
    for row in range(block.shape[0]):
        cluster = clusters[row]
        for column in range(block.shape[1]):
            sums[cluster, column] += weights[cluster] * block[row, column]


def _csr(x: NDArray[Any], scratch: Path) -> sparse.csr_matrix:
    """The CSR of dense rows, float32, its entries in files of ``scratch``."""
    return _stacked((sparse.csr_matrix(_single(block)) for block in slices(x)), x.shape[1], scratch)


def _stacked(blocks: Iterable[sparse.csr_matrix], columns: int, scratch: Path) -> sparse.csr_matrix:
    """Blocks of CSR rows as one, its entries in files of ``scratch``."""
    indices, data = Spool(scratch, np.int32), Spool(scratch, np.float32)
    counts = [np.zeros(1, np.int64)]
    for block in blocks:
        indices.append(block.indices)
        data.append(block.data)
        counts.append(np.diff(block.indptr).astype(np.int64))
    indptr = np.cumsum(np.concatenate(counts))
    if indptr[-1] <= np.iinfo(np.int32).max:
        indptr = indptr.astype(np.int32)  # scipy has both index arrays of one type and would copy the other
    return sparse.csr_matrix((data.array(), indices.array(), indptr), shape=(indptr.size - 1, columns))


def _write_sparse(features: sparse.csr_matrix, coarse: Coarse, dtype: str, writer: ArrayWriter) -> int:
    blocks = super_blocks(features, coarse.clusters, coarse.sizes)
    below = _stacked(blocks, features.shape[1], writer.folder)
    shifted = below.indptr[1:].astype(np.int64) + features.nnz
    writer.put("features_indptr", features.indptr.astype(np.int64), shifted)
    for name, kind, parts in (
        ("features_indices", "int32", (features.indices, below.indices)),
        ("features_data", dtype, (features.data, below.data)),
    ):
        with writer.stream(name, kind, (features.nnz + below.nnz,)) as out:
            for part in parts:
                for first in range(0, part.size, BLOCK_ENTRIES):
                    out.write(part[first : first + BLOCK_ENTRIES].astype(kind, copy=False))
    return count_entries(features.data)
