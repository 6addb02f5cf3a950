"""Compiled kernels that draw the nodes and super nodes of sequences (paper: Sampling).

Kernels release the GIL and touch only the rows of their own targets, so our threads run them side by side.
``g`` is a sampler.SamplingArrays, a named tuple of contiguous arrays.

Every try has a stream of random bits of its own, so tries may be made in any order: they are made in blocks (see
arms.py) and looked at one after another. What a sequence is does not depend on the size of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.arms import BLOCK, draw_block, make_block, walk
from megagraph_cli.graph.slots import add_member, make_slots
from megagraph_cli.graph.streams import sequence_key, start_stream, uniform

_NODES = 0
_SUPERS = 1


@njit(nogil=True, cache=True)
def _cumulate_arms(g: Any, target: int, weights: NDArray[np.float64], cumulated: NDArray[np.float64]) -> int:
    """Running sums of the weights of the arms that can give this target anything; the last arm among them."""
    linked = g.indptr[target + 1] > g.indptr[target]
    described = g.feature_kind > 0 and g.feature_norm[target] > 0.0
    running, last = 0.0, -1
    for arm in range(4):
        if weights[arm] > 0.0 and (described if arm == 3 else linked):
            running += weights[arm]
            last = arm
        cumulated[arm] = running
    return last


@njit(nogil=True, cache=True)
def _pick_arm(point: float, cumulated: NDArray[np.float64], last: int) -> int:
    arm = 0
    while arm < last and cumulated[arm] <= point:
        arm += 1
    return arm


@njit(nogil=True, cache=True)
def _draw_nodes(
    g: Any,
    block: Any,
    key: np.uint64,
    target: int,
    weights: NDArray[np.float64],
    max_tries: int,
    slots: NDArray[np.int16],
    shift: np.uint64,
    nodes: NDArray[np.int32],
    arms: NDArray[np.int8],
) -> int:
    """Fill ``nodes`` with the target and distinct draws, and count them; the rest keeps its padding."""
    cumulated = np.empty(4)
    last = _cumulate_arms(g, target, weights, cumulated)
    slots[:] = -1
    count, tries = 0, 0
    count += 1 + add_member(slots, shift, nodes, count, np.int32(target))
    while count < nodes.shape[0] and tries < max_tries and last >= 0:
        # A few more than are missing: some will be thrown away.
        missing = nodes.shape[0] - count
        size = min(BLOCK, max_tries - tries, missing + missing // 4 + 1)
        for b in range(size):
            start_stream(block.state, b, key, tries + b)
            block.arm[b] = _pick_arm(uniform(block.state, b) * cumulated[3], cumulated, last)
        draw_block(g, block, size, target)
        for b in range(size):
            # A dead end, the target or a repeat goes together with its arm: the next try picks both anew.
            node = block.node[b]
            if node >= 0 and add_member(slots, shift, nodes, count, np.int32(node)) == count:
                arms[count] = block.arm[b]
                count += 1
                if count == nodes.shape[0]:
                    break
        tries += size
    return count


@njit(nogil=True, cache=True)
def _draw_supers(g: Any, block: Any, key: np.uint64, cluster: int, max_tries: int, supers: NDArray[np.int32]) -> int:
    """The cluster of the target, then distinct clusters at the ends of walks from it; their number."""
    supers[0] = cluster
    count = 1
    if g.coarse_indptr[cluster + 1] == g.coarse_indptr[cluster]:
        return count
    for number in range(max_tries):
        if count == supers.shape[0]:
            break
        start_stream(block.state, 0, key, number)
        block.active[0], block.node[0] = 0, cluster
        walk(block, 1, g.coarse_indptr, g.coarse_indices)
        drawn = block.node[0]
        known = False
        for earlier in range(count):
            known = known or supers[earlier] == drawn
        if not known:
            supers[count] = drawn
            count += 1
    return count


@njit(nogil=True, cache=True)
def draw_slice(
    g: Any,
    targets: NDArray[np.int64],
    key: NDArray[np.int64],
    weights: NDArray[np.float64],
    max_tries: int,
    nodes: NDArray[np.int32],
    arms: NDArray[np.int8],
    supers: NDArray[np.int32],
) -> None:
    """Draw the sequences of ``targets`` into rows of ``nodes``, ``arms`` and ``supers``, prefilled with -1.

    ``key`` int64 [3] is (rng_seed, epoch, view). A target of -1 leaves its rows as padding.
    """
    slots, shift = make_slots(nodes.shape[1])
    block = make_block()
    for t in range(targets.shape[0]):
        target = targets[t]
        if target < 0:
            continue
        own = sequence_key(key, target, _NODES)
        _draw_nodes(g, block, own, target, weights, max_tries, slots, shift, nodes[t], arms[t])
        if supers.shape[1] > 0:
            own = sequence_key(key, target, _SUPERS)
            _draw_supers(g, block, own, g.clusters[target], max_tries, supers[t])
