"""The fourth arm: nodes by similarity of features to the targets (paper: Sampling).

``g`` is a sampler.SamplingArrays, ``block`` a tries.Block; a try is a place of the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.feature_tables import FEATURES_DENSE, FEATURES_SPARSE
from megagraph_cli.graph.half import half_value
from megagraph_cli.graph.nibbles import ERROR, OFFSET, SCALE, UPPER_ERROR, digits_dot, plane_bytes, read_codes
from megagraph_cli.graph.prefetch import prefetch, prefetch_once
from megagraph_cli.graph.streams import below, bits, uniform
from megagraph_cli.graph.tries import WINDOW, pick

_MAX_PROPOSALS = 256
_LINE = 64  # bytes of a cache line
_ENTRY = 4  # bytes of a float32
_ENTRIES = _LINE // _ENTRY
_ROUNDING = 2.0**-20  # more than float32 scales and norms can be wrong by, in a cosine
_UPPER, _LOWER, _ROWS = range(3)
"""What of a proposal is looked at: the upper plane of its code, the lower one, its features."""


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
def _propose(block: Any, b: np.uint64, flat: NDArray[np.uint8], width: int, plane: int, num_nodes: np.uint64) -> None:
    """Draw a proposal for a try and have the upper plane of its code on its way."""
    block.proposals[b] += 1
    block.node[b] = below(bits(block.state, b), num_nodes)
    block.level[b] = uniform(block.state, b)
    block.stage[b] = _UPPER
    for byte in range(0, plane, _LINE):
        prefetch_once(flat, block.node[b] * width + byte)


@njit(nogil=True, cache=True)
def _fetch_more(
    stage: int,
    node: int,
    target: int,
    flat: NDArray[np.uint8],
    width: int,
    plane: int,
    x: NDArray[np.float32],
    half: NDArray[np.uint16],
) -> None:
    """Have on its way what decides after this stage of a proposal did not."""
    if stage == _UPPER:
        for byte in range(plane // _LINE * _LINE, 2 * plane, _LINE):
            prefetch_once(flat, node * width + byte)
    else:
        for column in range(0, x.shape[1], _ENTRIES):
            prefetch_once(x, node * x.shape[1] + column)
            prefetch(x, target * x.shape[1] + column)
        for column in range(0, half.shape[1], 2 * _ENTRIES):
            prefetch_once(half, node * half.shape[1] + column)
            prefetch(half, target * half.shape[1] + column)


@njit(nogil=True, cache=True)
def _seat(
    block: Any, b: np.uint64, seat: int, code: NDArray[np.uint8], tail: NDArray[np.float32], columns: int, plane: int
) -> None:
    """Let a try have its proposals under way: keep what of its target's code they are compared with."""
    target = block.target[b]
    block.proposals[b], block.place[b] = 0, seat
    block.own[seat, 0] = read_codes(code.reshape(-1), target * code.shape[1], columns, block.codes, seat * 2 * plane)
    block.own[seat, 1] = tail[target, plane // _ENTRY + SCALE]
    block.own[seat, 2] = tail[target, plane // _ENTRY + ERROR]


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
    active, node, target, level, stage = block.active, block.node, block.target, block.level, block.stage
    flat, width, num_nodes = code.reshape(-1), code.shape[1], np.uint64(code.shape[0])
    columns = max(x.shape[1], half.shape[1])
    plane = plane_bytes(columns)
    end = plane // _ENTRY  # of a row's tail
    window = min(count, WINDOW)
    started = window
    for i in range(window):
        b = np.uint64(active[i])
        _seat(block, b, i, code, tail, columns, plane)
        _propose(block, b, flat, width, plane, num_nodes)
    while window > 0:
        going = 0
        for i in range(window):
            b = np.uint64(active[i])
            seat, other = block.place[b], node[b]
            if stage[b] == _ROWS:
                bound = np.float64(norm[target[b]]) * np.float64(norm[other])
                taken = bool(bound > 0.0 and level[b] * bound < _dot(x, half, target[b], other))
                refused = not taken
            else:
                lower = np.int64(stage[b] == _LOWER)
                digits = digits_dot(flat, other * width + lower * plane, block.codes, seat * 2 * plane, plane)
                product = np.float64(digits) - OFFSET * block.own[seat, 0]
                # A digit of the upper plane counts sixteen times; the product of the lower one is added to that.
                block.product[b] = block.product[b] + product if lower else 16.0 * product
                own_error, error = block.own[seat, 2], np.float64(tail[other, end + (ERROR if lower else UPPER_ERROR)])
                margin = own_error + error + own_error * error + _ROUNDING
                cosine = block.own[seat, 1] * np.float64(tail[other, end + SCALE]) * block.product[b]
                taken, refused = bool(cosine - margin > level[b]), bool(cosine + margin < level[b])
                if not (taken or refused):
                    _fetch_more(stage[b], other, target[b], flat, width, plane, x, half)
                    stage[b] += 1
                    active[going] = b
                    going += 1
                    continue
            if refused and block.proposals[b] == _MAX_PROPOSALS:
                node[b] = -1
                taken = True
            if taken:
                if started == count:
                    continue
                b = np.uint64(active[started])
                started += 1
                _seat(block, b, seat, code, tail, columns, plane)
            _propose(block, b, flat, width, plane, num_nodes)
            active[going] = b
            going += 1
        window = going


@njit(nogil=True, cache=True)
def _similar_listed(g: Any, block: Any, b: int, node: int) -> int:
    """A node by a feature of the target, then by that feature's nodes; signed rows are accepted by their agreement."""
    for _ in range(_MAX_PROPOSALS):
        entry = pick(bits(block.state, b), g.feature_row_cdf, g.feature_indptr[node], g.feature_indptr[node + 1])
        column = g.feature_indices[entry]
        start, stop = g.feature_column_indptr[column], g.feature_column_indptr[column + 1]
        other = int(g.feature_column_rows[pick(bits(block.state, b), g.feature_column_cdf, start, stop)])
        if g.feature_kind == FEATURES_SPARSE or uniform(block.state, b) < _agreement(g, node, other):
            return other
    return -1


@njit(nogil=True, cache=True)
def similar(g: Any, block: Any, count: int) -> None:
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
