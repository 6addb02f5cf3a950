"""Compiled kernels that draw the nodes and super nodes of sequences (paper: Sampling).

Few files on purpose: numba's on-disk cache notices changes of the file a kernel stands in, not of files it calls.
Kernels release the GIL and touch only the rows of their own targets, so our threads run them side by side.
``g`` is a sampler.SamplingArrays, a named tuple of contiguous arrays.

Random bits are a SplitMix64 stream (Steele, Lea, Flood 2014) whose start is a hash of what the sequence is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.slots import add_member, make_slots
from megagraph_cli.graph.tables import FEATURES_DENSE, FEATURES_SPARSE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW = np.uint64(0xFFFFFFFF)
_RESTART = np.uint64(644245094)  # 0.15 of 2^32
_MAX_STEPS = 256  # a walk this long has probability 0.85^256 < 1e-18
_MAX_PROPOSALS = 256
_UNIT = 2.0**-53

_STREAM_NODES = 0
_STREAM_SUPERS = 1


@njit(nogil=True, cache=True)
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@njit(nogil=True, cache=True)
def _start_stream(state: NDArray[np.uint64], key: NDArray[np.int64], target: np.int64, stream: int) -> None:
    """Set the start of a stream of random bits to a hash of (rng_seed, epoch, view, target, stream)."""
    value = _GOLDEN
    for part in key:
        value = _mix((value ^ np.uint64(part)) + _GOLDEN)
    value = _mix((value ^ np.uint64(target)) + _GOLDEN)
    state[0] = _mix((value ^ np.uint64(stream)) + _GOLDEN)


@njit(nogil=True, cache=True)
def _bits(state: NDArray[np.uint64]) -> np.uint64:
    state[0] += _GOLDEN
    return _mix(state[0])


@njit(nogil=True, cache=True)
def _uniform(state: NDArray[np.uint64]) -> float:
    return np.float64(_bits(state) >> np.uint64(11)) * _UNIT


@njit(nogil=True, cache=True)
def _pick(state: NDArray[np.uint64], cdf: NDArray[np.uint32], start: int, stop: int) -> int:
    """The entry of a row drawn by its cumulative fractions (tables.py); entries of weight 0 are never drawn."""
    # Below the last fraction, 2^32 - 1, so that the search always ends at an entry.
    point = min(_bits(state) >> np.uint64(32), _LOW - np.uint64(1))
    low, high = start, stop - 1
    while low < high:
        middle = (low + high) >> 1
        if np.uint64(cdf[middle]) > point:
            high = middle
        else:
            low = middle + 1
    return low


@njit(nogil=True, cache=True)
def _walk(state: NDArray[np.uint64], indptr: NDArray[np.int64], indices: NDArray[np.int32], node: int) -> int:
    """End of a uniform walk of t steps, P(t) = 0.15 * 0.85^t; ``node`` must have a neighbour."""
    for _ in range(_MAX_STEPS):
        bits = _bits(state)
        if bits & _LOW < _RESTART:
            break
        start = indptr[node]
        degree = np.uint64(indptr[node + 1] - start)
        node = indices[start + np.int64(((bits >> np.uint64(32)) * degree) >> np.uint64(32))]
    return node


@njit(nogil=True, cache=True)
def _two_steps(g: Any, state: NDArray[np.uint64], node: int) -> int:
    """A node of the row of A^^2: two steps over closed neighbourhoods; ``node`` must have a neighbour."""
    if _uniform(state) >= g.closed_stay[node]:
        node = g.indices[_pick(state, g.closed_edge_cdf, g.indptr[node], g.indptr[node + 1])]
    if _uniform(state) >= g.stay[node]:
        node = g.indices[_pick(state, g.edge_cdf, g.indptr[node], g.indptr[node + 1])]
    return node


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
            product = np.float64(g.feature_data[left]) * np.float64(g.feature_data[right])
            dot += product
            absolute += abs(product)
            left += 1
            right += 1
    return dot / absolute if absolute > 0.0 else 0.0


@njit(nogil=True, cache=True)
def _dot(x: NDArray[np.float32], a: int, b: int) -> float:
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
def _similar(g: Any, state: NDArray[np.uint64], node: int) -> int:
    """A node by cosine similarity, negative values cut off; -1 when no proposal was accepted (a dead end)."""
    for _ in range(_MAX_PROPOSALS):
        if g.feature_kind == FEATURES_DENSE:
            count = np.uint64(g.feature_norm.shape[0])
            other = int(((_bits(state) >> np.uint64(32)) * count) >> np.uint64(32))
            bound = np.float64(g.feature_norm[node]) * np.float64(g.feature_norm[other])
            if bound > 0.0 and _uniform(state) * bound < _dot(g.feature_x, node, other):
                return other
            continue
        entry = _pick(state, g.feature_row_cdf, g.feature_indptr[node], g.feature_indptr[node + 1])
        column = g.feature_indices[entry]
        start, stop = g.feature_column_indptr[column], g.feature_column_indptr[column + 1]
        other = int(g.feature_column_rows[_pick(state, g.feature_column_cdf, start, stop)])
        if g.feature_kind == FEATURES_SPARSE or _uniform(state) < _agreement(g, node, other):
            return other
    return -1


@njit(nogil=True, cache=True)
def _draw_from_arm(g: Any, state: NDArray[np.uint64], arm: int, target: int) -> int:
    """A node from an arm that is not empty for ``target``: perhaps the target itself, or -1 (a dead end)."""
    if arm == 0:
        return _walk(state, g.indptr, g.indices, target)
    if arm == 1:
        return int(g.indices[_pick(state, g.edge_cdf, g.indptr[target], g.indptr[target + 1])])
    if arm == 2:
        return _two_steps(g, state, target)
    return _similar(g, state, target)


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
def _draw_nodes(
    g: Any,
    state: NDArray[np.uint64],
    target: int,
    weights: NDArray[np.float64],
    max_tries: int,
    slots: NDArray[np.int32],
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
        tries += 1
        point = _uniform(state) * cumulated[3]
        arm = 0
        while arm < last and cumulated[arm] <= point:
            arm += 1
        node = _draw_from_arm(g, state, arm, target)
        # A dead end, the target or a repeat goes together with its arm: the next try picks both anew.
        if node >= 0 and add_member(slots, shift, nodes, count, np.int32(node)) == count:
            arms[count] = arm
            count += 1
    return count


@njit(nogil=True, cache=True)
def _draw_supers(g: Any, state: NDArray[np.uint64], cluster: int, max_tries: int, supers: NDArray[np.int32]) -> int:
    """The cluster of the target, then distinct clusters at the ends of walks from it; their number."""
    supers[0] = cluster
    count = 1
    if g.coarse_indptr[cluster + 1] == g.coarse_indptr[cluster]:
        return count
    for _ in range(max_tries):
        if count == supers.shape[0]:
            break
        drawn = _walk(state, g.coarse_indptr, g.coarse_indices, cluster)
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
    state = np.zeros(1, dtype=np.uint64)
    for t in range(targets.shape[0]):
        target = targets[t]
        if target < 0:
            continue
        _start_stream(state, key, target, _STREAM_NODES)
        _draw_nodes(g, state, target, weights, max_tries, slots, shift, nodes[t], arms[t])
        if supers.shape[1] > 0:
            _start_stream(state, key, target, _STREAM_SUPERS)
            _draw_supers(g, state, g.clusters[target], max_tries, supers[t])
