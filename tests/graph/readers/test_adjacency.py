"""Cleaning raw entries against plain Python sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from megagraph_cli.graph.readers.adjacency import transpose, undirected

ENTRIES = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=60),
    )
)


@settings(max_examples=200, deadline=None)
@given(ENTRIES)
def test_undirected_equals_sets(case: tuple[int, list[tuple[int, int]]]) -> None:
    num_nodes, entries = case
    ends = np.array(entries, dtype=np.int32).reshape(-1, 2)
    result = undirected(np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1]), num_nodes)
    distinct = set(entries)
    loops = {(u, v) for u, v in distinct if u == v}
    rows = {(u, v) for u, v in distinct - loops} | {(v, u) for u, v in distinct - loops}
    expected = [sorted(v for u, v in rows if u == node) for node in range(num_nodes)]
    found = [result.indices[result.indptr[node] : result.indptr[node + 1]].tolist() for node in range(num_nodes)]
    assert found == expected
    assert result.self_loops == len(loops)
    assert result.duplicates == len(entries) - len(distinct)
    assert result.one_way == sum((v, u) not in distinct for u, v in distinct - loops)
    assert (result.indptr.dtype, result.indices.dtype) == (np.int64, np.int32)


def test_transpose_sorts_rows() -> None:
    matrix = sparse.random(40, 40, 0.2, format="csr", random_state=0)
    indptr, indices = transpose(matrix.indptr.astype(np.int64), matrix.indices)
    expected = matrix.T.tocsr()
    expected.sort_indices()
    np.testing.assert_array_equal(indptr, expected.indptr)
    np.testing.assert_array_equal(indices, expected.indices)
