"""Compiled kernels that read off the graphs induced by sequences (paper: Bias channels).

``g`` is a sampler.SamplingArrays, ``out`` a sequences.Sequences' arrays: named tuples of contiguous arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.prefetch import prefetch
from megagraph_cli.graph.slots import add_member, find_slot, make_slots

_SCANNED_PER_MEMBER = 16
_ROWS_AHEAD = 3
_LINE = 16  # entries of a cache line


@njit(nogil=True, cache=True)
def _contains(indices: NDArray[np.int32], start: int, stop: int, value: int) -> bool:
    low, high = start, stop
    while low < high:
        middle = (low + high) >> 1
        if indices[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low < stop and indices[low] == value


@njit(nogil=True, cache=True)
def _set_bit(bits: NDArray[np.uint8], row: int, column: int) -> None:
    bits[row, column >> 3] |= np.uint8(1 << (column & 7))


@njit(nogil=True, cache=True)
def _induce(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    members: NDArray[np.int32],
    count: int,
    slots: NDArray[np.int16],
    shift: np.uint64,
    ends: NDArray[np.int64],
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of A + I among the first ``count`` members, which ``slots`` indexes; ``ends`` [., 2] is scratch."""
    for a in range(count):
        ends[a, 0] = indptr[members[a]]
        ends[a, 1] = indptr[members[a] + 1]
    # Rows up to about the cost of searching all members in them are scanned once; an edge between two longer
    # rows (hubs) is searched in the shorter one. An edge with one short row is found from that side.
    longest = _SCANNED_PER_MEMBER * count
    for a in range(min(count, _ROWS_AHEAD)):
        _prefetch_row(indices, ends, a, longest)
    for a in range(count):
        if a + _ROWS_AHEAD < count:
            _prefetch_row(indices, ends, a + _ROWS_AHEAD, longest)
        _set_bit(bits, a, a)
        if ends[a, 1] - ends[a, 0] <= longest:
            for entry in range(np.uint64(ends[a, 0]), np.uint64(ends[a, 1])):
                b = slots[find_slot(slots, shift, members, indices[entry])]
                if b >= 0:
                    _set_bit(bits, a, b)
                    _set_bit(bits, b, a)
        else:
            _search_pairs(indices, members, a, ends, longest, bits)


@njit(nogil=True, cache=True)
def _prefetch_row(indices: NDArray[np.int32], ends: NDArray[np.int64], row: int, longest: int) -> None:
    start, stop = ends[row, 0], ends[row, 1]
    if stop - start <= longest:
        for entry in range(np.uint64(start), np.uint64(stop), np.uint64(_LINE)):
            prefetch(indices, entry)


@njit(nogil=True, cache=True)
def _search_pairs(
    indices: NDArray[np.int32],
    members: NDArray[np.int32],
    a: int,
    ends: NDArray[np.int64],
    longest: int,
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of the edges between member ``a`` and earlier ones whose rows are as long."""
    start, stop = ends[a, 0], ends[a, 1]
    for b in range(a):
        other, other_stop = ends[b, 0], ends[b, 1]
        if other_stop - other <= longest:
            continue
        if other_stop - other < stop - start:
            linked = _contains(indices, other, other_stop, members[a])
        else:
            linked = _contains(indices, start, stop, members[b])
        if linked:
            _set_bit(bits, a, b)
            _set_bit(bits, b, a)


@njit(nogil=True, cache=True)
def _coarsen(
    g: Any,
    out: Any,
    t: int,
    num_nodes: int,
    slots: NDArray[np.int16],
    shift: np.uint64,
    distinct: NDArray[np.int32],
    ends: NDArray[np.int64],
) -> None:
    """The distinct clusters of sequence ``t``, in order of first appearance, and their induced graph."""
    slots[:] = -1
    count = 0
    width = out.nodes.shape[1]
    for place in range(width + out.supers.shape[1]):
        cluster = out.supers[t, place - width] if place >= width else np.int32(-1)
        if place < num_nodes:
            cluster = g.clusters[out.nodes[t, place]]
        if cluster < 0:
            continue
        position = add_member(slots, shift, distinct, count, cluster)
        out.coarse_index[t, place] = position
        if position == count:
            out.coarse_scale[t, position] = g.cluster_scale[cluster]
            count += 1
    _induce(g.coarse_indptr, g.coarse_indices, distinct, count, slots, shift, ends, out.coarse_bits[t])


@njit(nogil=True, cache=True)
def induce_slice(g: Any, out: Any) -> None:
    """Fill scales, bits and coarse arrays, prefilled with zeros, of the sequences whose ids ``out`` holds."""
    distinct = np.empty(out.nodes.shape[1] + out.supers.shape[1], dtype=np.int32)
    ends = np.empty((distinct.shape[0], 2), dtype=np.int64)
    slots, shift = make_slots(distinct.shape[0])
    for t in range(out.nodes.shape[0]):
        nodes = out.nodes[t]
        slots[:] = -1
        count = 0
        while count < nodes.shape[0] and nodes[count] >= 0:
            add_member(slots, shift, nodes, count, nodes[count])
            out.node_scale[t, count] = g.node_scale[nodes[count]]
            count += 1
        _induce(g.indptr, g.indices, nodes, count, slots, shift, ends, out.node_bits[t])
        if out.supers.shape[1] > 0:
            _coarsen(g, out, t, count, slots, shift, distinct, ends)
