"""A prepared graph as every process of a host sees it: read-only memory-mapped arrays, nothing N x N.

Legend: V nodes, Q clusters (super nodes), F input features, U = V + Q feature rows (nodes first, then super
nodes: cluster c is feature row V + c), P published splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SparseFeatures:
    """Feature rows in CSR: ``indptr`` int64 [U+1], ``indices`` int32 [nnz], ``data`` float32 or float16 [nnz]."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.float32] | NDArray[np.float16]
    num_columns: int


@dataclass(frozen=True)
class DenseFeatures:
    """Feature rows as one array ``x`` [U, F], float32 or float16."""

    x: NDArray[np.float32] | NDArray[np.float16]

    @property
    def num_columns(self) -> int:
        return int(self.x.shape[1])


@dataclass(frozen=True)
class Masks:
    """Published splits: three bool arrays [P, V]."""

    train: NDArray[np.bool_]
    val: NDArray[np.bool_]
    test: NDArray[np.bool_]


@dataclass(frozen=True)
class Split:
    """Target ids of each part, int64, ascending."""

    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]

    @property
    def shared(self) -> int:
        """How many targets are in more than one part."""
        ids = np.concatenate((self.train, self.val, self.test))
        return int(np.count_nonzero(np.unique(ids, return_counts=True)[1] > 1))


@dataclass(frozen=True)
class Graph:
    """One prepared graph.

    ``indptr`` int64 [V+1] and ``indices`` int32 [2E]: sorted neighbour rows of the undirected graph, each edge
    both ways, no self-loops, no duplicates. ``labels`` int64 [V]: classes compacted to 0..C-1, -1 = no label.
    ``clusters`` int32 [V] in 0..Q-1; ``cluster_sizes`` int32 [Q]; ``coarse_indptr`` int64 [Q+1] and
    ``coarse_indices`` int32: sorted rows of the graph of clusters (two clusters are neighbours when any edge
    joins them; no self-loops). ``digest`` is the sha256 of the prepared content.
    """

    name: str
    digest: str
    path: Path
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    labels: NDArray[np.int64]
    num_classes: int
    features: SparseFeatures | DenseFeatures | None
    clusters: NDArray[np.int32]
    cluster_sizes: NDArray[np.int32]
    coarse_indptr: NDArray[np.int64]
    coarse_indices: NDArray[np.int32]
    masks: Masks | None
    licence: str
    source: str
    counts: dict[str, int]
    """What the raw files held: ``isolated``, ``self_loops``, ``duplicates``, ``one_way``, ``unlabelled``."""
    feature_entries: int | None = None
    """The nodes' feature entries that are not zero; None where the store was written before it kept them."""
    tables: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The sampler's lookup arrays by name (``graph/tables.py``), mapped from the store like the rest."""

    @property
    def num_nodes(self) -> int:
        return int(self.indptr.shape[0] - 1)

    @property
    def num_edges(self) -> int:
        """Undirected, unique, without self-loops."""
        return int(self.indices.shape[0] // 2)

    @property
    def num_clusters(self) -> int:
        return int(self.cluster_sizes.shape[0])

    @property
    def num_features(self) -> int:
        return 0 if self.features is None else self.features.num_columns
