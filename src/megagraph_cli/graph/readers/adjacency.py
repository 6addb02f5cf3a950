"""Raw directed entries -> the sorted rows of the undirected graph, in linear time and without a sort.

Legend: V nodes, N raw entries, E undirected edges. Transposing a CSR by counting leaves every row of the result in
ascending order; two transpositions sort the graph both ways, and a merge of the two is the undirected graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


@dataclass(frozen=True)
class Adjacency:
    """``indptr`` int64 [V+1], ``indices`` int32 [2E], and what was found in the raw entries.

    ``self_loops``: nodes with an entry to themselves; ``duplicates``: directed entries beyond the first of their
    kind, self-loops included; ``one_way``: undirected edges of which one direction only is stored.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    self_loops: int
    duplicates: int
    one_way: int


def undirected(tails: NDArray[np.int32], heads: NDArray[np.int32], num_nodes: int) -> Adjacency:
    """The undirected graph of the entries: each edge both ways, rows sorted, no self-loops, no duplicates."""
    by_tail_indptr, by_tail = _bucket(tails, heads, num_nodes)
    incoming_indptr, incoming, self_loops, duplicates = _transpose_unique(by_tail_indptr, by_tail)
    del by_tail
    outgoing_indptr, outgoing = transpose(incoming_indptr, incoming)
    indptr, indices = _union(outgoing_indptr, outgoing, incoming_indptr, incoming)
    one_way = indices.size - outgoing.size  # 2E - D, D distinct directed entries
    return Adjacency(indptr, indices, int(self_loops), int(duplicates), int(one_way))


@njit(nogil=True, cache=True)
def _bucket(tails: NDArray[np.int32], heads: NDArray[np.int32], num_nodes: int) -> Any:
    """Heads grouped by tail: (indptr [V+1], heads [N]), rows in raw order."""
    indptr = np.zeros(num_nodes + 1, np.int64)
    for entry in range(tails.size):
        indptr[tails[entry] + 1] += 1
    indptr = np.cumsum(indptr)
    place = indptr[:-1].copy()
    grouped = np.empty(tails.size, np.int32)
    for entry in range(tails.size):
        tail = tails[entry]
        grouped[place[tail]] = heads[entry]
        place[tail] += 1
    return indptr, grouped


@njit(nogil=True, cache=True)
def _transpose_unique(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Any:
    """The transposed CSR without self-loops and duplicates, and how many of each there were."""
    num_nodes = indptr.size - 1
    last = np.full(num_nodes, -1, np.int32)  # last tail seen per head: tails ascend, so repeats come in a row
    loops = np.zeros(num_nodes, np.bool_)
    counts = np.zeros(num_nodes + 1, np.int64)
    duplicates = 0
    for tail in range(num_nodes):
        for entry in range(indptr[tail], indptr[tail + 1]):
            head = indices[entry]
            if last[head] == tail:
                duplicates += 1
                continue
            last[head] = tail
            if head == tail:
                loops[head] = True
            else:
                counts[head + 1] += 1
    out_indptr = np.cumsum(counts)
    place = out_indptr[:-1].copy()
    out = np.empty(out_indptr[-1], np.int32)
    last[:] = -1
    for tail in range(num_nodes):
        for entry in range(indptr[tail], indptr[tail + 1]):
            head = indices[entry]
            if last[head] != tail:
                last[head] = tail
                if head != tail:
                    out[place[head]] = tail
                    place[head] += 1
    return out_indptr, out, loops.sum(), duplicates


@njit(nogil=True, cache=True)
def transpose(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Any:
    """The transposed CSR of a square pattern; its rows come out sorted."""
    num_nodes = indptr.size - 1
    counts = np.zeros(num_nodes + 1, np.int64)
    for entry in range(indices.size):
        counts[indices[entry] + 1] += 1
    out_indptr = np.cumsum(counts)
    place = out_indptr[:-1].copy()
    out = np.empty(indices.size, np.int32)
    for row in range(num_nodes):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            out[place[column]] = row
            place[column] += 1
    return out_indptr, out


@njit(nogil=True, cache=True)
def _merge(left: NDArray[np.int32], right: NDArray[np.int32], out: NDArray[np.int32], at: int) -> Any:
    """Merges two sorted rows without repeats; writes to ``out`` from ``at`` unless it is empty. The new length."""
    i = 0
    j = 0
    count = 0
    while i < left.size or j < right.size:
        if j == right.size or (i < left.size and left[i] < right[j]):
            value = left[i]
            i += 1
        else:
            value = right[j]
            if i < left.size and left[i] == right[j]:
                i += 1
            j += 1
        if out.size:
            out[at + count] = value
        count += 1
    return count


@njit(nogil=True, cache=True)
def _union(a_indptr: NDArray[np.int64], a: NDArray[np.int32], b_indptr: NDArray[np.int64], b: NDArray[np.int32]) -> Any:
    """Row by row union of two sorted CSR patterns."""
    num_nodes = a_indptr.size - 1
    indptr = np.zeros(num_nodes + 1, np.int64)
    nothing = np.empty(0, np.int32)
    for row in range(num_nodes):
        left = a[a_indptr[row] : a_indptr[row + 1]]
        right = b[b_indptr[row] : b_indptr[row + 1]]
        indptr[row + 1] = indptr[row] + _merge(left, right, nothing, 0)
    indices = np.empty(indptr[-1], np.int32)
    for row in range(num_nodes):
        left = a[a_indptr[row] : a_indptr[row + 1]]
        right = b[b_indptr[row] : b_indptr[row + 1]]
        _merge(left, right, indices, indptr[row])
    return indptr, indices
