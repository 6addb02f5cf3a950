from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import (
    csr,
    dense_features,
    graph_of,
    normalised_adjacency,
    random_graph,
    raw_arms,
)

from megagraph_cli.graph.feature_tables import FEATURES_DENSE, FEATURES_NONE, FEATURES_SIGNED, FEATURES_SPARSE
from megagraph_cli.graph.graph import SparseFeatures
from megagraph_cli.graph.nibbles import plane_bytes
from megagraph_cli.graph.tables import build_tables

# A fraction is the difference of two cumulative values, each floored to a multiple of 2^-32.
FIXED = 2.0**-32 * 1.01


def fractions(indptr: NDArray[np.int64], cdf: NDArray[np.uint32]) -> NDArray[np.float64]:
    """What each entry of a row weighs; the last entry also owns the 2^-32 above the last fraction."""
    result = np.diff(cdf.astype(np.float64), prepend=0.0)
    first = indptr[:-1][np.diff(indptr) > 0]
    result[first] = cdf[first]
    return result / 2.0**32


def spread(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], values: NDArray[np.float64], num_columns: int
) -> NDArray[np.float64]:
    dense = np.zeros((indptr.shape[0] - 1, num_columns))
    dense[np.repeat(np.arange(dense.shape[0]), np.diff(indptr)), indices] = values
    return dense


def test_edge_cdf_follows_the_rows_of_normalised_adjacency() -> None:
    graph = random_graph("none")
    got = spread(graph.indptr, graph.indices, fractions(graph.indptr, graph.tables["edge_cdf"]), graph.num_nodes)
    np.testing.assert_allclose(got, raw_arms(graph)[1], rtol=0, atol=FIXED)


def test_two_closed_steps_make_the_row_of_the_squared_adjacency() -> None:
    graph = random_graph("none", seed=3)
    tables = graph.tables
    first = spread(graph.indptr, graph.indices, fractions(graph.indptr, tables["closed_edge_cdf"]), graph.num_nodes)
    second = spread(graph.indptr, graph.indices, fractions(graph.indptr, tables["edge_cdf"]), graph.num_nodes)
    stay_first, stay = tables["closed_stay"][:, None], tables["stay"][:, None]
    eye = np.eye(graph.num_nodes)
    got = ((1 - stay_first) * first + stay_first * eye) @ ((1 - stay) * second + stay * eye)
    squared = normalised_adjacency(graph) @ normalised_adjacency(graph)
    # The probabilities of staying are float32: 2^-24 relative, twice.
    np.testing.assert_allclose(got, squared / squared.sum(1, keepdims=True), rtol=0, atol=3e-7)


def test_scales_of_clusters() -> None:
    graph = random_graph("none")
    sizes = graph.cluster_sizes.astype(np.float64)
    coarse = spread(graph.coarse_indptr, graph.coarse_indices, np.ones(graph.coarse_indices.size), sizes.size)
    weighted = (coarse + np.eye(sizes.size)) * np.sqrt(sizes[:, None] * sizes[None, :])
    # D_a counts a neighbour with its size, so a row of weights sqrt(s_a s_b) normalised by D is bit * r_a * r_b.
    volume = (coarse + np.eye(sizes.size)) @ sizes
    expected = weighted / np.sqrt(volume[:, None] * volume[None, :])
    scale = graph.tables["cluster_scale"].astype(np.float64)
    got = (coarse + np.eye(sizes.size)) * scale[:, None] * scale[None, :]
    np.testing.assert_allclose(got, expected, rtol=2.0**-22)
    # Similar to the random walk D^-1 (A_c + I) S: its spectral radius is 1, so powers stay bounded.
    assert np.abs(np.linalg.eigvalsh(got)).max() <= 1.0 + 1e-6


def test_feature_then_node_makes_the_cosine_of_sparse_features() -> None:
    graph = random_graph("sparse")
    tables, features = graph.tables, graph.features
    assert isinstance(features, SparseFeatures)
    indptr = features.indptr[: graph.num_nodes + 1]
    rows = fractions(indptr, tables["feature_row_cdf"])
    row = spread(indptr, features.indices[: indptr[-1]], rows, features.num_columns)
    columns = fractions(tables["feature_column_indptr"], tables["feature_column_cdf"])
    column = spread(tables["feature_column_indptr"], tables["feature_column_rows"], columns, graph.num_nodes)
    # At most 12 features a node, each with two fractions off by at most FIXED.
    np.testing.assert_allclose(row @ column, raw_arms(graph)[3], rtol=0, atol=24 * FIXED)


def test_rows_and_columns_without_features_weigh_nothing() -> None:
    graph = random_graph("sparse")
    features = graph.features
    assert isinstance(features, SparseFeatures)
    zeros = replace(features, data=np.where(features.indices == 5, 0.0, features.data).astype(np.float32))
    tables = build_tables(replace(graph, features=zeros))
    assert tables["feature_norm"][3] == 0.0
    start, stop = tables["feature_column_indptr"][5:7]
    assert stop > start
    assert not tables["feature_column_cdf"][start:stop].any()
    stored = np.flatnonzero(features.indices[: features.indptr[graph.num_nodes]] == 5)
    shares = fractions(features.indptr[: graph.num_nodes + 1], tables["feature_row_cdf"])
    assert not shares[stored].any()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", FEATURES_NONE),
        ("sparse", FEATURES_SPARSE),
        ("signed", FEATURES_SIGNED),
        ("dense", FEATURES_DENSE),
        ("bags", FEATURES_SPARSE),
    ],
)
def test_kind_and_norms_of_features(kind: str, expected: int) -> None:
    graph = random_graph(kind)
    assert graph.tables["feature_kind"].tolist() == [expected]
    if kind == "none":
        assert "feature_norm" not in graph.tables
    else:
        norm = np.linalg.norm(dense_features(graph), axis=1)
        np.testing.assert_allclose(graph.tables["feature_norm"], norm, rtol=2.0**-23)


def test_super_nodes_features_are_no_part_of_the_tables() -> None:
    graph = random_graph("sparse")
    features = graph.features
    assert isinstance(features, SparseFeatures)
    stop = features.indptr[graph.num_nodes]
    other = features.data.copy()
    other[stop:] = -7.0
    tables = build_tables(replace(graph, features=replace(features, data=other)))
    assert tables.keys() == graph.tables.keys()
    for name, table in tables.items():
        np.testing.assert_array_equal(table, graph.tables[name])


def test_signed_features_must_come_in_ascending_columns() -> None:
    graph = random_graph("none", num_nodes=4)
    features = SparseFeatures(
        np.array([0, 2, 2, 2, 2, 2, 2], dtype=np.int64),
        np.array([1, 0], dtype=np.int32),
        np.array([1.0, -1.0], dtype=np.float32),
        2,
    )
    with pytest.raises(AssertionError, match="ascend"):
        build_tables(replace(graph, features=features))


def test_a_hub_keeps_the_weight_of_every_neighbour() -> None:
    leaves = 100_000
    centre = np.arange(1, leaves + 1, dtype=np.int32)
    graph = random_graph("none", num_nodes=4)
    star = replace(
        graph,
        indptr=np.concatenate([[0], np.arange(leaves, 2 * leaves + 1)]).astype(np.int64),
        indices=np.concatenate([centre, np.zeros(leaves, dtype=np.int32)]),
    )
    shares = np.diff(build_tables(star)["edge_cdf"][:leaves].astype(np.float64), prepend=0.0) / 2.0**32
    # Every leaf weighs 1e-5; two floors of 2^-32 leave it within 2.4e-5 of that, relatively.
    np.testing.assert_allclose(shares, 1.0 / leaves, rtol=5e-5)


def test_a_graph_without_edges_has_tables() -> None:
    graph = graph_of(np.zeros((3, 3), dtype=np.bool_), np.zeros(3, dtype=np.int32))
    assert csr(np.zeros((3, 3), dtype=np.bool_))[1].size == 0
    assert graph.tables["edge_cdf"].size == 0
    np.testing.assert_array_equal(graph.tables["stay"], 1.0)
    np.testing.assert_array_equal(graph.tables["cluster_scale"], 1.0)


def test_coded_rows_are_the_unit_rows_up_to_their_stated_errors() -> None:
    graph = random_graph("wide")
    x = dense_features(graph)
    num_nodes, columns = x.shape
    code, upper = graph.tables["feature_code"], plane_bytes(columns)
    assert code.shape == (num_nodes, 64)
    scale, coarse_error, error = code.view(np.float32)[:, upper // 4 - 3 : upper // 4].astype(np.float64).T
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    planes = np.stack([code[:, :upper], code[:, upper : 2 * upper]], axis=2)[:, : columns // 2].astype(np.int64)
    digits = np.concatenate((planes & 15, planes >> 4), axis=1) - 8
    digits[norm[:, 0] == 0] = 0
    for codes, stated, step in ((16 * digits[..., 0], coarse_error, 16), (digits @ [16, 1], error, 1)):
        distance = np.linalg.norm(unit - scale[:, None] * codes, axis=1)
        assert (distance <= stated).all()
        # Each entry is off by half a step at most, or half a step and half a step of the lower digits.
        most = np.sqrt(columns) * np.abs(unit).max(1) / 119 * (step + (step > 1)) / 2 * 1.01
        assert (stated <= most).all()
    assert norm[3] == 0
    assert not code[3].any()
