"""The share of feature entries that are not zero: that of what the store holds, counted when it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from raw_layouts import NUM_NODES, sample, write_own
from tiny import dense_features, random_graph

from megagraph_cli.graph import density, store
from megagraph_cli.graph.density import count_entries, feature_density
from megagraph_cli.graph.graph import DenseFeatures, SparseFeatures
from megagraph_cli.graph.prepare import load_graph, open_graph

TINY = 1e-9
"""Rounds to zero in float16 and not in float32."""


def features_of(kind: str) -> np.ndarray:
    """Mostly zeros (kept sparse) or half of them (kept dense), zeros with either sign, some tiny."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(NUM_NODES, 8)) * (rng.random((NUM_NODES, 8)) < (0.1 if kind == "sparse" else 0.5))
    x[0, :4] = [-0.0, TINY, 1.0, -1.0]
    return x


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_store_says_what_it_holds_and_an_older_one_is_counted(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = features_of(kind)
    path = write_own(tmp_path / "own.npz", replace(sample(), x=x.astype(np.float32)))
    graph = load_graph(str(path), tmp_path, tmp_path / "cache", feature_dtype=dtype)
    assert isinstance(graph.features, SparseFeatures if kind == "sparse" else DenseFeatures)
    expected = np.count_nonzero(x.astype(dtype)) / x.size
    assert graph.num_clusters  # whose rows are not counted
    with monkeypatch.context() as patched:
        patched.setattr(density, "count_entries", lambda _values: pytest.fail("all features were read"))
        assert feature_density(graph) == feature_density(open_graph(graph.path)) == expected
    _forget(graph.path)
    older = open_graph(graph.path)
    assert older.feature_entries is None
    assert feature_density(older) == expected
    assert (
        load_graph(str(path), tmp_path, tmp_path / "cache", feature_dtype=dtype).feature_entries is None
    )  # no rebuild


def _forget(folder: Path) -> None:
    """The store as it was before it kept the count."""
    meta = json.loads((folder / store.META).read_text())
    del meta["feature_entries"], meta["sha256"]
    meta["sha256"] = store._meta_hash(meta)
    (folder / store.META).write_text(json.dumps(meta))


@pytest.mark.parametrize("kind", ["none", "sparse", "dense"])
def test_graphs_of_no_store_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(kind)
    monkeypatch.setattr(density, "_BLOCK_ENTRIES", 30)
    x = dense_features(graph)
    assert feature_density(graph) == (np.count_nonzero(x) / x.size if x.size else 0.0)


@pytest.mark.parametrize("shape", [(0,), (7,), (5, 3), (4, 0), (0, 3)])
def test_blocks_add_up_to_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 2, shape).astype(np.float32)
    for block in (1, 4, 100):
        monkeypatch.setattr(density, "_BLOCK_ENTRIES", block)
        assert count_entries(values) == np.count_nonzero(values)
