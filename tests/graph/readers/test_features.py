"""Feature rows: float32, sparse under a quarter, means of clusters, and never dense in between."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.features import canonical, super_rows


@pytest.mark.parametrize("density", [0.0, 0.1, 0.24, 0.26, 1.0])
@pytest.mark.parametrize("form", ["dense", "sparse", "float64", "bool"])
def test_form_follows_density(density: float, form: str) -> None:
    x = np.zeros(10_000, np.float32)
    x[: int(density * x.size)] = 1
    x = np.random.default_rng(0).permutation(x).reshape(200, 50)
    given: Any = {"sparse": sparse.csr_matrix(x), "float64": x.astype(np.float64), "bool": x > 0}.get(form, x)
    found = canonical("file", given, 200)
    assert sparse.issparse(found) == (density < 0.25)
    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.toarray() if sparse.issparse(found) else found, x)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_csr_that_is_to_stay_stays(density: float) -> None:
    x = (np.random.default_rng(0).random((40, 30)) < density).astype(np.float32)
    found = canonical("file", sparse.csr_matrix(x), 40, keep_sparse=True)
    assert sparse.issparse(found)
    np.testing.assert_array_equal(found.toarray(), x)
    assert sparse.issparse(canonical("file", x, 40, keep_sparse=True)) == (density < 0.25)  # was never CSR


def test_sparse_rows_are_canonical_and_the_input_is_kept() -> None:
    given = sparse.csr_matrix(
        (np.array([1.0, 2.0, 0.0, 4.0]), np.array([3, 3, 0, 1]), np.array([0, 3, 4])), shape=(2, 9)
    )
    found = canonical("file", given, 2)
    assert found.indices.tolist() == [3, 1]  # duplicates add up, stored zeros go
    assert found.data.tolist() == [3.0, 4.0]
    assert given.indices.tolist() == [3, 3, 0, 1]


def test_no_columns_is_no_features() -> None:
    assert canonical("file", np.zeros((5, 0)), 5) is None
    assert canonical("file", None, 5) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.zeros((4, 2)), "for 5 nodes"),
        (np.zeros(5), "for 5 nodes"),
        (np.full((5, 2), "a"), "type <U1"),
        (np.full((5, 2), 1j), "complex128"),
        (np.where(np.arange(10).reshape(5, 2) == 7, np.nan, 1.0), "at node 3"),
        (sparse.csr_matrix(np.diag([np.inf] * 5)), "NaN or beyond float32"),
    ],
)
def test_bad_features_are_one_sentence(given: Any, expected: str) -> None:
    with pytest.raises(MgraphError, match=expected):
        canonical("file", given, 5)


@pytest.mark.parametrize("density", [0.1, 0.9])
def test_super_rows_are_means(density: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 20)) * (rng.random((300, 20)) < density)).astype(np.float32)
    clusters = rng.permutation(np.arange(300) % 31).astype(np.int32)
    sizes = np.bincount(clusters).astype(np.int32)
    features = canonical("file", x, 300)
    assert features is not None
    found = super_rows(features, clusters, sizes)
    assert sparse.issparse(found) == (density < 0.25)
    found = found.toarray() if sparse.issparse(found) else found
    expected = np.stack([x[clusters == cluster].astype(np.float64).mean(0) for cluster in range(31)])
    # Ten float32 additions of values below 4: 10 * 4 * 6e-8 absolute.
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


def test_sparse_input_makes_no_dense_temporary() -> None:
    rows, columns = 20_000, 8_000  # 640 MB as dense float32
    entries = np.random.default_rng(0).integers(0, rows * columns, 160_000)
    values = np.ones(entries.size, np.float32)
    x = sparse.csr_matrix((values, (entries // columns, entries % columns)), shape=(rows, columns))
    clusters = (np.arange(rows) // 10).astype(np.int32)
    tracemalloc.start()
    features = canonical("file", x, rows)
    assert features is not None
    super_rows(features, clusters, np.full(rows // 10, 10, np.int32))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 * (x.data.nbytes + x.indices.nbytes)
