"""How many of the nodes' feature entries are not zero: counted once, when a store is written, for it reads them all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import Graph, SparseFeatures

_BLOCK_ENTRIES = 1 << 24


def feature_density(graph: Graph) -> float:
    """Share of the nodes' feature entries [V, F] that are not zero; super nodes, which are means, left out."""
    size = graph.num_nodes * graph.num_features
    if graph.features is None or not size:
        return 0.0
    known = graph.feature_entries
    return (_counted(graph) if known is None else known) / size


def _counted(graph: Graph) -> int:
    """For a store that does not say it: the whole of the nodes' features is read."""
    features = graph.features
    if isinstance(features, SparseFeatures):
        return count_entries(features.data[: int(features.indptr[graph.num_nodes])])
    return 0 if features is None else count_entries(features.x[: graph.num_nodes])


def count_entries(values: NDArray[Any]) -> int:
    """Numbers in an array of one or two dims that are not zero, in blocks: it may be mapped, and huge."""
    step = max(1, _BLOCK_ENTRIES // max(1, values[:1].size))
    return sum(int(np.count_nonzero(values[at : at + step] != 0)) for at in range(0, values.shape[0], step))
