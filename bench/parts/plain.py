"""Sequences the plain way: scipy and numpy, node after node, as the published ANS-GT code builds them.

That code holds four dense N x N matrices of sampling probabilities and slices every power of the whole graph's
adjacency. Here the rows that it would look up stand ready, and for a higher power the first is sliced once more, which
is sparser and costs less: the peer is spared much of its work.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.graph.graph import DenseFeatures, Graph

_WALK_STEPS = 100  # 0.85^100 < 1e-7


def rate(graph: Graph, weights: NDArray[np.float64], *, num_sampled: int, num_targets: int, powers: int) -> float:
    """Sequences a second, their graphs and those of their clusters included."""
    rng = np.random.default_rng(0)
    targets = rng.choice(graph.num_nodes, num_targets, replace=False)
    arms = sampling_rows(graph, targets)
    normalised = normalised_adjacency(graph.indptr, graph.indices, np.ones(graph.num_nodes))
    coarse = normalised_adjacency(graph.coarse_indptr, graph.coarse_indices, graph.cluster_sizes.astype(np.float64))
    start = time.perf_counter()
    for place, target in enumerate(targets):
        phi = np.zeros(graph.num_nodes)
        for weight, rows in zip(weights, arms, strict=True):
            phi += weight * rows[place]
        drawn = rng.choice(graph.num_nodes, num_sampled - 1, replace=False, p=phi / phi.sum())
        nodes = np.concatenate([[target], drawn])
        for _ in range(powers):
            normalised[nodes, :][:, nodes].toarray()
        clusters = np.unique(graph.clusters[nodes])
        coarse[clusters, :][:, clusters].toarray()
    return num_targets / (time.perf_counter() - start)


def normalised_adjacency(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], weights: NDArray[np.float64]
) -> sparse.csr_matrix:
    """D^-1/2 (A + diag) D^-1/2 of neighbours weighted by both ends."""
    count = indptr.size - 1
    adjacency = sparse.csr_matrix((np.ones(indices.size), indices, indptr), shape=(count, count)) + sparse.eye(count)
    scale = sparse.diags(np.sqrt(weights / (adjacency @ weights)))
    return (scale @ adjacency @ scale).tocsr()


def sampling_rows(graph: Graph, targets: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """The targets' rows [T, V] of the four matrices, the targets themselves left out."""
    count = graph.num_nodes
    adjacency = sparse.csr_matrix((np.ones(graph.indices.size), graph.indices, graph.indptr), shape=(count, count))
    step = sparse.diags(1.0 / np.maximum(np.diff(graph.indptr), 1)) @ adjacency
    start = np.zeros((targets.size, count))
    start[np.arange(targets.size), targets] = 1.0
    pagerank, walker = np.zeros_like(start), start
    for number in range(_WALK_STEPS):
        pagerank += 0.15 * 0.85**number * walker
        walker = (step.T @ walker.T).T
    hat = normalised_adjacency(graph.indptr, graph.indices, np.ones(count))
    once = (hat @ start.T).T
    x = unit_rows(graph)
    rows = [pagerank, once, (hat @ once.T).T, np.maximum(x[targets] @ x.T, 0.0)]
    for row in rows:
        row[start > 0] = 0.0
        row /= np.maximum(row.sum(1, keepdims=True), 1e-300)
    return rows


def unit_rows(graph: Graph) -> NDArray[np.float64]:
    features = graph.features
    assert features is not None
    if isinstance(features, DenseFeatures):
        x = features.x[: graph.num_nodes].astype(np.float64)
    else:
        stop = features.indptr[graph.num_nodes]
        shape = (graph.num_nodes, features.num_columns)
        x = sparse.csr_matrix(
            (features.data[:stop], features.indices[:stop], features.indptr[: graph.num_nodes + 1]), shape=shape
        ).toarray()
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
