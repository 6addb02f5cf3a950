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
from numpy.typing import NDArray

from megagraph_cli.graph.feature_tables import Allocate, feature_tables, in_memory
from megagraph_cli.graph.filters import row_filters
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.table_kernels import row_cdfs, row_sums


def build_tables(graph: Graph, allocate: Allocate = in_memory) -> dict[str, NDArray[Any]]:
    """Arrays that the sampler reads beside the graph, O(E + non-zero features) in time and size. Those that are as
    large as the features are filled where ``allocate`` has them; memory is O(V + E + F) beside those.

    - ``cluster_scale`` float32 [Q]: r_a = sqrt(s_a / D_a), D_a = s_a + the sizes of the neighbour clusters, so that the
      coarse A^ of two neighbours a, b is r_a r_b;
    - ``edge_cdf`` uint32 [2E]: steps to neighbour j with weight d~_j^-1/2 (a row of A^);
    - ``closed_edge_cdf`` uint32 [2E], ``closed_stay`` float32 [V], ``stay`` float32 [V]: the two steps of a row
      of A^^2 over closed neighbourhoods. The first goes to k with weight c_k / d~_k, c_k = the sum of d~^-1/2
      over N[k], and remains where it is with probability ``closed_stay``; the second remains with ``stay``;
    - ``edge_filter`` uint8 [2E] and ``coarse_filter``: a Bloom filter for every row of the graph and of the graph of
      clusters (filters.py);
    - ``feature_kind`` int64 [1] (FEATURES_*), ``feature_norm`` float32 [V] where there are features; where they
      are dense and have at least 32 columns ``feature_code`` uint8 [V, W], W a multiple of 64: two planes of half bytes
      (nibbles.py), the upper one with three float32 (scale, coarse error, error) at its end; scale times the codes is
      the row over its norm, but for a vector whose norm is at most error, and at most coarse error if the lower plane
      is left out; where they
      are sparse ``feature_row_cdf`` uint32 [nnz], ``feature_column_indptr`` int64 [F+1],
      ``feature_column_rows`` int32 [nnz] and ``feature_column_cdf`` uint32 [nnz], all over the rows of nodes
      alone: super nodes are never drawn by similarity. Dense features that are non-negative and mostly zero
      are listed as sparse ones are: ``feature_indptr`` int64 [V+1], ``feature_indices`` int32 [nnz].
    """
    scale = 1.0 / np.sqrt(np.diff(graph.indptr) + 1.0)
    closed = scale + row_sums(graph.indptr, graph.indices, scale)
    through = closed * scale * scale
    through_closed = through + row_sums(graph.indptr, graph.indices, through)
    sizes = np.asarray(graph.cluster_sizes, dtype=np.float64)
    coarse_degree = sizes + row_sums(graph.coarse_indptr, graph.coarse_indices, sizes)
    tables: dict[str, NDArray[Any]] = {
        "cluster_scale": np.sqrt(sizes / coarse_degree).astype(np.float32),
        "edge_cdf": row_cdfs(graph.indptr, graph.indices, scale),
        "closed_edge_cdf": row_cdfs(graph.indptr, graph.indices, through),
        "closed_stay": (through / through_closed).astype(np.float32),
        "stay": (scale / closed).astype(np.float32),
        "edge_filter": row_filters(graph.indptr, graph.indices),
        "coarse_filter": row_filters(graph.coarse_indptr, graph.coarse_indices),
    }
    tables.update(feature_tables(graph, allocate))
    return tables
