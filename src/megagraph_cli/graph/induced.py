"""Compiled kernels that read off the graphs induced by sequences (paper: Bias channels).

``g`` is a sampler.SamplingArrays, ``out`` a sequences.Sequences' arrays: named tuples of contiguous arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.slots import add_member, find_slot, make_slots


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
    slots: NDArray[np.int32],
    shift: np.uint64,
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of A + I among the first ``count`` members, which ``slots`` indexes."""
    # Rows up to about the cost of searching all members in them are scanned once; an edge between two longer
    # rows (hubs) is searched in the shorter one. An edge with one short row is found from that side.
    longest = 8 * count
    for a in range(count):
        _set_bit(bits, a, a)
        start, stop = indptr[members[a]], indptr[members[a] + 1]
        if stop - start <= longest:
            for entry in range(start, stop):
                b = slots[find_slot(slots, shift, members, indices[entry])]
                if b >= 0:
                    _set_bit(bits, a, b)
                    _set_bit(bits, b, a)
            continue
        for b in range(a):
            other, other_stop = indptr[members[b]], indptr[members[b] + 1]
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
    slots: NDArray[np.int32],
    shift: np.uint64,
    distinct: NDArray[np.int32],
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
    _induce(g.coarse_indptr, g.coarse_indices, distinct, count, slots, shift, out.coarse_bits[t])


@njit(nogil=True, cache=True)
def induce_slice(g: Any, out: Any) -> None:
    """Fill scales, bits and coarse arrays, prefilled with zeros, of the sequences whose ids ``out`` holds."""
    distinct = np.empty(out.nodes.shape[1] + out.supers.shape[1], dtype=np.int32)
    slots, shift = make_slots(distinct.shape[0])
    for t in range(out.nodes.shape[0]):
        nodes = out.nodes[t]
        slots[:] = -1
        count = 0
        while count < nodes.shape[0] and nodes[count] >= 0:
            add_member(slots, shift, nodes, count, nodes[count])
            out.node_scale[t, count] = g.node_scale[nodes[count]]
            count += 1
        _induce(g.indptr, g.indices, nodes, count, slots, shift, out.node_bits[t])
        if out.supers.shape[1] > 0:
            _coarsen(g, out, t, count, slots, shift, distinct)
