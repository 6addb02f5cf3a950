"""The contract of every dataset: its raw layout becomes the graph that lies in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_layouts import (
    NUM_CLASSES,
    NUM_NODES,
    WRITERS,
    reference,
    sample,
    write_ogb,
    write_ogb_binary,
    write_own,
)
from scipy import sparse

from megagraph_cli.commands.data import describe
from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph import datasets
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split

# NAME: nodes, edges, features, classes, isolated, self_loops, duplicates, one_way, unlabelled.
# From the README.md and SOURCE.txt of the data folder; one_way = 2 edges - distinct entries between two nodes.
PUBLISHED = {
    "citeseer": (3327, 4552, 3703, 6, 48, 124, 236, 0, 15),
    "cora": (2708, 5278, 1433, 7, 0, 0, 302, 0, 0),
    "computers": (13752, 245861, 767, 10, 281, 0, 0, 2 * 245861 - 287209, 0),
    "photo": (7650, 119081, 745, 8, 115, 1, 0, 2 * 119081 - 143662, 0),
    "own/coauthor_physics.npz": (34493, 247962, 8415, 5, 0, 0, 0, 0, 0),
    "own/dblp.npz": (17716, 52867, 1639, 4, 0, 0, 0, 0, 0),
    "own/flickr_attributed.npz": (7575, 239738, 12047, 9, 0, 0, 0, 0, 0),
    "own/tolokers.npz": (11758, 519000, 10, 2, 0, 0, 0, 519000, 0),
    "own/minesweeper.npz": (10000, 39402, 7, 2, 0, 0, 0, 39402, 0),
    "own/squirrel_filtered.npz": (2223, 46998, 2089, 5, 0, 0, 0, 46998, 0),
    "own/dd.npz": (334925, 843046, 0, 82, 0, 0, 0, 0, 0),
}
PUBLIC_SPLITS = {
    "citeseer": (120, 500, 1000),
    "cora": (140, 500, 1000),
    "own/tolokers.npz": (5879, 2939, 2940),
    "own/minesweeper.npz": (5000, 2500, 2500),
    "own/squirrel_filtered.npz": (1053, 718, 452),
}


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    tails = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return {(int(u), int(v)) for u, v in zip(tails, graph.indices, strict=True) if u < v}


def features_of(graph: Graph) -> np.ndarray:
    features = graph.features
    if isinstance(features, DenseFeatures):
        return np.asarray(features.x)
    assert isinstance(features, SparseFeatures)
    shape = (features.indptr.size - 1, features.num_columns)
    return sparse.csr_matrix((features.data, features.indices, features.indptr), shape=shape).toarray()


def test_every_dataset_with_raw_files_has_a_layout_here() -> None:
    assert {name for name, dataset in datasets.REGISTRY.items() if dataset.files} == set(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("density", [0.15, 0.6])
def test_raw_layout_becomes_its_graph(name: str, density: float, tmp_path: Path) -> None:
    data = sample(density=density)
    WRITERS[name](tmp_path / "root" / name, name, data)
    before = sorted((tmp_path / "root").rglob("*"))

    graph = load_graph(name, tmp_path / "root", tmp_path / "cache")

    assert sorted((tmp_path / "root").rglob("*")) == before  # nothing is written beside raw files
    expected = reference(data.tails, data.heads, NUM_NODES)
    assert edges_of(graph) == expected.edges
    assert graph.counts == {
        "isolated": expected.isolated,
        "self_loops": expected.self_loops,
        "duplicates": expected.duplicates,
        "one_way": expected.one_way,
        "unlabelled": 0,
    }
    np.testing.assert_array_equal(graph.labels, data.y)
    assert graph.num_classes == NUM_CLASSES
    assert isinstance(graph.features, SparseFeatures if density < 0.25 else DenseFeatures)
    x = features_of(graph)
    np.testing.assert_array_equal(x[:NUM_NODES], data.x)  # small whole numbers: exact in float32
    mean = np.stack([data.x[graph.clusters == cluster].mean(axis=0) for cluster in range(graph.num_clusters)])
    np.testing.assert_allclose(x[NUM_NODES:], mean, rtol=1e-6)  # a few roundings of float32 (6e-8)
    if name in ("computers", "photo"):
        assert graph.masks is None
        return
    split = make_split(graph, "auto", 0)
    for part in ("train", "test"):
        np.testing.assert_array_equal(getattr(split, part), getattr(data, part))
    np.testing.assert_array_equal(split.val, data.val)


def test_same_content_in_other_layouts_is_the_same_digest(tmp_path: Path) -> None:
    data = sample()
    digests = set()
    for name in ("arxiv", "products", "reddit", "reddit2", "pubmed"):
        WRITERS[name](tmp_path / name / name, name, data)
        digests.add(load_graph(name, tmp_path / name, tmp_path / "cache").digest)
    assert len(digests) == 1


def test_store_rows_are_sorted_and_symmetric(tmp_path: Path) -> None:
    graph = load_graph("demo", tmp_path, tmp_path / "cache")
    for node in range(graph.num_nodes):
        row = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        assert (np.diff(row) > 0).all()
    adjacency = sparse.csr_matrix((np.ones(graph.indices.size), graph.indices, graph.indptr))
    assert (adjacency != adjacency.T).nnz == 0
    assert not graph.indices.flags.writeable


@pytest.mark.parametrize("name", ["own.graph", "citesear", "OGBN", "", "folder/unknown"])
def test_unknown_dataset_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(MgraphError, match="demo, citeseer, cora, pubmed") as caught:
        load_graph(name, tmp_path, tmp_path / "cache")
    assert caught.value.exit_code == EXIT_USAGE
    assert ("did you mean citeseer?" in caught.value.message) == (name == "citesear")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str, data_root: Path, tmp_path: Path) -> None:
    if not (data_root / name).exists():
        pytest.skip(f"the folder of raw data has no {name}")
    graph = load_graph(str(data_root / name) if name.startswith("own/") else name, data_root, tmp_path)
    report = describe(graph, make_split(graph, "auto", 0))
    keys = ("nodes", "edges", "features", "classes", "isolated", "self_loops", "duplicates", "one_way", "unlabelled")
    assert tuple(report[key] for key in keys) == PUBLISHED[name]
    labelled = graph.num_nodes - graph.counts["unlabelled"]
    random_cut = (labelled * 3 // 5, labelled * 4 // 5 - labelled * 3 // 5, labelled - labelled * 4 // 5)
    assert tuple(report[key] for key in ("train", "val", "test")) == PUBLIC_SPLITS.get(name, random_cut)
    assert graph.cluster_sizes.sum() == graph.num_nodes
    assert graph.cluster_sizes.max() <= 20
    assert graph.num_clusters == -(-graph.num_nodes // 10)


def test_citeseers_nodes_without_features_keep_their_neighbours(data_root: Path, tmp_path: Path) -> None:
    graph = load_graph("citeseer", data_root, tmp_path)
    left_out = [2407, 2489, 2553, 2682, 2781, 2953, 3042, 3063, 3212, 3214, 3250, 3292, 3305, 3306, 3309]
    np.testing.assert_array_equal(np.flatnonzero(graph.labels < 0), left_out)
    assert (np.diff(graph.indptr)[left_out] > 0).all()
    assert isinstance(graph.features, SparseFeatures)
    assert (np.diff(graph.features.indptr)[left_out] == 0).all()
    for split in ("public:0", "random:0.6,0.2,0.2"):
        parts = make_split(graph, split, 1)
        assert not np.isin(left_out, np.concatenate([parts.train, parts.val, parts.test])).any()


def test_demo_rewards_attending_to_neighbours(tmp_path: Path) -> None:
    """Nearest class mean on the words alone against words summed over the neighbourhood; chance is 0.2."""
    graph = load_graph("demo", tmp_path, tmp_path / "cache")
    x = features_of(graph)[: graph.num_nodes]
    adjacency = sparse.csr_matrix((np.ones(graph.indices.size), graph.indices, graph.indptr))
    split = make_split(graph, "auto", 42)

    def accuracy(rows: np.ndarray) -> float:
        rows = (rows - rows[split.train].mean(0)) / rows[split.train].std(0)
        means = np.stack([rows[split.train][graph.labels[split.train] == label].mean(0) for label in range(5)])
        return float(((rows[split.test] @ means.T).argmax(1) == graph.labels[split.test]).mean())

    alone, together = accuracy(x), accuracy(x + adjacency @ x)
    assert 0.3 < alone < 0.6
    # Standard error of a difference on 800 targets is at most 0.025: six of them.
    assert together > alone + 0.15


def test_products_is_one_store_whatever_its_layout(tmp_path: Path) -> None:
    data = sample(density=0.6)
    write_ogb(tmp_path / "csv" / "products", "products", data)
    write_ogb_binary(tmp_path / "binary" / "products", "products", data)
    masks = {}
    for part, ids in (("train", data.train), ("val", data.val), ("test", data.test)):
        masks[f"{part}_mask"] = np.isin(np.arange(NUM_NODES), ids)
    own = write_own(tmp_path / "own.npz", data, **masks)
    graphs = [
        load_graph("products", tmp_path / "csv", tmp_path / "cache-csv"),
        load_graph("products", tmp_path / "binary", tmp_path / "cache-binary"),
        load_graph(str(own), tmp_path, tmp_path / "cache-own"),
    ]
    assert len({graph.digest for graph in graphs}) == 1
    assert {graph.source for graph in graphs[:2]} == {datasets.REGISTRY["products"].source}
    # Both layouts at once: the tables that OGB publishes are taken.
    write_ogb(tmp_path / "binary" / "products", "products", sample(seed=1))
    assert load_graph("products", tmp_path / "binary", tmp_path / "cache-binary").digest != graphs[0].digest


def test_a_generated_graph_as_products_tables_is_the_same_graph_without_prompt_network_or_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = load_graph("synthetic:nodes=60,edges=400,features=12,classes=3", tmp_path, tmp_path / "cache")
    tails = np.repeat(np.arange(NUM_NODES), np.diff(graph.indptr))
    once = tails < graph.indices
    data = replace(
        sample(), tails=tails[once], heads=graph.indices[once], x=features_of(graph)[:NUM_NODES], y=graph.labels
    )
    write_ogb(tmp_path / "products", "products", data)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked, called the network, or unpickled")

    monkeypatch.setattr("builtins.input", never)
    monkeypatch.setattr("socket.socket.connect", never)
    monkeypatch.setattr("pickle.load", never)
    monkeypatch.setattr("pickle.loads", never)
    monkeypatch.setattr("pickle.Unpickler", never)
    again = load_graph("products", tmp_path, tmp_path / "again")
    arrays = ("indptr", "indices", "labels", "clusters", "cluster_sizes", "coarse_indptr", "coarse_indices")
    for name in arrays:
        np.testing.assert_array_equal(getattr(again, name), getattr(graph, name), err_msg=name)
    np.testing.assert_array_equal(features_of(again), features_of(graph))
    assert again.tables.keys() == graph.tables.keys()
    for name, table in graph.tables.items():
        np.testing.assert_array_equal(again.tables[name], table, err_msg=name)


@pytest.mark.parametrize("keep", [0.0, 0.6, 0.97])
def test_each_truncated_binary_file_is_named(keep: float, tmp_path: Path) -> None:
    folder = tmp_path / "products"
    write_ogb_binary(folder, "products", sample())
    for path in sorted((folder / "raw").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(MgraphError, match=path.name) as caught:
            load_graph("products", tmp_path, tmp_path / "cache")
        assert caught.value.exit_code == EXIT_USAGE
        path.write_bytes(whole)
    assert load_graph("products", tmp_path, tmp_path / "cache").num_nodes == NUM_NODES
