"""The fourth arm: nodes by similarity of features to the targets (paper: Sampling).

``g`` is a sampler.SamplingArrays, ``block`` a tries.Block; a try is a place of the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.coded import MAX_PROPOSALS, Rows, code_table, similar_coded
from megagraph_cli.graph.feature_tables import FEATURES_DENSE, FEATURES_SPARSE
from megagraph_cli.graph.products import agreement, dense_dot
from megagraph_cli.graph.streams import below, bits, uniform
from megagraph_cli.graph.tries import pick


@njit(nogil=True, cache=True)
def _similar_dense(
    block: Any,
    b: int,
    node: int,
    x: NDArray[np.float32],
    half: NDArray[np.uint16],
    norm: NDArray[np.float32],
) -> int:
    """A node by cosine of dense rows: uniform proposals, accepted with the cosine; -1 when none was."""
    count = np.uint64(norm.shape[0])
    for _ in range(MAX_PROPOSALS):
        other = below(bits(block.state, b), count)
        level = uniform(block.state, b)
        bound = np.float64(norm[node]) * np.float64(norm[other])
        if bound > 0.0 and level * bound < dense_dot(x, half, node, int(other)):
            return int(other)
    return -1


@njit(nogil=True, cache=True)
def _similar_listed(g: Any, block: Any, b: int, node: int) -> int:
    """A node by a feature of the target, then by that feature's nodes; signed rows are accepted by their agreement."""
    for _ in range(MAX_PROPOSALS):
        entry = pick(bits(block.state, b), g.feature_row_cdf, g.feature_indptr[node], g.feature_indptr[node + 1])
        column = g.feature_indices[entry]
        start, stop = g.feature_column_indptr[column], g.feature_column_indptr[column + 1]
        other = int(g.feature_column_rows[pick(bits(block.state, b), g.feature_column_cdf, start, stop)])
        if g.feature_kind == FEATURES_SPARSE or uniform(block.state, b) < agreement(g, node, other):
            return other
    return -1


@njit(nogil=True, cache=True)
def similar(g: Any, block: Any, seats: Any, active: NDArray[np.int64]) -> None:
    """Nodes by similarity to the targets for the active tries."""
    if g.feature_kind == FEATURES_DENSE and g.feature_code.shape[0] > 0:
        table = code_table(g.feature_code, g.feature_code_tail, max(g.feature_x.shape[1], g.feature_half.shape[1]))
        similar_coded(block, seats, active, table, Rows(g.feature_x, g.feature_half, g.feature_norm))
        return
    for b in active:
        if g.feature_kind == FEATURES_DENSE:
            block.node[b] = _similar_dense(block, b, block.target[b], g.feature_x, g.feature_half, g.feature_norm)
        else:
            block.node[b] = _similar_listed(g, block, b, block.target[b])
