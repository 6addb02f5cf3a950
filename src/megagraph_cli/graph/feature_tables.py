"""The sampler's tables of feature similarity (tables.py says what they are), made from blocks of rows.

Features may be larger than memory, and so may their tables: rows are read from the mapped store in blocks, and arrays
as large as the features are filled where the caller has them.

Legend: V nodes, F features, nnz non-zero entries of the rows of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megagraph_cli.graph import table_kernels as kernels
from megagraph_cli.graph.graph import Graph, SparseFeatures
from megagraph_cli.graph.nibbles import plane_bytes
from megagraph_cli.graph.readers.rows import cuts, slices

FEATURES_NONE = 0
FEATURES_SPARSE = 1
FEATURES_SIGNED = 2
"""Sparse with negative entries: absolute values propose, the true similarity accepts."""
FEATURES_DENSE = 3

_LISTED_DENSITY = 0.5
_CODED_COLUMNS = 32
"""Shorter rows lie in two cache lines as they are: a second, coded copy would spare nothing."""
_CACHE_LINE = 64

Allocate = Callable[[str, DTypeLike, tuple[int, ...]], NDArray[Any]]
"""Given a table's name, dtype and shape: zeros that are to become that table."""


def in_memory(_name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros, wherever numpy has them."""
    return np.zeros(shape, dtype)


def feature_tables(graph: Graph, allocate: Allocate) -> dict[str, NDArray[Any]]:
    """The tables called ``feature_*``; dense features that are worth it are listed as sparse ones are."""
    features, num_nodes = graph.features, graph.num_nodes
    if features is None:
        return {"feature_kind": np.array([FEATURES_NONE], dtype=np.int64)}
    if isinstance(features, SparseFeatures):
        nnz = int(features.indptr[num_nodes])
        first, second = (_sparse_blocks(features, num_nodes) for _ in range(2))
        return _listed_tables(first, second, (num_nodes, features.num_columns, nnz), allocate)
    x = features.x[:num_nodes]
    least, nnz = _least_and_nonzero(x)
    if not _worth_listing(x.size, least, nnz):
        return _dense_tables(x, allocate)
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    indices = allocate("feature_indices", np.int32, (nnz,))
    recorded = _recorded(_nonzero_blocks(x), indptr, indices)
    return {
        **_listed_tables(recorded, _nonzero_blocks(x), (num_nodes, features.num_columns, nnz), allocate),
        "feature_indptr": indptr,
        "feature_indices": indices,
    }


def _single_blocks(x: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, rows) in float32."""
    first = 0
    for block in slices(x):
        yield first, block.astype(np.float32, copy=False)
        first += block.shape[0]


def _least_and_nonzero(x: NDArray[Any]) -> tuple[float, int]:
    least, nonzero = np.inf, 0
    for _, block in _single_blocks(x):
        least = min(least, float(block.min(initial=np.inf)))
        nonzero += int(np.count_nonzero(block))
    return least, nonzero


def _worth_listing(size: int, least: float, nonzero: int) -> bool:
    """Whether dense features are non-negative with enough zeros to be drawn exactly, as sparse ones are.

    Uniform proposals are accepted with the mean cosine, about the density of bags of words: where that is high
    proposals are cheap, where it is low (0.34 on Amazon Computers) lists of non-zeros draw twice as fast.
    """
    return size > 0 and least >= 0 and nonzero < _LISTED_DENSITY * size


def _dense_tables(x: NDArray[Any], allocate: Allocate) -> dict[str, NDArray[Any]]:
    num_nodes, columns = x.shape
    norms = np.empty(num_nodes, dtype=np.float32)
    tables: dict[str, NDArray[Any]] = {
        "feature_kind": np.array([FEATURES_DENSE], dtype=np.int64),
        "feature_norm": norms,
    }
    code = np.zeros((num_nodes, 0), dtype=np.uint8)
    if columns >= _CODED_COLUMNS:
        width = -(-2 * plane_bytes(columns) // _CACHE_LINE) * _CACHE_LINE
        code = tables["feature_code"] = allocate("feature_code", np.uint8, (num_nodes, width))
    for first, block in _single_blocks(x):
        own = slice(first, first + block.shape[0])
        exact = kernels.dense_norms(block)
        with np.errstate(over="ignore"):  # infinite: nothing is similar to such a row
            norms[own] = exact
        if code.size:
            kernels.write_codes(block, exact, code[own], code[own].view(np.float32))
    return tables


class _Listed(NamedTuple):
    """Non-zero entries of the rows from ``first`` on: ``indptr`` int64 from 0, ``indices`` int32, ``data`` float32."""

    first: int
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.float32]

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.indptr.size - 1)


def _sparse_blocks(features: SparseFeatures, num_nodes: int) -> Iterator[_Listed]:
    indptr = features.indptr[: num_nodes + 1]
    for first, last in cuts(indptr):
        entries = slice(int(indptr[first]), int(indptr[last]))
        data = features.data[entries].astype(np.float32, copy=False)
        yield _Listed(first, indptr[first : last + 1] - indptr[first], features.indices[entries], data)


def _nonzero_blocks(x: NDArray[Any]) -> Iterator[_Listed]:
    for first, block in _single_blocks(x):
        indptr = kernels.row_counts(block)
        yield _Listed(first, indptr, *kernels.nonzeros(block, indptr))


def _recorded(blocks: Iterator[_Listed], indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Iterator[_Listed]:
    """The same blocks, entered in ``indptr`` [V+1] and ``indices`` [nnz] as they go by."""
    for block in blocks:
        start = indptr[block.first]
        indptr[block.first + 1 : block.rows.stop + 1] = start + block.indptr[1:]
        indices[start : start + block.indices.size] = block.indices
        yield block


def _listed_tables(
    first_pass: Iterator[_Listed], second_pass: Iterator[_Listed], sizes: tuple[int, int, int], allocate: Allocate
) -> dict[str, NDArray[Any]]:
    """Tables of listed features; ``sizes`` are nodes, features and non-zero entries."""
    num_nodes, num_columns, nnz = sizes
    norms = np.empty(num_nodes)
    counts = np.zeros(num_columns + 1, dtype=np.int64)
    sums = np.zeros(num_columns)
    signed, ascending = False, True
    for block in first_pass:
        _, indptr, indices, data = block
        signed |= bool(data.size) and bool(data.min() < 0)
        ascending = ascending and kernels.rows_ascend(indptr, indices)
        norms[block.rows] = kernels.sparse_norms(indptr, data)
        counts[1:] += np.bincount(indices, minlength=num_columns)
        kernels.add_column_sums(indptr, indices, data, norms[block.rows], sums)
    assert ascending or not signed, "signed similarity merges feature rows: their columns must ascend"
    column_indptr = np.cumsum(counts)
    column_rows = allocate("feature_column_rows", np.int32, (nnz,))
    column_cdf = allocate("feature_column_cdf", np.uint32, (nnz,))
    row_cdf = allocate("feature_row_cdf", np.uint32, (nnz,))
    cursor, running, end = column_indptr[:-1].copy(), np.zeros(num_columns), 0
    for block in second_pass:
        first, indptr, indices, data = block
        own = norms[block.rows]
        kernels.fill_columns(first, indptr, indices, data, own, sums, cursor, running, column_rows, column_cdf)
        kernels.similarity_cdfs(indptr, indices, data, sums, row_cdf[end : end + data.size])
        end += data.size
    return {
        "feature_kind": np.array([FEATURES_SIGNED if signed else FEATURES_SPARSE], dtype=np.int64),
        "feature_norm": norms.astype(np.float32),
        "feature_row_cdf": row_cdf,
        "feature_column_indptr": column_indptr,
        "feature_column_rows": column_rows,
        "feature_column_cdf": column_cdf,
    }
