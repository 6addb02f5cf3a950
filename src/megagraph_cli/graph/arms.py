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
def walk(block: Any, active: NDArray[np.int64], indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
    """Move the active tries, of which it makes scratch, to the ends of uniform walks of t steps, P(t) = 0.15 * 0.85^t.

    The node that a walk starts at must have a neighbour.
    """
    node, place, state, count = block.node, block.place, block.state, np.uint64(active.shape[0])
    for _ in range(_MAX_STEPS):
        going = np.uint64(0)
        for i in range(count):
            b = np.uint64(active[i])
            word = bits(state, b)
            here = np.uint64(node[b])
            start = indptr[here]
            place[going] = start + below(word, np.uint64(indptr[here + _ONE] - start))
            prefetch(indices, place[going])
            active[going] = b
            going += np.uint64(word & LOW >= _RESTART)  # else the next takes its place: no branch to be guessed
        count = going
        if count == 0:
            break
        for i in range(count):
            there = indices[np.uint64(place[i])]
            node[np.uint64(active[i])] = there
            prefetch(indptr, there)


@njit(nogil=True, cache=True)
def _neighbours(g: Any, block: Any, active: NDArray[np.int64]) -> None:
    """Nodes of the targets' rows of A^ for the active tries."""
    place, count = block.place, active.shape[0]
    for i in range(count):
        b = active[i]
        target = block.target[b]
        place[i] = pick(bits(block.state, b), g.edge_cdf, g.indptr[target], g.indptr[target + 1])
        prefetch(g.indices, place[i])
    for i in range(count):
        block.node[active[i]] = g.indices[place[i]]


@njit(nogil=True, cache=True)
def _two_steps(g: Any, block: Any, active: NDArray[np.int64]) -> None:
    """Nodes of the targets' rows of A^^2 for the active tries: two steps over closed neighbourhoods."""
    node, place, state, count = block.node, block.place, block.state, active.shape[0]
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
def _sort_by_arm(block: Any, size: int) -> tuple[int, int, int]:
    """List the tries as active, those of an arm together; where the second, third and fourth arm's begin."""
    starts = block.starts
    starts[:] = 0
    for b in range(np.uint64(size)):
        for arm in range(1, 4):
            starts[arm] += block.arm[b] < arm
    second, third, fourth = starts[1], starts[2], starts[3]
    for b in range(np.uint64(size)):
        own = np.uint64(block.arm[b])
        block.active[np.uint64(starts[own])] = b
        starts[own] += 1
    return second, third, fourth


@njit(nogil=True, cache=True)
def fetch_targets(g: Any, targets: NDArray[np.int64]) -> None:
    """Have on its way what is known of some targets themselves."""
    width = g.feature_code.shape[1] if g.feature_code.shape[0] > 0 else 0
    for target in targets:
        if target < 0:
            continue
        prefetch(g.indptr, target)
        prefetch(g.closed_stay, target)
        if g.feature_norm.shape[0] > 0:
            prefetch(g.feature_norm, target)
        for byte in range(0, width, _LINE):
            prefetch(g.feature_code, target * width + byte)


@njit(nogil=True, cache=True)
def fetch_rows(g: Any, targets: NDArray[np.int64]) -> None:
    """Have the rows of some targets on their way."""
    for target in targets:
        if target >= 0:
            start, stop = g.indptr[target], g.indptr[target + 1]
            _prefetch_row(g.edge_cdf, start, stop)
            _prefetch_row(g.closed_edge_cdf, start, stop)
            _prefetch_row(g.indices, start, stop)


@njit(nogil=True, cache=True)
def draw_block(g: Any, block: Any, seats: Any, size: int) -> None:
    """What the first ``size`` tries draw for their targets from their arms, none of which is empty for them: perhaps
    the target itself, or -1 (a dead end)."""
    block.node[:size] = block.target[:size]
    second, third, fourth = _sort_by_arm(block, size)
    _neighbours(g, block, block.active[second:third])
    _two_steps(g, block, block.active[third:fourth])
    walk(block, block.active[:second], g.indptr, g.indices)
    similar(g, block, seats, block.active[fourth:size])
