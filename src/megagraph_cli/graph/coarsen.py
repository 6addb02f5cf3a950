"""Clusters of about ten nodes by matching along heavy edges, level by level (paper: Coarsening).

Legend: V nodes, Q clusters, U nodes of the current level. Every level merges pairs: along the edge with the greatest
rating w(u, v)^2 / size(v), then two nodes left over beside the same neighbour (leaves of a hub), then two without
any neighbour. Each is one pass over the edges, whatever the degrees; the order is by degree, then id, so the result
is a function of the graph alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.readers.adjacency import transpose

CLUSTER_SIZE = 10
"""Nodes per cluster, on average."""
MAX_CLUSTER_SIZE = 20
_LEAST_SHRINKAGE = 50
"""A level that merges less than 1/50 of its nodes is the last."""


@dataclass(frozen=True)
class Coarse:
    """``clusters`` int32 [V] in 0..Q-1, numbered by their smallest member; ``sizes`` int32 [Q]; the sorted rows of
    the graph of clusters: ``indptr`` int64 [Q+1], ``indices`` int32."""

    clusters: NDArray[np.int32]
    sizes: NDArray[np.int32]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]


def coarsen(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Coarse:
    """Every node of the sorted undirected CSR in one cluster of at most 20; V/10 clusters, rounded up, where merging
    can reach that. Time and memory are linear in nodes and edges."""
    num_nodes = indptr.size - 1
    wanted = -(-num_nodes // CLUSTER_SIZE)
    clusters = np.arange(num_nodes, dtype=np.int32)
    sizes = np.ones(num_nodes, dtype=np.int32)
    level_indptr, level_indices = indptr, indices
    weights = np.empty(0, np.int32)  # empty: all ones, which spares the finest level an array
    while sizes.size > wanted:
        excess = sizes.size - wanted
        parents, num_parents = _match(level_indptr, level_indices, weights, sizes, _by_degree(level_indptr), excess)
        if sizes.size - num_parents < min(excess, -(-sizes.size // _LEAST_SHRINKAGE)):
            break  # the size limit stands in the way: more levels would cost a pass each for a handful of merges
        clusters = parents[clusters]
        level_indptr, level_indices, weights, sizes = _contract(
            level_indptr, level_indices, weights, sizes, parents, num_parents
        )
    coarse_indptr, coarse_indices = transpose(level_indptr, level_indices)  # symmetric: sorts the rows
    return Coarse(clusters, sizes, coarse_indptr, coarse_indices)


def _by_degree(indptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nodes by ascending degree, equal ones by id: leaves choose before the hubs that everyone could take."""
    return np.argsort(np.diff(indptr).astype(np.int32), kind="stable")


@njit(nogil=True, cache=True)
def _match(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    weights: NDArray[np.int32],
    sizes: NDArray[np.int32],
    order: NDArray[np.int64],
    merges: int,
) -> Any:
    """Pairs of one level, at most ``merges``: (parent int32 [U], number of parents)."""
    num_nodes = sizes.size
    partner = np.full(num_nodes, -1, np.int32)
    favourite = np.full(num_nodes, -1, np.int32)  # best-rated neighbour, free or not
    for node in order:
        if partner[node] >= 0 or merges == 0:
            continue
        best = -1
        best_rating = 0.0
        favourite_rating = 0.0
        for entry in range(indptr[node], indptr[node + 1]):
            other = indices[entry]
            weight = 1.0 if weights.size == 0 else float(weights[entry])
            rating = weight * weight / sizes[other]
            if rating > favourite_rating:
                favourite_rating = rating
                favourite[node] = other
            if rating > best_rating and partner[other] < 0 and sizes[node] + sizes[other] <= MAX_CLUSTER_SIZE:
                best_rating = rating
                best = other
        if best >= 0:
            partner[node] = best
            partner[best] = node
            merges -= 1
    _match_left_over(partner, favourite, sizes, order, merges)
    return _number(partner)


@njit(nogil=True, cache=True)
def _match_left_over(
    partner: NDArray[np.int32],
    favourite: NDArray[np.int32],
    sizes: NDArray[np.int32],
    order: NDArray[np.int64],
    merges: int,
) -> None:
    """Pairs the unmatched that share their favourite neighbour; slot U waits for those that have none."""
    num_nodes = sizes.size
    waiting = np.full(num_nodes + 1, -1, np.int32)
    for node in order:
        if partner[node] >= 0 or merges == 0:
            continue
        slot = favourite[node] if favourite[node] >= 0 else num_nodes
        other = waiting[slot]
        if other >= 0 and sizes[node] + sizes[other] <= MAX_CLUSTER_SIZE:
            partner[node] = other
            partner[other] = node
            waiting[slot] = -1
            merges -= 1
        elif other < 0 or sizes[node] < sizes[other]:
            waiting[slot] = node


@njit(nogil=True, cache=True)
def _number(partner: NDArray[np.int32]) -> Any:
    """Parents numbered in the order of their smaller child."""
    parents = np.full(partner.size, -1, np.int32)
    count = 0
    for node in range(partner.size):
        if parents[node] >= 0:
            continue
        parents[node] = count
        if partner[node] >= 0:
            parents[partner[node]] = count
        count += 1
    return parents, count


@njit(nogil=True, cache=True)
def _contract(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    weights: NDArray[np.int32],
    sizes: NDArray[np.int32],
    parents: NDArray[np.int32],
    num_parents: int,
) -> Any:
    """The graph of the parents: edge weights add up, inner edges vanish. Rows are not sorted."""
    out_sizes = np.zeros(num_parents, np.int32)
    first = np.full(num_parents, -1, np.int32)
    second = np.full(num_parents, -1, np.int32)
    for node in range(parents.size):
        parent = parents[node]
        out_sizes[parent] += sizes[node]
        if first[parent] < 0:
            first[parent] = node
        else:
            second[parent] = node
    out_indptr = np.zeros(num_parents + 1, np.int64)
    out_indices = np.empty(indices.size, np.int32)
    out_weights = np.empty(indices.size, np.int32)
    place = np.full(num_parents, -1, np.int64)  # where this row holds a neighbour; older rows lie before its start
    end = 0
    for parent in range(num_parents):
        start = end
        for child in (first[parent], second[parent]):
            if child < 0:
                continue
            for entry in range(indptr[child], indptr[child + 1]):
                other = parents[indices[entry]]
                if other == parent:
                    continue
                weight = 1 if weights.size == 0 else weights[entry]
                if place[other] >= start:
                    out_weights[place[other]] += weight
                else:
                    place[other] = end
                    out_indices[end] = other
                    out_weights[end] = weight
                    end += 1
        out_indptr[parent + 1] = end
    return out_indptr, out_indices[:end].copy(), out_weights[:end].copy(), out_sizes
