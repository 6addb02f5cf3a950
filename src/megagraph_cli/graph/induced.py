"""Compiled kernels that read off the graphs induced by sequences (paper: Bias channels).

Short rows are scanned against a hash of the members. Whether two members of longer rows are neighbours is asked of the
filters of both rows (filters.py), and what these do not rule out is searched in the shorter row: an edge between two
hubs costs no more than another. Sequences are taken some at a time, step by step together, so that the reads of a
step are under way while others are made.

``g`` is a sampler.SamplingArrays, ``out`` a sequences.Sequences' arrays, ``group`` a Group, ``j`` a sequence of it: all
are named tuples of contiguous arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.borrowed import borrowed, keep
from megagraph_cli.graph.filters import filter_bit, hash_id
from megagraph_cli.graph.prefetch import prefetch
from megagraph_cli.graph.slots import add_member, find_slot, make_slots

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
_LAST_ENTRIES = 16
"""So few entries are looked at one after another: they lie in a line or two."""
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
def _list_nodes(g: Any, out: Any, t: int, group: Any, j: int, shift: np.uint64) -> None:
    """List the nodes of sequence ``t``."""
    nodes = out.nodes[t]
    group.slots[j, :] = -1
    count = 0
    while count < nodes.shape[0] and nodes[count] >= 0:
        node = nodes[count]
        add_member(group.slots[j], shift, group.ids[j], count, node)
        prefetch(g.indptr, node)
        prefetch(g.clusters, node)
        count += 1
    group.num_members[j] = count


@njit(nogil=True, cache=True)
def _list_clusters(g: Any, out: Any, t: int, nodes: Any, group: Any, j: int, shift: np.uint64) -> None:
    """List the distinct clusters of sequence ``t``, in order of first appearance."""
    group.slots[j, :] = -1
    count = 0
    width = out.nodes.shape[1]
    for place in range(width + out.supers.shape[1]):
        cluster = out.supers[t, place - width] if place >= width else np.int32(-1)
        if place < nodes.num_members[j]:
            cluster = g.clusters[nodes.ids[j, place]]
        if cluster < 0:
            continue
        position = add_member(group.slots[j], shift, group.ids[j], count, cluster)
        out.coarse_index[t, place] = position
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
    j: int,
) -> None:
    """Look up where the members' rows lie, have on their way what will be read of them."""
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
    j: int,
    shift: np.uint64,
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of A + I that short rows tell, and list the likely edges between longer ones."""
    # No calls that would hand over the group: its arrays are seven words each.
    count, ids, slots = group.num_members[j], group.ids[j], group.slots[j]
    starts, sizes, hashes = group.starts[j], group.sizes[j], group.hashes[j]
    longs, long_rows, likely = group.longs, group.long_rows, group.likely[j]
    num_longs, num_likely = np.uint64(0), 0
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
        start, size, hashed = long_rows[i, 0], long_rows[i, 1], long_rows[i, 2]
        for k in range(i):
            its_size = long_rows[k, 1]
            own, its = filter_bit(long_rows[k, 2], size), filter_bit(hashed, its_size)
            here = filters[start + (own >> _THREE)] >> (own & _SEVEN)
            there = filters[long_rows[k, 0] + (its >> _THREE)] >> (its & _SEVEN)
            if here & there & np.uint64(1):
                short, other = (longs[i], longs[k]) if size < its_size else (longs[k], longs[i])
                likely[num_likely, 0], likely[num_likely, 1] = short, other
                prefetch(indices, starts[short] + (sizes[short] >> 1))
                num_likely += 1
        if num_likely >= _SPARE:
            _confirm(indices, ids, starts, sizes, likely, num_likely, bits)
            num_likely = 0
    group.num_likely[j] = num_likely


@njit(nogil=True, cache=True)
def _confirm(
    indices: NDArray[np.int32],
    ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    likely: NDArray[np.int64],
    num_likely: int,
    bits: NDArray[np.uint8],
) -> None:
    """Set the bits of the likely edges that are edges: all are searched at once, each in the shorter row."""
    longest = 1
    for i in range(num_likely):
        short = likely[i, 0]
        likely[i, 2], likely[i, 3] = starts[short], sizes[short]
        longest = max(longest, sizes[short])
    # One step of all searches after another: what the next step of each reads is on its way meanwhile.
    while longest > _LAST_ENTRIES:
        longest -= longest >> 1
        for i in range(np.uint64(num_likely)):
            low, left = np.uint64(likely[i, 2]), np.uint64(likely[i, 3])
            half = left >> _ONE
            low += half if indices[low + half] <= ids[np.uint64(likely[i, 1])] else _NONE
            left -= half
            prefetch(indices, low + (left >> _ONE))
            likely[i, 2], likely[i, 3] = low, left
    for i in range(np.uint64(num_likely)):
        a, b = likely[i, 0], likely[i, 1]
        low, key = np.uint64(likely[i, 2]), ids[np.uint64(b)]
        for entry in range(low, low + np.uint64(likely[i, 3])):
            if indices[entry] == key:
                _set_bit(bits, a, b)
                _set_bit(bits, b, a)
                break


@njit(nogil=True, cache=True)
def _confirm_all(indices: NDArray[np.int32], group: Any, j: int, bits: NDArray[np.uint8]) -> None:
    """Set the bits of the likely edges that are left."""
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
        for j in range(size):
            _list_nodes(g, out, first + j, nodes, j, shift)
        for j in range(size):
            t = first + j
            _find_rows(g.indptr, g.indices, g.edge_filter, nodes, j)
            for a in range(nodes.num_members[j]):
                out.node_scale[t, a] = 1.0 / np.sqrt(nodes.sizes[j, a] + 1.0)
            if num_super > 0:
                _list_clusters(g, out, t, nodes, clusters, j, coarse_shift)
        for j in range(size):
            t = first + j
            if num_super > 0:
                _find_rows(g.coarse_indptr, g.coarse_indices, g.coarse_filter, clusters, j)
                for a in range(clusters.num_members[j]):
                    out.coarse_scale[t, a] = g.cluster_scale[clusters.ids[j, a]]
            _link(g.indices, g.edge_filter, nodes, j, shift, out.node_bits[t])
        for j in range(size):
            t = first + j
            _confirm_all(g.indices, nodes, j, out.node_bits[t])
            if num_super > 0:
                _link(g.coarse_indices, g.coarse_filter, clusters, j, coarse_shift, out.coarse_bits[t])
        if num_super > 0:
            for j in range(size):
                _confirm_all(g.coarse_indices, clusters, j, out.coarse_bits[first + j])
