"""Clusters: complete, bounded, deterministic, near where edges are, and linear on hubs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megagraph_cli.graph.coarsen import MAX_CLUSTER_SIZE, Coarse, coarsen
from megagraph_cli.graph.readers.adjacency import undirected


def csr(edges: NDArray[np.int64], num_nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ends = np.asarray(edges, dtype=np.int32).reshape(-1, 2)
    graph = undirected(np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1]), num_nodes)
    return graph.indptr, graph.indices


def check(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Coarse:
    """Coarsens and compares everything that can be said of any graph with a plain computation."""
    coarse = coarsen(indptr, indices)
    num_nodes = indptr.size - 1
    assert coarse.clusters.shape == (num_nodes,)
    np.testing.assert_array_equal(np.bincount(coarse.clusters, minlength=coarse.sizes.size), coarse.sizes)
    assert coarse.sizes.min() >= 1
    assert coarse.sizes.max() <= MAX_CLUSTER_SIZE
    firsts = np.unique(coarse.clusters, return_index=True)[1]
    assert (np.diff(firsts) > 0).all()
    tails = np.repeat(np.arange(num_nodes), np.diff(indptr))
    count = coarse.sizes.size
    rows, columns = coarse.clusters[tails].astype(np.int64), coarse.clusters[indices]
    expected = np.unique((rows * count + columns)[rows != columns])
    found = np.repeat(np.arange(count), np.diff(coarse.indptr)) * count + coarse.indices
    np.testing.assert_array_equal(found, expected)
    return coarse


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, num_nodes, (num_edges, 2))


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (7, 4), (10, 0), (11, 30), (500, 200), (2000, 20000)])
def test_tenth_of_the_nodes(num_nodes: int, num_edges: int) -> None:
    coarse = check(*csr(random_edges(num_nodes, num_edges), num_nodes))
    assert coarse.sizes.size == -(-num_nodes // 10)


def test_deterministic() -> None:
    indptr, indices = csr(random_edges(1000, 4000), 1000)
    one, two = coarsen(indptr, indices), coarsen(indptr, indices)
    np.testing.assert_array_equal(one.clusters, two.clusters)


def test_disjoint_cliques_stay_whole() -> None:
    clique = np.argwhere(np.triu(np.ones((8, 8)), 1))
    edges = np.concatenate([clique + 8 * index for index in range(40)])
    coarse = check(*csr(edges, 320))
    # 40 cliques of 8 into 32 clusters: every clique lies in one cluster, eight clusters hold two.
    assert all(np.unique(part).size == 1 for part in coarse.clusters.reshape(40, 8))


def test_heavy_edges_are_kept_inside() -> None:
    """A ring of dense groups of ten: at least as many edges inside as any balanced guess would keep."""
    rng = np.random.default_rng(0)
    inside = np.concatenate([rng.integers(0, 10, (60, 2)) + 10 * group for group in range(50)])
    indptr, indices = csr(np.concatenate([inside, rng.integers(0, 500, (150, 2))]), 500)
    coarse = check(indptr, indices)
    tails = np.repeat(np.arange(500), np.diff(indptr))
    kept = (coarse.clusters[tails] == coarse.clusters[indices]).mean()
    assert kept > 0.5  # clusters drawn at random keep 2 %


def test_leaves_of_a_hub_are_grouped_together() -> None:
    hub = np.stack([np.zeros(100_000, np.int64), np.arange(1, 100_001)], axis=1)
    coarse = check(*csr(hub, 100_001))
    assert coarse.sizes.size == 10_001


def test_hubs_of_a_hundred_thousand_are_linear() -> None:
    """Twenty hubs of degree 100,000: a quadratic step would be 2e11 operations, far beyond the test's time limit."""
    leaves = np.arange(20, 100_020)
    edges = np.concatenate([np.stack([np.full(leaves.size, hub), leaves], axis=1) for hub in range(20)])
    coarse = check(*csr(edges, 100_020))
    assert coarse.sizes.size == 10_002


def test_isolated_nodes_are_grouped_without_edges() -> None:
    edges = random_edges(100, 400)
    coarse = check(*csr(edges, 300))
    assert coarse.sizes.size == 30
    assert np.intersect1d(coarse.clusters[:100], coarse.clusters[100:]).size <= 4
