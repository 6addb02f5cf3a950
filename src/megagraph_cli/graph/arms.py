"""The four arms: which node each try of a round finds (paper: Sampling).

A round holds tries for several targets, and its tries go step by step together. Each step reads memory at places that
depend on the step before; the reads of different tries do not wait for each other, and on a graph that no cache holds
waiting is most of the time.

``g`` is a sampler.SamplingArrays, ``block`` a Block; a try is a place of the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.feature_tables import FEATURES_DENSE, FEATURES_SPARSE
from megagraph_cli.graph.half import half_value
from megagraph_cli.graph.nibbles import OFFSET, digits_dot, plane_bytes, read_codes
from megagraph_cli.graph.prefetch import prefetch, prefetch_once
from megagraph_cli.graph.streams import HALF, LOW, below, bits, uniform

BLOCK = 4096
"""Most tries that are made together."""

_ONE = np.uint64(1)
_RESTART = np.uint64(644245094)  # 0.15 of 2^32
_MAX_STEPS = 256  # a walk this long has probability 0.85^256 < 1e-18
_MAX_PROPOSALS = 256
_WINDOW = 24  # tries whose proposals are under way together
_LINE = 64  # bytes of a cache line
_ENTRY = 4  # bytes of a float32
_ENTRIES = 16  # of four bytes in a cache line
_ROW_LINES = 8  # of a row that are fetched whole; of a longer one the entries at this many parts
_ROUNDING = 2.0**-20  # more than float32 scales and norms can be wrong by, in a cosine
_NOTHING, _UPPER, _LOWER, _ROWS = range(4)
"""What of a proposal is under way: nothing, the upper or the lower plane of its code, or its features."""
_SUM, _SCALE, _ERROR = range(3)
"""What is kept of a target's code beside its digits."""


class Block(NamedTuple):
    """Tries in the making: ``state`` uint64 their streams, ``target`` int64 whom they are for, ``arm`` int8, ``node``
    int64 where they stand and, in the end, what they drew (-1: a dead end); ``active`` and ``place`` int64, ``level``
    and ``product`` float64, ``proposals`` and ``stage`` int64 are scratch, as are ``codes`` int16 and ``own`` float64,
    which tell the targets' features of the tries whose proposals are under way."""

    state: NDArray[np.uint64]
    target: NDArray[np.int64]
    arm: NDArray[np.int8]
    node: NDArray[np.int64]
    active: NDArray[np.int64]
    place: NDArray[np.int64]
    level: NDArray[np.float64]
    proposals: NDArray[np.int64]
    stage: NDArray[np.int64]
    product: NDArray[np.float64]
    codes: NDArray[np.int16]
    own: NDArray[np.float64]


@njit(nogil=True, cache=True)
def make_block(columns: int) -> Any:
    """An empty block for nodes of so many features."""
    return Block(
        np.zeros(BLOCK, np.uint64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int8),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.float64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.float64),
        np.zeros(_WINDOW * 2 * plane_bytes(columns), np.int16),
        np.zeros((_WINDOW, 3)),
    )


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
def _pick(word: np.uint64, cdf: NDArray[np.uint32], start: int, stop: int) -> int:
    """The entry of a row drawn by its cumulative fractions (tables.py); entries of weight 0 are never drawn."""
    # Below the last fraction, 2^32 - 1, so that the search always ends at an entry.
    point = min(word >> HALF, LOW - np.uint64(1))
    low, high = np.uint64(start), np.uint64(stop - 1)  # unsigned: see slots.find_slot
    while low < high:
        middle = (low + high) >> _ONE
        if np.uint64(cdf[middle]) > point:
            high = middle
        else:
            low = middle + _ONE
    return int(low)


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
        place[i] = _pick(bits(block.state, b), g.edge_cdf, g.indptr[target], g.indptr[target + 1])
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
            place[i] = _pick(bits(state, b), g.closed_edge_cdf, g.indptr[target], g.indptr[target + 1])
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
        place[i] = _pick(bits(state, b), g.edge_cdf, place[i], g.indptr[node[b] + 1])
        prefetch(g.indices, place[i])
    for i in range(going):
        node[active[i]] = g.indices[place[i]]


@njit(nogil=True, cache=True)
def _agreement(g: Any, a: int, b: int) -> float:
    """Cosine of two signed sparse rows over the cosine of their absolute values; norms cancel."""
    left, right = g.feature_indptr[a], g.feature_indptr[b]
    dot, absolute = 0.0, 0.0
    while left < g.feature_indptr[a + 1] and right < g.feature_indptr[b + 1]:
        if g.feature_indices[left] < g.feature_indices[right]:
            left += 1
        elif g.feature_indices[left] > g.feature_indices[right]:
            right += 1
        else:
            if g.feature_half_data.shape[0] > 0:
                product = half_value(g.feature_half_data[left]) * half_value(g.feature_half_data[right])
            else:
                product = np.float64(g.feature_data[left]) * np.float64(g.feature_data[right])
            dot += product
            absolute += abs(product)
            left += 1
            right += 1
    return dot / absolute if absolute > 0.0 else 0.0


@njit(nogil=True, cache=True)
def _dot(x: NDArray[np.float32], half: NDArray[np.uint16], a: int, b: int) -> float:
    """Product of two feature rows, which are in ``half`` where that has any."""
    if half.shape[0] > 0:
        total = 0.0
        for column in range(half.shape[1]):
            total += half_value(half[a, column]) * half_value(half[b, column])
        return total
    # Four sums keep the adder busy; the order is written out, so every machine gets the same value.
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    whole = x.shape[1] // 4 * 4
    for column in range(0, whole, 4):
        s0 += np.float64(x[a, column]) * np.float64(x[b, column])
        s1 += np.float64(x[a, column + 1]) * np.float64(x[b, column + 1])
        s2 += np.float64(x[a, column + 2]) * np.float64(x[b, column + 2])
        s3 += np.float64(x[a, column + 3]) * np.float64(x[b, column + 3])
    for column in range(whole, x.shape[1]):
        s0 += np.float64(x[a, column]) * np.float64(x[b, column])
    return (s0 + s1) + (s2 + s3)


@njit(nogil=True, cache=True)
def _similar_dense(
    block: Any,
    b: int,
    node: int,
    x: NDArray[np.float32],
    half: NDArray[np.uint16],
    norm: NDArray[np.float32],
) -> int:
    """A node by cosine of dense rows: uniform proposals, accepted with the cosine; -1 when none was."""
    count = np.uint64(norm.shape[0])
    for _ in range(_MAX_PROPOSALS):
        other = below(bits(block.state, b), count)
        level = uniform(block.state, b)
        bound = np.float64(norm[node]) * np.float64(norm[other])
        if bound > 0.0 and level * bound < _dot(x, half, node, int(other)):
            return int(other)
    return -1


@njit(nogil=True, cache=True)
def _similar_coded(
    block: Any,
    count: int,
    x: NDArray[np.float32],
    half: NDArray[np.uint16],
    norm: NDArray[np.float32],
    code: NDArray[np.uint8],
    tail: NDArray[np.float32],
) -> None:
    """The same nodes as ``_similar_dense`` finds, for the active tries, by coded rows (tables.py).

    The upper digits decide where the cosine is further from the level than what they leave out can account for, all
    eight bits where it is further than rounding; the rows themselves are read about once in fifty proposals. What is
    read of several tries' proposals is under way together.
    """
    # All in one function: a call would hand over every array as seven words, which costs more than a product.
    active, node, target, state = block.active, block.node, block.target, block.state
    level, proposals, stage, product, seat = block.level, block.proposals, block.stage, block.product, block.place
    codes, own = block.codes, block.own
    flat, width, num_nodes = code.reshape(-1), code.shape[1], np.uint64(code.shape[0])
    columns = max(x.shape[1], half.shape[1])
    plane = plane_bytes(columns)
    last = plane // _ENTRY  # of a row's tail
    window = min(count, _WINDOW)
    started = window
    for i in range(count):
        proposals[active[i]], stage[active[i]], seat[active[i]] = 0, _NOTHING, i
    while window > 0:
        going = 0
        for i in range(window):
            b = np.uint64(active[i])
            s, its, lower = seat[b], node[b], np.int64(stage[b] == _LOWER)
            found = digits_dot(flat, its * width + lower * plane, codes, s * 2 * plane, plane)
            known = np.float64(found) - OFFSET * own[s, _SUM]
            product[b] = product[b] * lower + known * (16 - 15 * lower)
            error = np.float64(tail[its, last - 2 + lower])
            margin = own[s, _ERROR] + error + own[s, _ERROR] * error + _ROUNDING
            cosine = own[s, _SCALE] * np.float64(tail[its, last - 3]) * product[b]
            settled, refused = bool(cosine - margin > level[b]), bool(cosine + margin < level[b])
            if stage[b] == _NOTHING:
                settled, refused = False, True
            elif stage[b] == _ROWS:
                bound = np.float64(norm[target[b]]) * np.float64(norm[its])
                settled = bool(bound > 0.0 and level[b] * bound < _dot(x, half, target[b], its))
                refused = not settled
            if not (settled or refused):
                # Undecided: read more of the same node.
                if stage[b] == _UPPER:
                    for byte in range(plane // _LINE * _LINE, 2 * plane, _LINE):
                        prefetch_once(flat, its * width + byte)
                else:
                    for column in range(0, x.shape[1], _ENTRIES):
                        prefetch_once(x, its * x.shape[1] + column)
                        prefetch(x, target[b] * x.shape[1] + column)
                    for column in range(0, half.shape[1], 2 * _ENTRIES):
                        prefetch_once(half, its * half.shape[1] + column)
                        prefetch(half, target[b] * half.shape[1] + column)
                stage[b] += 1
                active[going] = b
                going += 1
                continue
            if refused and proposals[b] == _MAX_PROPOSALS:
                node[b] = -1
                settled = True
            if settled:
                if started == count:
                    continue
                b = np.uint64(active[started])
                seat[b] = s
                started += 1
            if proposals[b] == 0:
                own[s, _SUM] = read_codes(flat, target[b] * width, columns, codes, s * 2 * plane)
                own[s, _SCALE], own[s, _ERROR] = tail[target[b], last - 3], tail[target[b], last - 1]
            proposals[b] += 1
            node[b] = below(bits(state, b), num_nodes)
            level[b] = uniform(state, b)
            stage[b] = _UPPER
            for byte in range(0, plane, _LINE):
                prefetch_once(flat, node[b] * width + byte)
            active[going] = b
            going += 1
        window = going


@njit(nogil=True, cache=True)
def _similar_listed(g: Any, block: Any, b: int, node: int) -> int:
    """A node by a feature of the target, then by that feature's nodes; signed rows are accepted by their agreement."""
    for _ in range(_MAX_PROPOSALS):
        entry = _pick(bits(block.state, b), g.feature_row_cdf, g.feature_indptr[node], g.feature_indptr[node + 1])
        column = g.feature_indices[entry]
        start, stop = g.feature_column_indptr[column], g.feature_column_indptr[column + 1]
        other = int(g.feature_column_rows[_pick(bits(block.state, b), g.feature_column_cdf, start, stop)])
        if g.feature_kind == FEATURES_SPARSE or uniform(block.state, b) < _agreement(g, node, other):
            return other
    return -1


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
def _similar(g: Any, block: Any, count: int) -> None:
    """Nodes by similarity to the targets for the active tries."""
    if g.feature_kind == FEATURES_DENSE and g.feature_code.shape[0] > 0:
        _similar_coded(block, count, g.feature_x, g.feature_half, g.feature_norm, g.feature_code, g.feature_code_tail)
        return
    for i in range(count):
        b = block.active[i]
        if g.feature_kind == FEATURES_DENSE:
            block.node[b] = _similar_dense(block, b, block.target[b], g.feature_x, g.feature_half, g.feature_norm)
        else:
            block.node[b] = _similar_listed(g, block, b, block.target[b])


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
    _similar(g, block, _gather(block, size, 3))
