"""Tables that let the sampler draw from its four arms without storing any of them (paper: Sampling).

A distribution over a row (a node's neighbours, a node's features, a feature's nodes) is stored as its
cumulative fractions in 32-bit fixed point: entry e holds ``floor(2^32 * sum(w[:e+1]) / sum(w))``. That costs what
a float32 costs and resolves 2^-32 of the row, where a float32 sum over a hub of 100,000 neighbours, or a feature
that a million nodes have, would lose whole per cents of an entry.

Legend: V nodes, E undirected edges, Q clusters, F features, d~ = degree + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.filters import row_filters
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures

FEATURES_NONE = 0
FEATURES_SPARSE = 1
FEATURES_SIGNED = 2
"""Sparse with negative entries: absolute values propose, the true similarity accepts."""
FEATURES_DENSE = 3

_ONE = 4294967296.0  # 2^32, the whole of a row in fixed point
_LISTED_DENSITY = 0.5
_CODED_COLUMNS = 32
"""Shorter rows lie in two cache lines as they are: a second, coded copy would spare nothing."""
CODE_TAIL = 8
"""Bytes of scale and error at the end of a coded row."""
_CACHE_LINE = 64


def build_tables(graph: Graph) -> dict[str, NDArray[Any]]:
    """Arrays that the sampler reads beside the graph, O(E + non-zero features) in time and memory.

    - ``node_scale`` float32 [V]: d~^-1/2; ``cluster_scale`` float32 [Q]: r_a = sqrt(s_a / D_a), D_a = s_a + the
      sizes of the neighbour clusters, so that the coarse A^ of two neighbours a, b is r_a r_b;
    - ``edge_cdf`` uint32 [2E]: steps to neighbour j with weight d~_j^-1/2 (a row of A^);
    - ``closed_edge_cdf`` uint32 [2E], ``closed_stay`` float32 [V], ``stay`` float32 [V]: the two steps of a row
      of A^^2 over closed neighbourhoods. The first goes to k with weight c_k / d~_k, c_k = the sum of d~^-1/2
      over N[k], and remains where it is with probability ``closed_stay``; the second remains with ``stay``;
    - ``edge_filter`` uint8 [2E] and ``coarse_filter``: a Bloom filter for every row of the graph and of the graph of
      clusters (filters.py);
    - ``feature_kind`` int64 [1] (FEATURES_*), ``feature_norm`` float32 [V] where there are features; where they
      are dense and have at least 32 columns ``feature_code`` int8 [V, W], W a multiple of 64: F entries, zeros, and
      two float32 (scale, error) in the last eight bytes; scale times entries is the row over its norm, but for a
      vector whose norm is at most error; where they
      are sparse ``feature_row_cdf`` uint32 [nnz], ``feature_column_indptr`` int64 [F+1],
      ``feature_column_rows`` int32 [nnz] and ``feature_column_cdf`` uint32 [nnz], all over the rows of nodes
      alone: super nodes are never drawn by similarity. Dense features that are non-negative and mostly zero
      are listed as sparse ones are: ``feature_indptr`` int64 [V+1], ``feature_indices`` int32 [nnz].
    """
    scale = 1.0 / np.sqrt(np.diff(graph.indptr) + 1.0)
    closed = scale + _row_sums(graph.indptr, graph.indices, scale)
    through = closed * scale * scale
    through_closed = through + _row_sums(graph.indptr, graph.indices, through)
    sizes = np.asarray(graph.cluster_sizes, dtype=np.float64)
    coarse_degree = sizes + _row_sums(graph.coarse_indptr, graph.coarse_indices, sizes)
    tables: dict[str, NDArray[Any]] = {
        "node_scale": scale.astype(np.float32),
        "cluster_scale": np.sqrt(sizes / coarse_degree).astype(np.float32),
        "edge_cdf": _row_cdfs(graph.indptr, graph.indices, scale),
        "closed_edge_cdf": _row_cdfs(graph.indptr, graph.indices, through),
        "closed_stay": (through / through_closed).astype(np.float32),
        "stay": (scale / closed).astype(np.float32),
        "edge_filter": row_filters(graph.indptr, graph.indices),
        "coarse_filter": row_filters(graph.coarse_indptr, graph.coarse_indices),
    }
    tables.update(_feature_tables(graph))
    return tables


def _feature_tables(graph: Graph) -> dict[str, NDArray[Any]]:
    features = graph.features
    if features is None:
        return {"feature_kind": np.array([FEATURES_NONE], dtype=np.int64)}
    if isinstance(features, DenseFeatures):
        x = features.x[: graph.num_nodes].astype(np.float32, copy=False)
        if _worth_listing(x):
            listed = _compress(x, graph.num_nodes)
            return {
                **_sparse_tables(listed, graph.num_nodes),
                "feature_indptr": listed.indptr,
                "feature_indices": listed.indices,
            }
        return _dense_tables(x, graph.num_nodes)
    return _sparse_tables(features, graph.num_nodes)


def _dense_tables(x: NDArray[np.float32], num_nodes: int) -> dict[str, NDArray[Any]]:
    norms = _dense_norms(x, num_nodes)
    tables: dict[str, NDArray[Any]] = {
        "feature_kind": np.array([FEATURES_DENSE], dtype=np.int64),
        "feature_norm": norms.astype(np.float32),
    }
    if x.shape[1] >= _CODED_COLUMNS:
        width = -(-(x.shape[1] + CODE_TAIL) // _CACHE_LINE) * _CACHE_LINE
        code = np.zeros((num_nodes, width), dtype=np.int8)
        _write_codes(x, norms, code, code.view(np.float32))
        tables["feature_code"] = code
    return tables


def _worth_listing(x: NDArray[np.float32]) -> bool:
    """Whether dense features are non-negative with enough zeros to be drawn exactly, as sparse ones are.

    Uniform proposals are accepted with the mean cosine, about the density of bags of words: where that is high
    proposals are cheap, where it is low (0.34 on Amazon Computers) lists of non-zeros draw twice as fast.
    """
    return x.size > 0 and bool(x.min() >= 0) and bool(np.count_nonzero(x) < _LISTED_DENSITY * x.size)


def _compress(x: NDArray[np.float32], num_rows: int) -> SparseFeatures:
    indptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum([np.count_nonzero(row) for row in x[:num_rows]], out=indptr[1:])
    return SparseFeatures(indptr, *_nonzeros(x, indptr), num_columns=int(x.shape[1]))


def _sparse_tables(features: SparseFeatures, num_nodes: int) -> dict[str, NDArray[Any]]:
    indptr = features.indptr[: num_nodes + 1]
    indices = features.indices[: indptr[-1]]
    data = features.data[: indptr[-1]].astype(np.float32, copy=False)
    signed = bool(indices.size) and bool(data.min() < 0)
    if signed:
        assert _rows_ascend(indptr, indices), "signed similarity merges feature rows: their columns must ascend"
    norms = _sparse_norms(indptr, data)
    counts = np.bincount(indices, minlength=features.num_columns)
    column_indptr = np.zeros(features.num_columns + 1, dtype=np.int64)
    np.cumsum(counts, out=column_indptr[1:])
    sums = _column_sums(indptr, indices, data, norms, features.num_columns)
    column_rows, column_cdf = _column_cdfs(indptr, indices, data, norms, column_indptr, sums)
    return {
        "feature_kind": np.array([FEATURES_SIGNED if signed else FEATURES_SPARSE], dtype=np.int64),
        "feature_norm": norms.astype(np.float32),
        "feature_row_cdf": _similarity_cdfs(indptr, indices, data, sums),
        "feature_column_indptr": column_indptr,
        "feature_column_rows": column_rows,
        "feature_column_cdf": column_cdf,
    }


@njit(nogil=True, cache=True)
def _fixed(fraction: float) -> np.uint32:
    return np.uint32(min(fraction * _ONE, _ONE - 1.0))


@njit(nogil=True, cache=True)
def _row_sums(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    sums = np.zeros(indptr.shape[0] - 1)
    for row in range(sums.shape[0]):
        for entry in range(indptr[row], indptr[row + 1]):
            sums[row] += weight[indices[entry]]
    return sums


@njit(nogil=True, cache=True)
def _row_cdfs(indptr: NDArray[np.int64], indices: NDArray[np.int32], weight: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Cumulative fractions of ``weight[column]`` along every row; uint32, one per entry."""
    # The total is summed in the order of the running sum, so that the last fraction is exactly 1.
    totals = _row_sums(indptr, indices, weight)
    cdf = np.empty(indices.shape[0], dtype=np.uint32)
    for row in range(totals.shape[0]):
        running = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            running += weight[indices[entry]]
            cdf[entry] = _fixed(running / totals[row])
    return cdf


@njit(nogil=True, cache=True)
def _rows_ascend(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> bool:
    for row in range(indptr.shape[0] - 1):
        for entry in range(indptr[row] + 1, indptr[row + 1]):
            if indices[entry] <= indices[entry - 1]:
                return False
    return True


@njit(nogil=True, cache=True)
def _dense_norms(x: NDArray[np.float32], num_rows: int) -> NDArray[np.float64]:
    norms = np.empty(num_rows)
    for row in range(num_rows):
        square = 0.0
        for column in range(x.shape[1]):
            square += np.float64(x[row, column]) * np.float64(x[row, column])
        norms[row] = np.sqrt(square)
    return norms


@njit(nogil=True, cache=True)
def _write_codes(
    x: NDArray[np.float32], norms: NDArray[np.float64], code: NDArray[np.int8], tail: NDArray[np.float32]
) -> None:
    """Fill coded rows, zero so far; ``tail`` float32 [V, W/4] is the same memory. Rows of norm 0 stay zero."""
    for row in range(norms.shape[0]):
        if norms[row] == 0.0:
            continue
        largest = 0.0
        for column in range(x.shape[1]):
            largest = max(largest, abs(np.float64(x[row, column])))
        scale = np.float32(largest / norms[row] / 127.0)
        square = 0.0
        for column in range(x.shape[1]):
            value = np.float64(x[row, column]) / norms[row]
            code[row, column] = np.int8(round(value / np.float64(scale)))
            square += (value - np.float64(scale) * code[row, column]) ** 2
        tail[row, -2] = scale
        tail[row, -1] = np.sqrt(square) * (1.0 + 1e-6)  # float32 rounds by less


@njit(nogil=True, cache=True)
def _nonzeros(x: NDArray[np.float32], indptr: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
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
def _sparse_norms(indptr: NDArray[np.int64], data: NDArray[np.float32]) -> NDArray[np.float64]:
    norms = np.empty(indptr.shape[0] - 1)
    for row in range(norms.shape[0]):
        square = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            square += np.float64(data[entry]) * np.float64(data[entry])
        norms[row] = np.sqrt(square)
    return norms


@njit(nogil=True, cache=True)
def _column_sums(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    norms: NDArray[np.float64],
    num_columns: int,
) -> NDArray[np.float64]:
    """Sum over nodes of |x_if| / ||x_i|| for every feature f."""
    sums = np.zeros(num_columns)
    for row in range(norms.shape[0]):
        if norms[row] > 0.0:
            for entry in range(indptr[row], indptr[row + 1]):
                sums[indices[entry]] += abs(np.float64(data[entry])) / norms[row]
    return sums


@njit(nogil=True, cache=True)
def _column_cdfs(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    norms: NDArray[np.float64],
    column_indptr: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """The nodes of every feature, ascending, and the cumulative fractions of |x_if| / ||x_i|| among them."""
    rows = np.empty(indices.shape[0], dtype=np.int32)
    cdf = np.zeros(indices.shape[0], dtype=np.uint32)
    cursor = column_indptr[:-1].copy()
    running = np.zeros(sums.shape[0])
    for row in range(norms.shape[0]):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            if norms[row] > 0.0:
                running[column] += abs(np.float64(data[entry])) / norms[row]
            rows[cursor[column]] = row
            # A column of zeros has no sum; its fractions stay 0 and no row ever leads to it.
            if sums[column] > 0.0:
                cdf[cursor[column]] = _fixed(running[column] / sums[column])
            cursor[column] += 1
    return rows, cdf


@njit(nogil=True, cache=True)
def _similarity_cdfs(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    sums: NDArray[np.float64],
) -> NDArray[np.uint32]:
    """Cumulative fractions of |x_if| * sums[f] along every node's features (its norm cancels)."""
    cdf = np.zeros(indices.shape[0], dtype=np.uint32)
    for row in range(indptr.shape[0] - 1):
        total = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            total += abs(np.float64(data[entry])) * sums[indices[entry]]
        running = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            running += abs(np.float64(data[entry])) * sums[indices[entry]]
            if total > 0.0:
                cdf[entry] = _fixed(running / total)
    return cdf
