"""Drawn frequencies against the distributions they are drawn from (paper: Sampling).

Expected distance: with n draws of a distribution p the total variation of the frequencies has mean at most
sum_j sqrt(p_j (1 - p_j) / (2 pi n)) up to O(1/n), and exceeds its mean by d with probability below exp(-2 n d^2).
Small graphs keep that mean under 0.01 with n >= 60,000 and real ones at 0.016 with n > 200,000, so that 0.02
fails by chance with probability below exp(-6).
Seeds are fixed, so a test that passes keeps passing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray
from scipy import sparse
from tiny import graph_of, random_adjacency, random_features, random_graph, raw_arms, without_target

from megagraph_cli.graph import streams
from megagraph_cli.graph.coded import make_seats
from megagraph_cli.graph.draws import draw_slice
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.sampler import ARMS, sampling_arrays
from megagraph_cli.graph.sequences import Sequences, build_sequences
from megagraph_cli.graph.similarity import similar
from megagraph_cli.graph.tables import build_tables
from megagraph_cli.graph.tries import Block

TOLERANCE = 0.02
MAX_TRIES = 512


@njit(nogil=True)
def _count_first(arrays, targets, weights, num_views, counts):  # type: ignore[no-untyped-def]
    """counts [T, 4, V] += which arm drew which node first, over ``num_views`` views of every target."""
    key = np.array([7, 3, 0], dtype=np.int64)
    nodes = np.empty((targets.shape[0], 2), dtype=np.int32)
    arms = np.empty((targets.shape[0], 2), dtype=np.int8)
    supers = np.empty((targets.shape[0], 0), dtype=np.int32)
    for view in range(num_views):
        key[2] = view
        nodes[:] = -1
        draw_slice(arrays, targets, key, weights, MAX_TRIES, nodes, arms, supers)
        for t in range(targets.shape[0]):
            if nodes[t, 1] >= 0:
                counts[t, arms[t, 1], nodes[t, 1]] += 1


def first_draws(
    graph: Graph, targets: NDArray[np.int64], weights: NDArray[np.float64], num_views: int
) -> NDArray[np.float64]:
    """Frequencies [T, 4, V] of (arm, node) of the first node drawn; a row that drew nothing sums below 1."""
    counts = np.zeros((targets.size, 4, graph.num_nodes), dtype=np.int64)
    _count_first(sampling_arrays(graph), targets, weights, num_views, counts)
    return counts / num_views


def only(arm: int) -> NDArray[np.float64]:
    return np.eye(4)[arm]


def total_variation(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * np.abs(a - b).sum(-1)


def expected_noise(p: NDArray[np.float64], num_draws: int) -> float:
    return float(np.sqrt(p * (1 - p) / (2 * np.pi * num_draws)).sum(-1).max())


@pytest.mark.parametrize(
    ("arm", "kind"),
    [(0, "none"), (1, "none"), (2, "none"), (3, "sparse"), (3, "signed"), (3, "dense"), (3, "wide"), (3, "bags")],
)
def test_arm_follows_its_distribution(arm: int, kind: str) -> None:
    graph = random_graph(kind, num_nodes=30)
    targets = np.arange(graph.num_nodes)
    expected = without_target(raw_arms(graph))[arm]
    assert expected_noise(expected, 60_000) < 0.01
    got = first_draws(graph, targets, only(arm), 60_000).sum(1)
    empty = expected.sum(1) == 0
    assert empty.any()
    assert not got[empty].any()
    assert total_variation(got, expected).max() <= TOLERANCE


def assert_codes_change_nothing(graph: Graph, num_sampled: int) -> Sequences:
    """Sequences by similarity, the same with coded rows and without."""
    plain = replace(graph, tables={name: t for name, t in graph.tables.items() if name != "feature_code"})
    assert "feature_code" in graph.tables
    targets = np.arange(graph.num_nodes)
    coded, uncoded = (
        build_sequences(
            g, targets, num_sampled=num_sampled, num_super=0, weights=only(3), rng_seed=5, epoch=0, view=0, threads=1
        )
        for g in (graph, plain)
    )
    np.testing.assert_array_equal(coded.nodes, uncoded.nodes)
    return coded


def test_coded_rows_decide_as_the_rows_themselves_would() -> None:
    graph = random_graph("wide", num_nodes=60)
    plain = replace(graph, tables={name: t for name, t in graph.tables.items() if name != "feature_code"})
    targets = np.arange(graph.num_nodes)
    np.testing.assert_array_equal(first_draws(graph, targets, only(3), 300), first_draws(plain, targets, only(3), 300))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("columns", [32, 33, 41, 64, 100, 129, 200, 300])
def test_codes_change_nothing_whatever_their_width(columns: int, dtype: type[np.floating[Any]]) -> None:
    graph = random_graph("none", num_nodes=300)
    x = np.random.default_rng(columns).normal(size=(graph.num_nodes + graph.num_clusters, columns))
    x[:, 0] *= 5.0  # entries of different sizes
    graph = replace(graph, features=DenseFeatures(x.astype(dtype)))
    # More tries in a round than have their proposals under way together.
    found = assert_codes_change_nothing(replace(graph, tables=build_tables(graph)), 30)
    assert (found.nodes >= 0).all()


def test_codes_leave_rows_of_extreme_norms_to_the_rows() -> None:
    graph = random_graph("none", num_nodes=200)
    x = np.random.default_rng(0).normal(size=(graph.num_nodes + graph.num_clusters, 40))
    x[::5] *= 3e38 / np.abs(x[::5]).max(axis=1, keepdims=True)  # float32 holds the entries, but not the norm
    x[1::5] *= 1e-45 / np.abs(x[1::5]).max(axis=1, keepdims=True)
    graph = replace(graph, features=DenseFeatures(x.astype(np.float32)))
    tables = build_tables(graph)
    assert np.isinf(tables["feature_norm"]).any()
    assert_codes_change_nothing(replace(graph, tables=tables), 8)


def test_a_try_makes_as_many_proposals_by_codes_as_by_rows() -> None:
    """Where one node in a hundred is similar at all, some tries are given up and some succeed at the last proposal."""
    graph, count = random_graph("none", num_nodes=300), 6000
    rng = np.random.default_rng(0)
    base, noise = rng.normal(size=40), rng.normal(size=(graph.num_nodes + graph.num_clusters, 40))
    x = np.where(np.arange(len(noise))[:, None] % 100 == 0, base, -base) + 0.3 * noise
    graph = replace(graph, features=DenseFeatures(x.astype(np.float32)))
    arrays = sampling_arrays(replace(graph, tables=build_tables(graph)))
    without = arrays._replace(feature_code=arrays.feature_code[:0])
    found = []
    for g in (arrays, without):
        block = Block(
            state=np.random.default_rng(1).integers(0, 2**64, count, dtype=np.uint64),
            target=np.arange(count) % 3 * 100,
            arm=np.full(count, 3, dtype=np.int8),
            node=np.zeros(count, dtype=np.int64),
            active=np.arange(count),
            place=np.zeros(count, dtype=np.int64),
            starts=np.zeros(4, dtype=np.int64),
        )
        similar(g, block, make_seats(40), block.active)
        found.append(block.node)
    np.testing.assert_array_equal(*found)
    drawn = x[: arrays.feature_norm.shape[0]] / np.linalg.norm(x[: arrays.feature_norm.shape[0]], axis=1, keepdims=True)
    given_up = np.mean((1 - np.maximum(drawn[:300:100] @ drawn.T, 0).mean(axis=1)) ** 256)
    assert 0.05 < given_up < 0.95
    assert abs(np.mean(found[0] == -1) - given_up) < 5 * np.sqrt(given_up * (1 - given_up) / count)


def test_a_try_that_finds_nothing_similar_ends_and_the_next_take_its_place() -> None:
    graph = random_graph("none", num_nodes=300)
    x = np.random.default_rng(0).normal(size=(graph.num_nodes + graph.num_clusters, 40))
    x[:, 0] = np.abs(x[:, 0])
    x[9] = 0.0
    x[9, 0] = -1.0  # unlike all others: 256 proposals are refused, or it meets itself
    graph = replace(graph, features=DenseFeatures(x.astype(np.float32)))
    found = assert_codes_change_nothing(replace(graph, tables=build_tables(graph)), 8)
    assert (found.nodes[9, 1:] == -1).all()
    assert (np.delete(found.nodes, 9, axis=0) >= 0).all()


def mixture(arms: NDArray[np.float64], target: int, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability [4, V] of (arm, node) at one accepted draw from ``arms`` [4, V] with the target still in them.

    Empty arms are left out; the target goes with its arm, so an arm that often returns to it counts for less.
    """
    joint = weights[:, None] * arms
    joint[:, target] = 0.0
    return joint / joint.sum()


@pytest.mark.parametrize("target", [0, 3, 7, 28], ids=["hub", "no features", "plain", "isolated"])
def test_mixture_and_the_arm_recorded(target: int) -> None:
    graph = random_graph("sparse", num_nodes=30)
    weights = np.array([0.4, 0.1, 0.3, 0.2])
    expected = mixture(raw_arms(graph)[:, target], target, weights)
    assert expected_noise(expected.reshape(-1), 200_000) < 0.01
    got = first_draws(graph, np.array([target]), weights, 200_000)[0]
    assert total_variation(got.reshape(-1), expected.reshape(-1)) <= TOLERANCE


@pytest.mark.parametrize("target", [1, 3])
def test_draws_without_repeats_match_enumeration(target: int) -> None:
    rng = np.random.default_rng(5)
    clusters = np.zeros(7, dtype=np.int32)
    features = random_features(rng, "sparse", 7, 1)
    graph = graph_of(random_adjacency(rng, 7, 0.3, isolated=1), clusters, features)
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    phi = mixture(raw_arms(graph)[:, target], target, weights).sum(0)
    expected = {}
    for order in permutations(np.flatnonzero(phi).tolist(), 3):
        left, probability = 1.0, 1.0
        for node in order:
            probability *= phi[node] / left
            left -= phi[node]
        expected[order] = probability
    num_views = 150_000
    assert expected_noise(np.array(list(expected.values())), num_views) < 0.01
    got = dict.fromkeys(expected, 0)
    arrays, targets = sampling_arrays(graph), np.array([target])
    nodes, arms = np.empty((1, 4), dtype=np.int32), np.empty((1, 4), dtype=np.int8)
    for view in range(num_views):
        nodes[:] = -1
        key = np.array([1, 0, view])
        draw_slice(arrays, targets, key, weights, MAX_TRIES, nodes, arms, np.empty((1, 0), np.int32))
        got[tuple(nodes[0, 1:].tolist())] += 1
    distance = 0.5 * sum(abs(got[order] / num_views - expected[order]) for order in expected)
    assert distance <= TOLERANCE


def test_random_bits_are_splitmix64() -> None:
    state = np.array([1234567], dtype=np.uint64)
    # The published test vector of the reference implementation (Vigna).
    assert [int(streams.bits(state, 0)) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_weight_on_empty_arms_alone_draws_nothing() -> None:
    graph = random_graph("sparse", num_nodes=30)
    assert not first_draws(graph, np.array([3]), only(3), 10).any()
    assert not first_draws(graph, np.array([29]), np.array([0.5, 0.3, 0.2, 0.0]), 10).any()
    # Eight draws: multiples of 1/8 sum exactly.
    assert first_draws(graph, np.array([29]), np.array([0.5, 0.3, 0.0, 0.2]), 8)[0, 3].sum() == 1.0


def test_one_specialisation_serves_every_kind_of_features() -> None:
    kinds = [random_graph(kind) for kind in ("none", "sparse", "signed", "dense", "wide", "bags")]
    for graph in kinds:
        first_draws(graph, np.array([0]), np.full(4, 0.25), 1)
    assert len(_count_first.signatures) == 1
    assert len(ARMS) == 4


def arm_rows(graph: Graph, target: int) -> NDArray[np.float64]:
    """Rows of the four arms of one target without V x V arrays, float64 [4, V], the target still in them."""
    count = graph.num_nodes
    adjacency = sparse.csr_matrix((np.ones(graph.indices.size), graph.indices, graph.indptr), shape=(count, count))
    degree = np.diff(graph.indptr).astype(np.float64)
    start = np.zeros(count)
    start[target] = 1.0
    pagerank, walker = np.zeros(count), start
    for step in range(150):  # 0.85^150 < 3e-11
        pagerank += 0.15 * 0.85**step * walker
        walker = adjacency @ (walker / np.maximum(degree, 1))
    scale = (degree + 1) ** -0.5
    once = scale * (adjacency @ (scale * start) + scale * start)
    twice = scale * (adjacency @ (scale * once) + scale * once)
    similar = np.zeros(count)
    features = graph.features
    if isinstance(features, SparseFeatures):
        stop = features.indptr[count]
        x = sparse.csr_matrix(
            (features.data[:stop].astype(np.float64), features.indices[:stop], features.indptr[: count + 1]),
            shape=(count, features.num_columns),
        )
        norm = np.sqrt(np.asarray(x.multiply(x).sum(1)).ravel())
        similar = np.asarray((x @ x[[target]].T).todense()).ravel() / np.maximum(norm, 1e-30)
    rows = np.stack([pagerank, once * (1 - start), twice, np.maximum(similar, 0)])
    return rows / rows.sum(1, keepdims=True)


@pytest.mark.slow
@pytest.mark.skipif("MGRAPH_DATA" not in os.environ, reason="MGRAPH_DATA names no folder of raw graphs")
@pytest.mark.parametrize("name", ["cora", "own/flickr_attributed.npz"])
def test_arms_on_a_real_graph(name: str, tmp_path: Path) -> None:
    root = Path(os.environ["MGRAPH_DATA"])
    path = root / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    graph = load_graph(str(path) if path.is_file() else name, root, tmp_path)
    assert isinstance(graph.features, SparseFeatures)
    hub = int(np.diff(graph.indptr).argmax())
    rows = arm_rows(graph, hub)
    for arm in range(4):
        expected = np.delete(rows[arm], hub)
        expected /= expected.sum()
        num_draws = max(200_000, int((np.sqrt(expected / (2 * np.pi)).sum() / 0.016) ** 2))
        got = first_draws(graph, np.array([hub]), only(arm), num_draws)[0, arm]
        assert total_variation(np.delete(got, hub), expected) <= TOLERANCE, ARMS[arm]
