"""The four arms: which node each try of a round finds (paper: Sampling).

A round holds tries for several targets, and its tries go step by step together. Each step reads memory at places that
depend on the step before; the reads of different tries do not wait for each other, and on a graph that no cache holds
waiting is most of the time.

``g`` is a sampler.SamplingArrays, ``block`` a tries.Block; a try is a place of the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.prefetch import prefetch
from megagraph_cli.graph.similarity import similar
from megagraph_cli.graph.streams import LOW, below, bits, uniform
from megagraph_cli.graph.tries import pick

_ONE = np.uint64(1)
_RESTART = np.uint64(644245094)  # 0.15 of 2^32
_MAX_STEPS = 256  # a walk this long has probability 0.85^256 < 1e-18
_LINE = 64  # bytes of a cache line
_ENTRIES = 16  # of four bytes in a cache line
_ROW_LINES = 8  # of a row that are fetched whole; of a longer one the entries at this many parts


@njit(nogil=True, cache=True)
def _prefetch_row(array: Any, start: int, stop: int) -> None:
    """Fetch a row of entries of four bytes; of a long one what the first steps of a search in it will look at."""
    if stop - start <= _ROW_LINES * _ENTRIES:
        for entry in range(start // _ENTRIES * _ENTRIES, stop, _ENTRIES):
            prefetch(array, entry)
    else:
        for part in range(1, _ROW_LINES):
            prefetch(array, start + (stop - 1 - start) * part // _ROW_LINES)


@njit(nogil=True, cache=True)
def walk(block: Any, count: int, indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
    """Move the first ``count`` active tries to the ends of uniform walks of t steps, P(t) = 0.15 * 0.85^t.

    The node that a walk starts at must have a neighbour.
    """
    active, node, place, state = block.active, block.node, block.place, block.state
    for _ in range(_MAX_STEPS):
        going = 0
        for i in range(np.uint64(count)):
            b = np.uint64(active[i])
            word = bits(state, b)
            if word & LOW >= _RESTART:
                here = np.uint64(node[b])
                start = indptr[here]
                place[going] = start + below(word, np.uint64(indptr[here + _ONE] - start))
                prefetch(indices, place[going])
                active[going] = b
                going += 1
        count = going
        if count == 0:
            break
        for i in range(np.uint64(count)):
            there = indices[np.uint64(place[i])]
            node[np.uint64(active[i])] = there
            prefetch(indptr, there)


@njit(nogil=True, cache=True)
def _neighbours(g: Any, block: Any, count: int) -> None:
    """Nodes of the targets' rows of A^ for the active tries."""
    active, place = block.active, block.place
    for i in range(count):
        b = active[i]
        target = block.target[b]
        place[i] = pick(bits(block.state, b), g.edge_cdf, g.indptr[target], g.indptr[target + 1])
        prefetch(g.indices, place[i])
    for i in range(count):
        block.node[active[i]] = g.indices[place[i]]


@njit(nogil=True, cache=True)
def _two_steps(g: Any, block: Any, count: int) -> None:
    """Nodes of the targets' rows of A^^2 for the active tries: two steps over closed neighbourhoods."""
    active, node, place, state = block.active, block.node, block.place, block.state
    for i in range(count):
        b = active[i]
        place[i] = -1
        target = block.target[b]
        if uniform(state, b) >= g.closed_stay[target]:
            place[i] = pick(bits(state, b), g.closed_edge_cdf, g.indptr[target], g.indptr[target + 1])
            prefetch(g.indices, place[i])
    for i in range(count):
        if place[i] >= 0:
            b = active[i]
            node[b] = g.indices[place[i]]
            prefetch(g.stay, node[b])
            prefetch(g.indptr, node[b])
    going = 0
    for i in range(count):
        b = active[i]
        if uniform(state, b) >= g.stay[node[b]]:
            place[going] = g.indptr[node[b]]
            _prefetch_row(g.edge_cdf, place[going], g.indptr[node[b] + 1])
            active[going] = b
            going += 1
    for i in range(going):
        b = active[i]
        place[i] = pick(bits(state, b), g.edge_cdf, place[i], g.indptr[node[b] + 1])
        prefetch(g.indices, place[i])
    for i in range(going):
        node[active[i]] = g.indices[place[i]]


@njit(nogil=True, cache=True)
def _gather(block: Any, size: int, arm: int) -> int:
    """List the tries of one arm as active and count them."""
    count = 0
    for b in range(size):
        if block.arm[b] == arm:
            block.active[count] = b
            count += 1
    return count


@njit(nogil=True, cache=True)
def fetch_target(g: Any, target: int) -> None:
    """Have on its way what is known of a target itself."""
    prefetch(g.indptr, target)
    prefetch(g.closed_stay, target)
    if g.feature_norm.shape[0] > 0:
        prefetch(g.feature_norm, target)
    width = g.feature_code.shape[1] if g.feature_code.shape[0] > 0 else 0
    for byte in range(0, width, _LINE):
        prefetch(g.feature_code, target * width + byte)


@njit(nogil=True, cache=True)
def fetch_rows(g: Any, target: int) -> None:
    """Have the rows of a target on their way."""
    start, stop = g.indptr[target], g.indptr[target + 1]
    _prefetch_row(g.edge_cdf, start, stop)
    _prefetch_row(g.closed_edge_cdf, start, stop)
    _prefetch_row(g.indices, start, stop)


@njit(nogil=True, cache=True)
def draw_block(g: Any, block: Any, size: int) -> None:
    """What the first ``size`` tries draw for their targets from their arms, none of which is empty for them: perhaps
    the target itself, or -1 (a dead end)."""
    block.node[:size] = block.target[:size]
    _neighbours(g, block, _gather(block, size, 1))
    _two_steps(g, block, _gather(block, size, 2))
    walk(block, _gather(block, size, 0), g.indptr, g.indices)
    similar(g, block, _gather(block, size, 3))
