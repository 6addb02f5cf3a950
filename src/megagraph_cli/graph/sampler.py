"""What the drawing kernels read of a prepared graph, in one shape for every kind of graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures

ARMS = ("pagerank", "neighbours", "two_steps", "similarity")
"""q0 to q3, in the order of the sampling weights and of the recorded arms."""


class SamplingArrays(NamedTuple):
    """The graph and its tables (see tables.build_tables), read-only; what a graph lacks has length 0.

    Always the same types, so that numba compiles one specialisation whatever the features are: float16 features are
    the bit patterns in ``feature_half`` or ``feature_half_data``, and ``feature_x`` and ``feature_data`` are empty.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    clusters: NDArray[np.int32]
    coarse_indptr: NDArray[np.int64]
    coarse_indices: NDArray[np.int32]
    cluster_scale: NDArray[np.float32]
    edge_cdf: NDArray[np.uint32]
    closed_edge_cdf: NDArray[np.uint32]
    closed_stay: NDArray[np.float32]
    stay: NDArray[np.float32]
    edge_filter: NDArray[np.uint8]
    coarse_filter: NDArray[np.uint8]
    feature_kind: int
    feature_norm: NDArray[np.float32]
    feature_x: NDArray[np.float32]
    feature_half: NDArray[np.uint16]
    feature_code: NDArray[np.uint8]
    feature_code_tail: NDArray[np.float32]
    feature_indptr: NDArray[np.int64]
    feature_indices: NDArray[np.int32]
    feature_data: NDArray[np.float32]
    feature_half_data: NDArray[np.uint16]
    feature_row_cdf: NDArray[np.uint32]
    feature_column_indptr: NDArray[np.int64]
    feature_column_rows: NDArray[np.int32]
    feature_column_cdf: NDArray[np.uint32]


def sampling_arrays(graph: Graph) -> SamplingArrays:
    """Views of the arrays of ``graph`` and of ``graph.tables``; copies nothing that has the agreed dtype."""
    tables = graph.tables
    features = graph.features
    sparse = features if isinstance(features, SparseFeatures) else None
    x, half = _by_width(features.x if isinstance(features, DenseFeatures) else np.empty((0, 0), dtype=np.float32))
    data, half_data = _by_width(sparse.data if sparse else np.empty(0, dtype=np.float32))
    code = tables.get("feature_code", np.empty((0, 4), dtype=np.uint8))
    return SamplingArrays(
        indptr=_read_only(graph.indptr, np.int64),
        indices=_read_only(graph.indices, np.int32),
        clusters=_read_only(graph.clusters, np.int32),
        coarse_indptr=_read_only(graph.coarse_indptr, np.int64),
        coarse_indices=_read_only(graph.coarse_indices, np.int32),
        cluster_scale=_read_only(tables["cluster_scale"], np.float32),
        edge_cdf=_read_only(tables["edge_cdf"], np.uint32),
        closed_edge_cdf=_read_only(tables["closed_edge_cdf"], np.uint32),
        closed_stay=_read_only(tables["closed_stay"], np.float32),
        stay=_read_only(tables["stay"], np.float32),
        edge_filter=_read_only(tables["edge_filter"], np.uint8),
        coarse_filter=_read_only(tables["coarse_filter"], np.uint8),
        feature_kind=int(tables["feature_kind"][0]),
        feature_norm=_read_only(tables.get("feature_norm"), np.float32),
        feature_x=_read_only(x, np.float32),
        feature_half=_read_only(half, np.uint16),
        feature_code=_read_only(code, np.uint8),
        feature_code_tail=_read_only(code.view(np.float32), np.float32),
        feature_indptr=_read_only(sparse.indptr if sparse else tables.get("feature_indptr"), np.int64),
        feature_indices=_read_only(sparse.indices if sparse else tables.get("feature_indices"), np.int32),
        feature_data=_read_only(data, np.float32),
        feature_half_data=_read_only(half_data, np.uint16),
        feature_row_cdf=_read_only(tables.get("feature_row_cdf"), np.uint32),
        feature_column_indptr=_read_only(tables.get("feature_column_indptr"), np.int64),
        feature_column_rows=_read_only(tables.get("feature_column_rows"), np.int32),
        feature_column_cdf=_read_only(tables.get("feature_column_cdf"), np.uint32),
    )


def _by_width(values: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
    """(float32 values, bit patterns of float16 values), one of them empty."""
    nothing = (0,) * values.ndim
    if values.dtype == np.float16:
        return np.empty(nothing, dtype=np.float32), values.view(np.uint16)
    return values, np.empty(nothing, dtype=np.uint16)


def described(graph: Graph, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which nodes have features to be similar by: whose fourth arm is not empty."""
    norms = graph.tables.get("feature_norm")
    return np.zeros(nodes.shape, dtype=np.bool_) if norms is None else np.asarray(norms[nodes] > 0)


def _read_only(array: NDArray[Any] | None, dtype: type[Any]) -> NDArray[Any]:
    # Memory-mapped arrays are read-only and numba gives read-only arrays a type of their own: with graphs in
    # memory brought to the same type, kernels compile once.
    view = np.empty(0, dtype=dtype) if array is None else np.ascontiguousarray(array, dtype=dtype).view(np.ndarray)
    view = view[...]
    view.flags.writeable = False
    return view
