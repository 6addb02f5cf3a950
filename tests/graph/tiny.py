"""Small random graphs held in memory, with their sampling tables and dense references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.tables import build_tables


def csr(adjacency: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    indptr = np.concatenate([[0], np.cumsum(adjacency.sum(1))]).astype(np.int64)
    return indptr, np.nonzero(adjacency)[1].astype(np.int32)


def sparse_features(x: NDArray[np.float32]) -> SparseFeatures:
    indptr, indices = csr(x != 0)
    return SparseFeatures(indptr, indices, x[x != 0].astype(np.float32), x.shape[1])


def graph_of(
    adjacency: NDArray[np.bool_],
    clusters: NDArray[np.int32],
    features: SparseFeatures | DenseFeatures | None = None,
) -> Graph:
    """A Graph of a dense symmetric adjacency without diagonal, its tables built."""
    indptr, indices = csr(adjacency)
    member = np.zeros((int(clusters.max()) + 1, adjacency.shape[0]), dtype=np.int64)
    member[clusters, np.arange(adjacency.shape[0])] = 1
    coarse = (member @ adjacency @ member.T) > 0
    np.fill_diagonal(coarse, False)
    coarse_indptr, coarse_indices = csr(coarse)
    graph = Graph(
        name="tiny",
        digest="",
        path=Path(),
        indptr=indptr,
        indices=indices,
        labels=np.zeros(adjacency.shape[0], dtype=np.int64),
        num_classes=1,
        features=features,
        clusters=clusters.astype(np.int32),
        cluster_sizes=member.sum(1).astype(np.int32),
        coarse_indptr=coarse_indptr,
        coarse_indices=coarse_indices,
        masks=None,
        licence="",
        source="",
        counts={},
    )
    return replace(graph, tables=build_tables(graph))


def random_adjacency(rng: np.random.Generator, num_nodes: int, density: float, isolated: int = 2) -> NDArray[np.bool_]:
    """Symmetric, no diagonal; node 0 is a hub, the last ``isolated`` nodes have no neighbour."""
    upper = np.triu(rng.random((num_nodes, num_nodes)) < density, 1)
    upper[0, 1:] |= rng.random(num_nodes - 1) < 0.7
    upper[:, num_nodes - isolated :] = False
    return upper | upper.T


def random_features(
    rng: np.random.Generator, kind: str, num_nodes: int, num_clusters: int
) -> SparseFeatures | DenseFeatures | None:
    """``none``, ``sparse``, ``signed``, ``dense``, ``wide`` (coded) or ``bags`` (dense, non-negative, mostly zero).

    Node 3 has no feature, column 1 none that is not zero.
    """
    if kind == "none":
        return None
    shape = (num_nodes + num_clusters, 40 if kind == "wide" else 12)
    x = rng.random(shape) if kind in ("sparse", "bags") else rng.normal(size=shape)
    if kind not in ("dense", "wide"):
        x *= rng.random(shape) < 0.3
    x[3] = 0.0
    x[:, 1] = 0.0
    x = x.astype(np.float32)
    return DenseFeatures(x) if kind in ("dense", "wide", "bags") else sparse_features(x)


def random_graph(kind: str = "sparse", num_nodes: int = 40, density: float = 0.08, seed: int = 0) -> Graph:
    rng = np.random.default_rng(seed)
    num_clusters = max(2, num_nodes // 5)
    clusters = np.concatenate([np.arange(num_clusters), rng.integers(0, num_clusters, num_nodes - num_clusters)])
    return graph_of(
        random_adjacency(rng, num_nodes, density),
        rng.permutation(clusters),
        random_features(rng, kind, num_nodes, num_clusters),
    )


def dense_adjacency(graph: Graph) -> NDArray[np.bool_]:
    dense = np.zeros((graph.num_nodes, graph.num_nodes), dtype=np.bool_)
    dense[np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr)), graph.indices] = True
    return dense


def dense_features(graph: Graph) -> NDArray[np.float64]:
    """Feature rows of the nodes alone, float64 [V, F]."""
    features = graph.features
    if isinstance(features, DenseFeatures):
        return features.x[: graph.num_nodes].astype(np.float64)
    x = np.zeros((graph.num_nodes, graph.num_features))
    if features is not None:
        stop = features.indptr[graph.num_nodes]
        rows = np.repeat(np.arange(graph.num_nodes), np.diff(features.indptr[: graph.num_nodes + 1]))
        x[rows, features.indices[:stop]] = features.data[:stop]
    return x


def normalised_adjacency(graph: Graph) -> NDArray[np.float64]:
    """A^ = D~^-1/2 (A + I) D~^-1/2, float64 [V, V]."""
    closed = dense_adjacency(graph) + np.eye(graph.num_nodes)
    scale = closed.sum(1) ** -0.5
    return scale[:, None] * closed * scale[None, :]


def raw_arms(graph: Graph) -> NDArray[np.float64]:
    """The four distributions with the target still in them, float64 [4, V, V]; empty rows are zero."""
    adjacency = dense_adjacency(graph).astype(np.float64)
    degree = adjacency.sum(1)
    identity = np.eye(graph.num_nodes)
    linked = (degree > 0)[:, None]
    uniform = adjacency / np.maximum(degree, 1)[:, None]
    pagerank = 0.15 * np.linalg.inv(identity - 0.85 * uniform)
    a_hat = normalised_adjacency(graph)
    x = dense_features(graph)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    arms = np.stack([pagerank * linked, a_hat * (1 - identity), (a_hat @ a_hat) * linked, np.maximum(unit @ unit.T, 0)])
    total = arms.sum(2, keepdims=True)
    return np.divide(arms, total, out=np.zeros_like(arms), where=total > 0)


def without_target(arms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Target removed and every row that has anything else summing to 1 (paper: Sampling)."""
    arms = arms * (1 - np.eye(arms.shape[-1]))
    total = arms.sum(-1, keepdims=True)
    return np.divide(arms, total, out=np.zeros_like(arms), where=total > 0)
