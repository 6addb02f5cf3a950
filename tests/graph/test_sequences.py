from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import csr, dense_adjacency, graph_of, normalised_adjacency, random_graph

from megagraph_cli.graph.graph import Graph, SparseFeatures
from megagraph_cli.graph.sequences import Sequences, build_sequences

EVEN = np.full(4, 0.25)


def build(graph: Graph, targets: list[int] | NDArray[np.int64], **changes: Any) -> Sequences:
    options = {
        "num_sampled": 11,
        "num_super": 3,
        "weights": EVEN,
        "rng_seed": 1,
        "epoch": 2,
        "view": 0,
        "threads": 1,
    }
    return build_sequences(graph, np.asarray(targets, dtype=np.int64), **(options | changes))


def assert_equal(a: Sequences, b: Sequences, rows: Any = slice(None)) -> None:
    for field in fields(Sequences):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name)[rows], err_msg=field.name)


def unpack(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of bits [K, ceil(K/8)] -> [K, K]; the bits beyond K must be zero."""
    wide = np.unpackbits(bits, axis=1, bitorder="little")
    assert not wide[:, bits.shape[0] :].any()
    return wide[:, : bits.shape[0]]


@pytest.mark.parametrize("kind", ["none", "sparse", "signed", "dense", "bags"])
def test_nodes_are_distinct_and_padding_comes_last(kind: str) -> None:
    graph = random_graph(kind)
    sequences = build(graph, np.arange(graph.num_nodes))
    for target, (nodes, arms) in enumerate(zip(sequences.nodes, sequences.arms, strict=True)):
        count = int((nodes >= 0).sum())
        assert nodes[0] == target
        assert np.unique(nodes[:count]).size == count
        assert (nodes[count:] == -1).all()
        assert arms[0] == -1
        assert ((arms[1:count] >= 0) & (arms[1:count] < 4)).all()
        assert (arms[count:] == -1).all()
    assert sequences.nodes.dtype == np.int32
    assert sequences.arms.dtype == np.int8


@pytest.mark.parametrize("num_sampled", [1, 2, 7, 8, 9, 30])
def test_node_bits_and_scale_give_the_slice_of_normalised_adjacency(num_sampled: int) -> None:
    graph = random_graph("dense")
    a_hat = normalised_adjacency(graph)
    sequences = build(graph, np.arange(graph.num_nodes), num_sampled=num_sampled)
    assert sequences.node_bits.shape == (graph.num_nodes, num_sampled, -(-num_sampled // 8))
    for nodes, bits, scale in zip(sequences.nodes, sequences.node_bits, sequences.node_scale, strict=True):
        there = nodes >= 0
        expected = np.where(there[:, None] & there[None, :], a_hat[np.ix_(nodes, nodes)], 0.0)
        # Two float32 scales: 2^-24 relative each, and their product.
        np.testing.assert_allclose(unpack(bits) * scale[:, None] * scale[None, :], expected, rtol=2.0**-22)
        assert not scale[~there].any()


def test_coarse_arrays_describe_the_distinct_clusters_in_order_of_appearance() -> None:
    graph = random_graph("sparse", num_nodes=60)
    coarse = np.eye(graph.num_clusters, dtype=np.uint8)
    coarse[np.repeat(np.arange(graph.num_clusters), np.diff(graph.coarse_indptr)), graph.coarse_indices] = 1
    sequences = build(graph, np.arange(graph.num_nodes))
    for t in range(graph.num_nodes):
        nodes, supers = sequences.nodes[t], sequences.supers[t]
        rows = np.concatenate([np.where(nodes >= 0, graph.clusters[nodes], -1), supers])
        distinct = list(dict.fromkeys(rows[rows >= 0].tolist()))
        index = [distinct.index(row) if row >= 0 else 0 for row in rows.tolist()]
        np.testing.assert_array_equal(sequences.coarse_index[t], index)
        scale = np.zeros(14)
        scale[: len(distinct)] = graph.tables["cluster_scale"][distinct]
        np.testing.assert_array_equal(sequences.coarse_scale[t], scale.astype(np.float32))
        expected = np.zeros((14, 14), dtype=np.uint8)
        expected[: len(distinct), : len(distinct)] = coarse[np.ix_(distinct, distinct)]
        np.testing.assert_array_equal(unpack(sequences.coarse_bits[t]), expected)


@pytest.mark.parametrize("num_sampled", [12, 30])
def test_edges_between_long_rows_are_all_found_and_no_others(num_sampled: int) -> None:
    """Rows so long that filters are asked, and so many likely edges that they are searched before a sequence ends."""
    rng = np.random.default_rng(2)
    upper = np.triu(rng.random((300, 300)) < rng.choice([0.03, 0.4, 0.8], 300)[:, None], 1)
    graph = graph_of(upper | upper.T, rng.permutation(300) // 2)
    dense = dense_adjacency(graph) | np.eye(300, dtype=np.bool_)
    coarse = np.eye(graph.num_clusters, dtype=np.bool_)
    coarse[np.repeat(np.arange(graph.num_clusters), np.diff(graph.coarse_indptr)), graph.coarse_indices] = True
    degrees = np.diff(graph.indptr)
    assert degrees.min() < 2 * num_sampled < degrees.max()
    sequences = build(graph, np.arange(300), num_sampled=num_sampled, num_super=4)
    for t in range(300):
        nodes = sequences.nodes[t]
        assert (nodes >= 0).all()
        np.testing.assert_array_equal(unpack(sequences.node_bits[t]), dense[np.ix_(nodes, nodes)])
        rows = np.concatenate([graph.clusters[nodes], sequences.supers[t]])
        clusters = np.array(list(dict.fromkeys(rows.tolist())))
        found = unpack(sequences.coarse_bits[t])[: clusters.size, : clusters.size]
        np.testing.assert_array_equal(found, coarse[np.ix_(clusters, clusters)])


def test_supers_start_with_the_targets_cluster_and_stay_in_its_component() -> None:
    # Two paths of clusters, 0-1-2 and 3-4; cluster 5 is alone. Two nodes each, linked inside and along the path.
    clusters = np.repeat(np.arange(6), 2)
    adjacency = np.zeros((12, 12), dtype=np.bool_)
    for a, b in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (6, 7), (7, 8), (8, 9)]:
        adjacency[a, b] = adjacency[b, a] = True
    graph = graph_of(adjacency, clusters)
    sequences = build(graph, np.arange(12), num_super=4)
    np.testing.assert_array_equal(sequences.supers[:, 0], clusters)
    found = [{int(c) for c in row if c >= 0} for row in sequences.supers]
    assert found == [{0, 1, 2}] * 6 + [{3, 4}] * 4 + [{5}] * 2
    assert all((row[len(ids) :] == -1).all() for row, ids in zip(sequences.supers, found, strict=True))


def test_without_super_nodes_nothing_coarse_is_built() -> None:
    graph = random_graph("sparse")
    sequences = build(graph, [1, 2], num_super=0)
    assert sequences.supers.shape == (2, 0)
    assert sequences.coarse_bits.shape == (2, 0, 0)
    assert sequences.coarse_scale.shape == (2, 0)
    assert sequences.coarse_index.shape == (2, 0)
    np.testing.assert_array_equal(sequences.nodes, build(graph, [1, 2]).nodes)


def test_padded_targets_and_no_targets() -> None:
    graph = random_graph("sparse")
    sequences = build(graph, [5, -1, 7])
    for name in ("nodes", "arms", "supers"):
        assert (getattr(sequences, name)[1] == -1).all()
    for name in ("node_bits", "node_scale", "coarse_bits", "coarse_scale", "coarse_index"):
        assert not getattr(sequences, name)[1].any()
    assert_equal(build(graph, [5, 7]), sequences, [0, 2])
    assert build(graph, []).nodes.shape == (0, 11)


def test_isolated_nodes_and_small_components_are_padded() -> None:
    adjacency = np.zeros((6, 6), dtype=np.bool_)
    for a, b in [(0, 1), (1, 2), (3, 4)]:
        adjacency[a, b] = adjacency[b, a] = True
    sequences = build(graph_of(adjacency, np.array([0, 0, 0, 1, 1, 2])), np.arange(6))
    # 16 x 14 tries miss one of at most two nodes with probability below (1 - 0.05)^224 < 2e-5; the seed is fixed.
    found = [sorted(row[row >= 0].tolist()) for row in sequences.nodes]
    assert found == [[0, 1, 2]] * 3 + [[3, 4]] * 2 + [[5]]
    assert unpack(sequences.node_bits[5]).sum() == 1
    assert sequences.node_scale[5, 0] == 1.0


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_sequences_depend_on_nothing_but_their_key(kind: str) -> None:
    graph = random_graph(kind)
    targets = np.concatenate([np.arange(graph.num_nodes), [3, -1, 3]])
    whole = build(graph, targets)
    for threads in (2, 3, 5):
        assert_equal(build(graph, targets, threads=threads), whole)
    order = np.random.default_rng(0).permutation(targets.size)
    assert_equal(build(graph, targets[order]), whole, order)
    assert_equal(build(graph, targets[13:20]), whole, slice(13, 20))
    assert_equal(build(graph, targets[[-1]]), whole, [3])
    # A shorter sequence is the beginning of a longer one.
    np.testing.assert_array_equal(build(graph, targets, num_sampled=5).nodes, whole.nodes[:, :5])


@pytest.mark.parametrize("change", [{"rng_seed": 2}, {"epoch": 3}, {"view": 1}, {"weights": np.array([0, 0, 0, 1.0])}])
def test_every_part_of_the_key_matters(change: dict[str, Any]) -> None:
    graph = random_graph("sparse")
    targets = np.arange(30)
    changed, plain = build(graph, targets, **change), build(graph, targets)
    different = (changed.nodes != plain.nodes).any(1)
    # Ten draws from some thirty nodes agree in order by chance with probability below 1e-9 for a linked target.
    assert different.mean() > 0.9


def test_swapped_parts_of_the_key_are_different_keys() -> None:
    graph = random_graph("sparse")
    targets = np.arange(30)
    one = build(graph, targets, rng_seed=1, epoch=2, view=3)
    other = build(graph, targets, rng_seed=3, epoch=1, view=2)
    assert (one.nodes != other.nodes).any(1).mean() > 0.9


def test_hubs_are_linked_like_any_node() -> None:
    rng = np.random.default_rng(2)
    # Three hubs with rows far beyond 8 N', two of them linked; 600 others.
    adjacency = np.zeros((603, 603), dtype=np.bool_)
    adjacency[:3, 3:] = rng.random((3, 600)) < 0.8
    adjacency[0, 1] = True
    adjacency[3:, 3:] = np.triu(rng.random((600, 600)) < 0.004, 1)
    adjacency |= adjacency.T
    graph = graph_of(adjacency, (np.arange(603) // 10).astype(np.int32))
    dense = dense_adjacency(graph) | np.eye(603, dtype=np.bool_)
    sequences = build(graph, np.arange(603), num_sampled=9, weights=np.array([0.5, 0.5, 0, 0]))
    together = 0
    for nodes, bits in zip(sequences.nodes, sequences.node_bits, strict=True):
        there = nodes >= 0
        expected = dense[np.ix_(nodes, nodes)] & there[:, None] & there[None, :]
        np.testing.assert_array_equal(unpack(bits), expected)
        together += int(np.isin([0, 1, 2], nodes).sum() >= 2)
    assert together > 100


def test_memory_mapped_arrays_give_the_same_sequences(tmp_path: Path) -> None:
    graph = random_graph("sparse")

    def mapped(name: str, array: NDArray[Any]) -> NDArray[Any]:
        np.save(tmp_path / f"{name}.npy", array)
        return np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    features = graph.features
    assert isinstance(features, SparseFeatures)
    names = ("indptr", "indices", "clusters", "coarse_indptr", "coarse_indices")
    on_disk = replace(
        graph,
        **{name: mapped(name, getattr(graph, name)) for name in names},
        features=replace(
            features, **{name: mapped(f"x_{name}", getattr(features, name)) for name in ("indptr", "indices", "data")}
        ),
        tables={name: mapped(f"table_{name}", table) for name, table in graph.tables.items()},
    )
    targets = np.arange(graph.num_nodes)
    assert_equal(build(on_disk, targets, threads=2), build(graph, targets))


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"num_sampled": 0}, 0),
        ({"num_super": -1}, 0),
        ({"num_sampled": 2**15}, 0),
        ({"weights": np.full(3, 0.3)}, 0),
        ({"weights": np.array([0.5, np.nan, 0, 0])}, 0),
        ({"weights": np.array([0.5, -0.5, 0.5, 0.5])}, 0),
        ({}, 40),
        ({}, -2),
    ],
)
def test_what_no_caller_may_ask_for_is_refused(changes: dict[str, Any], target: int) -> None:
    with pytest.raises(AssertionError):
        build(random_graph("none"), [target], **changes)


def test_wide_sequences_take_a_whole_graph() -> None:
    rng = np.random.default_rng(4)
    upper = np.triu(rng.random((300, 300)) < 0.1, 1)
    graph = graph_of(upper | upper.T, (np.arange(300) // 10).astype(np.int32))
    assert csr(upper)[1].size > 0
    sequences = build(graph, [0, 17], num_sampled=1024, num_super=64)
    dense = dense_adjacency(graph) | np.eye(300, dtype=np.bool_)
    for t in range(2):
        nodes = sequences.nodes[t]
        count = int((nodes >= 0).sum())
        # 17,000 tries of a smallest probability of about 1 / (30 * 45): fewer than one node in e^12 is missed.
        assert count == 300
        bits = unpack(sequences.node_bits[t])
        np.testing.assert_array_equal(bits[:300, :300], dense[np.ix_(nodes[:300], nodes[:300])])
        assert bits.sum() == bits[:300, :300].sum()
        assert sorted(set(sequences.supers[t].tolist()) - {-1}) == list(range(30))


@pytest.mark.parametrize(("kind", "num_sampled"), [("wide", 8), ("sparse", 8), ("wide", 1024)])
def test_targets_of_several_groups_are_drawn_as_each_alone(kind: str, num_sampled: int) -> None:
    graph = random_graph(kind)
    # Groups are of 128 targets, of 4 where sequences are long.
    targets = np.resize(np.arange(graph.num_nodes), 300 if num_sampled < 100 else 10)
    targets[[0, 3, -2]] = -1
    targets[127:129] = -1
    together = build(graph, targets, num_sampled=num_sampled)
    for place in [0, 1, 4, 5, len(targets) // 2, len(targets) - 1, *range(120, min(140, len(targets)))]:
        alone = build(graph, targets[place : place + 1], num_sampled=num_sampled)
        for name in ("nodes", "arms", "supers", "node_bits", "coarse_bits"):
            np.testing.assert_array_equal(getattr(together, name)[place], getattr(alone, name)[0])
