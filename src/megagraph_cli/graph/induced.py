"""Compiled kernels that read off the graphs induced by sequences (paper: Bias channels).

Short rows are scanned against a hash of the members. Whether two members of longer rows are neighbours is asked of the
filters of both rows (filters.py), and what these do not rule out is searched in the shorter row: an edge between two
hubs costs no more than another. Sequences are taken some at a time, step by step together, so that the reads of a
step are under way while others are made.

``g`` is a sampler.SamplingArrays, ``out`` a sequences.Sequences' arrays, ``group`` a Group: all are named tuples of
contiguous arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.borrowed import borrowed, keep
from megagraph_cli.graph.choice import either
from megagraph_cli.graph.filters import filter_bit, hash_id
from megagraph_cli.graph.prefetch import prefetch
from megagraph_cli.graph.slots import add_member, find_slot, make_slots
from megagraph_cli.graph.streams import Place

_GROUP = 8
"""Sequences that are taken together."""
_GROUP_MEMBERS = 1024
"""Members of a group, unless it has a single sequence: what is fetched for them should stay in the second cache."""
_SPARE = 64
"""Likely edges that are kept, beside those of one row, before they are searched."""
_SCANNED_PER_MEMBER = 2
"""Scanning looks up every entry, asking filters every other member, in two filters."""
_LINE = 64  # bytes of a cache line
_ENTRIES = 16  # of four bytes in a cache line
_FETCHED_LINES = 8  # of a row or filter that are fetched whole
_NONE, _ONE, _THREE, _SEVEN = np.uint64(0), np.uint64(1), np.uint64(3), np.uint64(7)


class Group(NamedTuple):
    """The members of some sequences, up to K each, and where their rows lie.

    ``ids`` int32 [G, K], ``num_members`` int64 [G], and ``slots`` int16 [G, .], which index them; ``starts`` and
    ``sizes`` int64 of their rows and ``hashes`` uint64 of their ids [G, K]; ``likely`` int64 [G, K + spare, 4] are
    pairs that the filters do not rule out, the member of the shorter row first, and where the search for the other
    stands; ``num_likely`` int64 [G] how many. ``longs`` int64 [K] and ``long_rows`` uint64 [K, 3], the start, size and
    hash of the members that are not scanned, are scratch.
    """

    ids: NDArray[np.int32]
    num_members: NDArray[np.int64]
    slots: NDArray[np.int16]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    likely: NDArray[np.int64]
    num_likely: NDArray[np.int64]
    longs: NDArray[np.int64]
    long_rows: NDArray[np.uint64]


@njit(nogil=True, cache=True)
def _make_group(capacity: int) -> tuple[Any, np.uint64]:
    """A group of sequences of up to ``capacity`` members, fewer where these are many, and the shift of their slots."""
    slots, shift = make_slots(capacity)
    size = max(1, min(_GROUP, _GROUP_MEMBERS // capacity))
    group = Group(
        np.empty((size, capacity), np.int32),
        np.zeros(size, np.int64),
        np.empty((size, slots.shape[0]), np.int16),
        np.empty((size, capacity), np.int64),
        np.empty((size, capacity), np.int64),
        np.empty((size, capacity), np.uint64),
        np.empty((size, capacity + _SPARE, 4), np.int64),
        np.zeros(size, np.int64),
        np.empty(capacity, np.int64),
        np.empty((capacity, 3), np.uint64),
    )
    return group, shift


@njit(nogil=True, cache=True)
def _set_bit(bits: NDArray[np.uint8], row: int, column: int) -> None:
    bits[row, column >> 3] |= np.uint8(1 << (column & 7))


@njit(nogil=True, cache=True)
def _list_nodes(g: Any, out: Any, first: int, size: int, group: Any, shift: np.uint64) -> None:
    """List the nodes of ``size`` sequences from ``first`` on."""
    group.slots[:size] = -1
    for j in range(size):
        nodes, slots, ids = out.nodes[first + j], group.slots[j], group.ids[j]
        count = 0
        while count < nodes.shape[0] and nodes[count] >= 0:
            node = nodes[count]
            add_member(slots, shift, ids, count, node)
            prefetch(g.indptr, node)
            prefetch(g.clusters, node)
            count += 1
        group.num_members[j] = count


@njit(nogil=True, cache=True)
def _list_clusters(g: Any, out: Any, first: int, size: int, nodes: Any, group: Any, shift: np.uint64) -> None:
    """List the distinct clusters of ``size`` sequences from ``first`` on, in order of first appearance."""
    group.slots[:size] = -1
    width = out.nodes.shape[1]
    for j in range(size):
        members, supers, places = nodes.ids[j], out.supers[first + j], out.coarse_index[first + j]
        slots, ids, count = group.slots[j], group.ids[j], 0
        for place in range(width + supers.shape[0]):
            cluster = supers[place - width] if place >= width else np.int32(-1)
            if place < nodes.num_members[j]:
                cluster = g.clusters[members[place]]
            if cluster < 0:
                continue
            position = add_member(slots, shift, ids, count, cluster)
            places[place] = position
            if position == count:
                prefetch(g.coarse_indptr, cluster)
                prefetch(g.cluster_scale, cluster)
                count += 1
        group.num_members[j] = count


@njit(nogil=True, cache=True)
def _find_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    filters: NDArray[np.uint8],
    group: Any,
    size: int,
) -> None:
    """Look up where the members' rows lie, have on their way what will be read of them."""
    for j in range(size):
        count, starts, sizes, hashes = group.num_members[j], group.starts[j], group.sizes[j], group.hashes[j]
        for a in range(count):
            member = np.uint64(group.ids[j, a])
            starts[a] = indptr[member]
            sizes[a] = indptr[member + _ONE] - starts[a]
            hashes[a] = hash_id(member)
        num_longs = 0
        for a in range(count):
            if sizes[a] > _SCANNED_PER_MEMBER * count:
                group.longs[num_longs] = a
                num_longs += 1
        for a in range(count):
            start, stop = starts[a], starts[a] + sizes[a]
            if sizes[a] <= _SCANNED_PER_MEMBER * count:
                for entry in range(start // _ENTRIES * _ENTRIES, stop, _ENTRIES):
                    prefetch(indices, entry)
            elif sizes[a] <= _FETCHED_LINES * _LINE:
                for byte in range(start // _LINE * _LINE, stop, _LINE):
                    prefetch(filters, byte)
            else:
                for i in range(num_longs):
                    bit = filter_bit(hashes[group.longs[i]], np.uint64(sizes[a]))
                    prefetch(filters, start + np.int64(bit >> _THREE))


@njit(nogil=True, cache=True)
def _link(
    indices: NDArray[np.int32],
    filters: NDArray[np.uint8],
    group: Any,
    first: int,
    size: int,
    shift: np.uint64,
    all_bits: NDArray[np.uint8],
) -> None:
    """Set the bits of A + I that short rows tell, and list the likely edges between longer ones."""
    for j in range(size):
        # No calls that would hand over the group: its arrays are seven words each.
        bits = all_bits[first + j]
        count, ids, slots = group.num_members[j], group.ids[j], group.slots[j]
        starts, sizes, hashes = group.starts[j], group.sizes[j], group.hashes[j]
        longs, long_rows, likely = group.longs, group.long_rows, group.likely[j]
        num_longs, num_likely = _NONE, _NONE
        for a in range(count):
            _set_bit(bits, a, a)
            if sizes[a] > _SCANNED_PER_MEMBER * count:
                longs[num_longs] = a
                long_rows[num_longs, 0], long_rows[num_longs, 1] = np.uint64(starts[a]), np.uint64(sizes[a])
                long_rows[num_longs, 2] = hashes[a]
                num_longs += _ONE
                continue
            for entry in range(np.uint64(starts[a]), np.uint64(starts[a] + sizes[a])):
                b = slots[find_slot(slots, shift, ids, indices[entry])]
                if b >= 0:
                    _set_bit(bits, a, b)
                    _set_bit(bits, b, a)
        for i in range(num_longs):
            start, own_size, hashed = long_rows[i, 0], long_rows[i, 1], long_rows[i, 2]
            for k in range(i):
                its_size = long_rows[k, 1]
                own, its = filter_bit(long_rows[k, 2], own_size), filter_bit(hashed, its_size)
                here = filters[start + (own >> _THREE)] >> (own & _SEVEN)
                there = filters[long_rows[k, 0] + (its >> _THREE)] >> (its & _SEVEN)
                # Written before it is known whether it stays, for a branch would be guessed wrongly: at most
                # _SPARE + i - 1 stand before it, and there is room for K + _SPARE.
                shorter = own_size < its_size
                likely[num_likely, 0] = either(shorter, longs[i], longs[k])
                likely[num_likely, 1] = either(shorter, longs[k], longs[i])
                num_likely += np.uint64(here & there & _ONE)
            if num_likely >= np.uint64(_SPARE):
                _confirm(indices, ids, starts, sizes, likely, num_likely, bits)
                num_likely = _NONE
        for i in range(num_likely):
            short = np.uint64(likely[i, 0])
            prefetch(indices, starts[short] + (sizes[short] >> 1))
        group.num_likely[j] = num_likely


@njit(nogil=True, cache=True)
def _confirm(
    indices: NDArray[np.int32],
    ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    likely: NDArray[np.int64],
    num_likely: Place,
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of the likely edges that are edges: all are searched at once, each in the shorter row."""
    longest = 1
    for i in range(np.uint64(num_likely)):
        short = likely[i, 0]
        likely[i, 2], likely[i, 3] = starts[short], sizes[short]
        longest = max(longest, sizes[short])
    # One step of all searches after another: what the next step of each reads is on its way meanwhile.
    while longest > 1:
        longest -= longest >> 1
        for i in range(np.uint64(num_likely)):
            low, left = np.uint64(likely[i, 2]), np.uint64(likely[i, 3])
            half = left >> _ONE
            low += either(indices[low + half] <= ids[np.uint64(likely[i, 1])], half, _NONE)
            left -= half
            prefetch(indices, low + (left >> _ONE))
            likely[i, 2], likely[i, 3] = low, left
    for i in range(np.uint64(num_likely)):
        a, b = likely[i, 0], likely[i, 1]
        if indices[np.uint64(likely[i, 2])] == ids[np.uint64(b)]:
            _set_bit(bits, a, b)
            _set_bit(bits, b, a)


@njit(nogil=True, cache=True)
def _confirm_all(indices: NDArray[np.int32], group: Any, first: int, size: int, all_bits: NDArray[np.uint8]) -> None:
    """Set the bits of the likely edges that are left."""
    for j in range(size):
        bits = all_bits[first + j]
        _confirm(indices, group.ids[j], group.starts[j], group.sizes[j], group.likely[j], group.num_likely[j], bits)


@njit(nogil=True, cache=True)
def induce_slice(g: Any, out: Any) -> None:
    """Fill scales, bits and coarse arrays, prefilled with zeros, of the sequences whose ids ``out`` holds."""
    nodes, shift = _make_group(out.nodes.shape[1])
    clusters, coarse_shift = _make_group(out.nodes.shape[1] + out.supers.shape[1])
    _induce(borrowed(g), borrowed(out), borrowed(nodes), shift, borrowed(clusters), coarse_shift)
    keep((nodes, clusters))


@njit(nogil=True, cache=True)
def _induce(g: Any, out: Any, nodes: Any, shift: np.uint64, clusters: Any, coarse_shift: np.uint64) -> None:
    num_super = out.supers.shape[1]
    together = clusters.ids.shape[0]
    for first in range(0, out.nodes.shape[0], together):
        size = min(together, out.nodes.shape[0] - first)
        _list_nodes(g, out, first, size, nodes, shift)
        _find_rows(g.indptr, g.indices, g.edge_filter, nodes, size)
        for j in range(size):
            scales = out.node_scale[first + j]
            for a in range(nodes.num_members[j]):
                scales[a] = 1.0 / np.sqrt(nodes.sizes[j, a] + 1.0)
        if num_super > 0:
            _list_clusters(g, out, first, size, nodes, clusters, coarse_shift)
            _find_rows(g.coarse_indptr, g.coarse_indices, g.coarse_filter, clusters, size)
            for j in range(size):
                scales = out.coarse_scale[first + j]
                for a in range(clusters.num_members[j]):
                    scales[a] = g.cluster_scale[clusters.ids[j, a]]
        _link(g.indices, g.edge_filter, nodes, first, size, shift, out.node_bits)
        _confirm_all(g.indices, nodes, first, size, out.node_bits)
        if num_super > 0:
            _link(g.coarse_indices, g.coarse_filter, clusters, first, size, coarse_shift, out.coarse_bits)
            _confirm_all(g.coarse_indices, clusters, first, size, out.coarse_bits)
