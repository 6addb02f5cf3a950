"""Edges of generated graphs: power-law degrees over communities, exactly as many as asked for.

Apart from ``synthetic.py`` so that naming a generated graph does not import numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_EXPONENT = 2.5
"""Of the degree distribution, as in many real networks."""
_INSIDE = 0.75
"""Fraction of edges drawn within a community."""
_ROUNDS_BY_WEIGHT = 4
"""Rounds after which missing edges are drawn uniformly: hubs and small communities are full by then."""


def draw_edges(
    num_edges: int, community: NDArray[np.int32], rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ends of exactly ``num_edges`` distinct pairs: draw, drop repeats, draw what is missing, drop the surplus.

    ``community`` [V] numbers each node's community from 0, none empty. ``num_edges`` is at most half of all pairs.
    """
    num_nodes = community.size
    # Nodes in the order of their communities, so that a community is a slice of the weights' running sum.
    order = np.argsort(community, kind="stable").astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(community))]).astype(np.int64)
    running = np.concatenate([[0.0], np.cumsum(_power_law_weights(num_nodes, num_edges, rng))])
    guide = _guide_table(running)
    keys = np.empty(0, dtype=np.int64)
    attempt = 0
    while keys.size < num_edges:
        missing = num_edges - keys.size
        seed = np.uint64(rng.integers(0, 2**63))
        if attempt < _ROUNDS_BY_WEIGHT:
            drawn = _draw_by_weight(missing + missing // 50 + 64, order, community, bounds, running, guide, seed)
        else:
            drawn = _draw_uniformly(2 * missing + 64, num_nodes, seed)
        drawn.sort()
        keys = np.concatenate([keys, drawn])
        keys.sort(kind="stable")  # merges the two sorted runs
        keys = keys[_first_of_each(keys)]
        attempt += 1
    surplus = rng.choice(keys.size, keys.size - num_edges, replace=False, shuffle=False)
    keys = np.delete(keys, surplus)
    return (keys // num_nodes).astype(np.int32), (keys % num_nodes).astype(np.int32)


def _first_of_each(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the first of each run of equal sorted keys; -1 marks a draw that hit one node twice."""
    first = np.empty(keys.size, dtype=np.bool_)
    first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first & (keys >= 0)


def _power_law_weights(num_nodes: int, num_edges: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Expected-degree weights with tail exponent 2.5, cut where a hub would get more than 4 % of all nodes."""
    weights = (1.0 - rng.random(num_nodes)) ** (-1.0 / (_EXPONENT - 1.0))
    ceiling = max(2.0, 0.04 * num_nodes) * weights.mean() / max(1.0, 2.0 * num_edges / num_nodes)
    return np.minimum(weights, max(ceiling, 1.0))


def _guide_table(running: NDArray[np.float64]) -> NDArray[np.int32]:
    """For each of V equal steps of the total weight the slot it falls in: a lookup instead of a binary search."""
    steps = np.linspace(0.0, running[-1], running.size - 1, endpoint=False)
    return np.maximum(np.searchsorted(running, steps, side="right") - 1, 0).astype(np.int32)


@njit(nogil=True, cache=True)
def _uniform(seed: Any, counter: int) -> Any:
    """Uniform in [0, 1) as a pure function of (seed, counter): splitmix64."""
    state = seed + np.uint64(counter) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return float(state >> np.uint64(11)) / 9007199254740992.0


@njit(nogil=True, cache=True)
def _slot(running: NDArray[np.float64], guide: NDArray[np.int32], value: float) -> Any:
    """The slot whose part of the running sum holds ``value``."""
    last = running.size - 2
    slot = guide[min(int(value / running[-1] * guide.size), guide.size - 1)]
    while slot < last and running[slot + 1] <= value:
        slot += 1
    while slot > 0 and running[slot] > value:
        slot -= 1
    return slot


@njit(nogil=True, cache=True)
def _draw_by_weight(
    count: int,
    order: NDArray[np.int32],
    community: NDArray[np.int32],
    bounds: NDArray[np.int64],
    running: NDArray[np.float64],
    guide: NDArray[np.int32],
    seed: Any,
) -> Any:
    """Keys ``min * V + max`` of drawn pairs, -1 where both ends are one node."""
    num_nodes = order.size
    keys = np.empty(count, np.int64)
    for index in range(count):
        tail = order[_slot(running, guide, _uniform(seed, 3 * index) * running[-1])]
        low, high = 0.0, running[-1]
        if _uniform(seed, 3 * index + 1) < _INSIDE:
            home = community[tail]
            low, high = running[bounds[home]], running[bounds[home + 1]]
        head = order[_slot(running, guide, low + _uniform(seed, 3 * index + 2) * (high - low))]
        keys[index] = -1 if tail == head else min(tail, head) * np.int64(num_nodes) + max(tail, head)
    return keys


@njit(nogil=True, cache=True)
def _draw_uniformly(count: int, num_nodes: int, seed: Any) -> Any:
    keys = np.empty(count, np.int64)
    for index in range(count):
        tail = int(_uniform(seed, 2 * index) * num_nodes)
        head = int(_uniform(seed, 2 * index + 1) * num_nodes)
        keys[index] = -1 if tail == head else min(tail, head) * num_nodes + max(tail, head)
    return keys
