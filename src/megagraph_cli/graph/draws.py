"""Compiled kernels that draw the nodes and super nodes of sequences (paper: Sampling).

Kernels release the GIL and touch only the rows of their own targets, so our threads run them side by side.
``g`` is a sampler.SamplingArrays, a named tuple of contiguous arrays.

Every try has a stream of random bits of its own, so tries may be made in any order: those of several targets are made
together, in rounds (see arms.py), and each target's are looked at one after another. What a sequence is depends neither
on the size of a round nor on the other targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.arms import draw_block, fetch_rows, fetch_targets, walk
from megagraph_cli.graph.borrowed import borrowed, keep
from megagraph_cli.graph.coded import make_seats
from megagraph_cli.graph.slots import add_member, make_slots
from megagraph_cli.graph.streams import sequence_key, start_stream, uniform
from megagraph_cli.graph.tries import BLOCK, make_block

_NODES = 0
_SUPERS = 1
_GROUP = 128
"""Targets that are drawn for together: the last steps of a round, when few tries are left, wait for memory alone."""
_GROUP_MEMBERS = 4096
"""Members of a group's sequences, unless it has a single one: they should stay in the second cache."""


class Group(NamedTuple):
    """What is known of the targets of a group: ``key`` uint64 of their streams, ``drawn`` int64 how much they have,
    ``tries`` int64 how many they made, ``size`` int64 of these in this round, ``last`` int64 their last arm that is not
    empty (-1: none) and ``cumulated`` float64 [., 4] the weights up to each; ``slots`` int16 index what they have."""

    key: NDArray[np.uint64]
    drawn: NDArray[np.int64]
    tries: NDArray[np.int64]
    size: NDArray[np.int64]
    last: NDArray[np.int64]
    cumulated: NDArray[np.float64]
    slots: NDArray[np.int16]


@njit(nogil=True, cache=True)
def _make_group(capacity: int) -> tuple[Any, np.uint64]:
    """A group of targets that each come to hold up to ``capacity`` members, and the shift of their slots."""
    slots, shift = make_slots(capacity)
    size = max(1, min(_GROUP, _GROUP_MEMBERS // capacity))
    group = Group(
        np.zeros(size, np.uint64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros((size, 4)),
        np.empty((size, slots.shape[0]), np.int16),
    )
    return group, shift


@njit(nogil=True, cache=True)
def _begin_round(group: Any, block: Any, members: int, width: int, max_tries: int) -> int:
    """Share out the tries of a round: a few more than are missing, for some will be thrown away; their number."""
    total = 0
    most = BLOCK // group.size.shape[0]
    for j in range(members):
        missing = width - group.drawn[j]
        wanted = missing + missing // 16 + 1 if missing > 0 and group.last[j] >= 0 else 0
        group.size[j] = min(most, max_tries - group.tries[j], wanted)
        for b in range(group.size[j]):
            start_stream(block.state, total + b, group.key[j], group.tries[j] + b)
        total += group.size[j]
    return total


@njit(nogil=True, cache=True)
def _cumulate_arms(
    g: Any,
    targets: NDArray[np.int64],
    weights: NDArray[np.float64],
    cumulated: NDArray[np.float64],
    last: NDArray[np.int64],
) -> None:
    """Running sums of the weights of the arms that can give each target anything; the last arm among them."""
    for j in range(targets.shape[0]):
        target, running = targets[j], 0.0
        last[j] = -1
        if target < 0:
            continue
        linked = g.indptr[target + 1] > g.indptr[target]
        described = g.feature_kind > 0 and g.feature_norm[target] > 0.0
        for arm in range(4):
            if weights[arm] > 0.0 and (described if arm == 3 else linked):
                running += weights[arm]
                last[j] = arm
            cumulated[j, arm] = running


@njit(nogil=True, cache=True)
def _pick_arm(point: float, cumulated: NDArray[np.float64], last: int) -> int:
    # Counted, not searched: which arm it is cannot be foreseen, and a branch would be guessed wrongly.
    passed = int(cumulated[0] <= point) + int(cumulated[1] <= point) + int(cumulated[2] <= point)
    return passed if passed < last else last


@njit(nogil=True, cache=True)
def _end_round(group: Any, block: Any, shift: np.uint64, rows: NDArray[np.int32], arms: NDArray[np.int8]) -> None:
    """Give the targets what their tries drew, as far as it is new to them and there is room, with its arm."""
    b = 0
    for j in range(rows.shape[0]):
        for _ in range(group.size[j]):
            # A dead end, the target or a repeat goes together with its arm: the next try picks both anew.
            count, node = group.drawn[j], block.node[b]
            room = node >= 0 and count < rows.shape[1]
            if room and add_member(group.slots[j], shift, rows[j], count, np.int32(node)) == count:
                arms[j, count] = block.arm[b]
                group.drawn[j] += 1
            b += 1
        group.tries[j] += group.size[j]


@njit(nogil=True, cache=True)
def _draw_nodes(
    g: Any,
    block: Any,
    seats: Any,
    group: Any,
    shift: np.uint64,
    targets: NDArray[np.int64],
    key: NDArray[np.int64],
    weights: NDArray[np.float64],
    max_tries: int,
    nodes: NDArray[np.int32],
    arms: NDArray[np.int8],
) -> None:
    """Fill the rows of ``nodes`` with the targets and distinct draws; the rest keeps its padding."""
    members, width = nodes.shape
    fetch_targets(g, targets)
    fetch_rows(g, targets)
    _cumulate_arms(g, targets, weights, group.cumulated, group.last)
    for j in range(members):
        group.tries[j], group.drawn[j] = 0, 0
        if targets[j] >= 0:
            group.key[j] = sequence_key(key, targets[j], _NODES)
            group.slots[j, :] = -1
            group.drawn[j] = 1 + add_member(group.slots[j], shift, nodes[j], 0, np.int32(targets[j]))
    total = _begin_round(group, block, members, width, max_tries)
    while total > 0:
        b = 0
        for j in range(members):
            for _ in range(group.size[j]):
                block.target[b] = targets[j]
                point = uniform(block.state, b) * group.cumulated[j, 3]
                block.arm[b] = _pick_arm(point, group.cumulated[j], group.last[j])
                b += 1
        draw_block(g, block, seats, total)
        _end_round(group, block, shift, nodes, arms)
        total = _begin_round(group, block, members, width, max_tries)


@njit(nogil=True, cache=True)
def _draw_supers(
    g: Any,
    block: Any,
    group: Any,
    shift: np.uint64,
    targets: NDArray[np.int64],
    key: NDArray[np.int64],
    max_tries: int,
    supers: NDArray[np.int32],
    arms: NDArray[np.int8],
) -> None:
    """The clusters of the targets, each followed by distinct clusters at the ends of walks from it; ``arms`` is
    scratch."""
    members, width = supers.shape
    for j in range(members):
        group.last[j], group.tries[j], group.drawn[j] = -1, 0, 0
        if targets[j] >= 0:
            cluster = g.clusters[targets[j]]
            group.key[j] = sequence_key(key, targets[j], _SUPERS)
            group.last[j] = 0 if g.coarse_indptr[cluster + 1] > g.coarse_indptr[cluster] else -1
            group.slots[j, :] = -1
            group.drawn[j] = 1 + add_member(group.slots[j], shift, supers[j], 0, cluster)
    total = _begin_round(group, block, members, width, max_tries)
    while total > 0:
        b = 0
        for j in range(members):
            for _ in range(group.size[j]):
                block.active[b], block.node[b] = b, supers[j, 0]
                b += 1
        walk(block, block.active[:total], g.coarse_indptr, g.coarse_indices)
        _end_round(group, block, shift, supers, arms)
        total = _begin_round(group, block, members, width, max_tries)


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
    group, shift = _make_group(max(nodes.shape[1], supers.shape[1]))
    unused = np.zeros((group.size.shape[0], supers.shape[1]), dtype=np.int8)
    coded = max(g.feature_x.shape[1], g.feature_half.shape[1]) if g.feature_code.shape[0] > 0 else 0
    made = (group, make_block(), make_seats(coded), unused)
    asked, rows = borrowed((targets, key, weights)), borrowed((nodes, arms, supers))
    _draw(borrowed(g), borrowed(made), shift, asked, max_tries, rows)
    keep(made)


@njit(nogil=True, cache=True)
def _draw(g: Any, made: Any, shift: np.uint64, asked: Any, max_tries: int, rows: Any) -> None:
    """Group after group: ``made`` is scratch, ``asked`` and ``rows`` are what ``draw_slice`` is given."""
    (group, block, seats, unused), (targets, key, weights), (nodes, arms, supers) = made, asked, rows
    together = group.size.shape[0]
    for start in range(0, targets.shape[0], together):
        stop = min(start + together, targets.shape[0])
        own = targets[start:stop]
        _draw_nodes(g, block, seats, group, shift, own, key, weights, max_tries, nodes[start:stop], arms[start:stop])
        if supers.shape[1] > 0:
            _draw_supers(g, block, group, shift, own, key, max_tries, supers[start:stop], unused)
