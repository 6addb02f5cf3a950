"""Features of 16 bits: every number exactly, the sequences and inputs of the rounded rows, a store half the size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept import kept
from numpy.typing import NDArray
from scipy import sparse
from tiny import random_graph

from megagraph_cli.artifacts.plan import Dims, Plan
from megagraph_cli.artifacts.workload import BatchSection, DatasetSection, ModelSection, Workload
from megagraph_cli.commands import train
from megagraph_cli.commands.train import TrainRequest
from megagraph_cli.commands.workloads import Folders, prepare
from megagraph_cli.console import Screen
from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.batch import InputRows, read_features
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.half import half_value
from megagraph_cli.graph.sequences import Sequences, build_sequences
from megagraph_cli.graph.tables import build_tables

KINDS = ("sparse", "signed", "dense", "wide", "bags")


def test_every_finite_number_is_exact() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns.view(np.float16)
    finite = np.isfinite(values)
    found = np.array([half_value(pattern) for pattern in patterns[finite]])
    np.testing.assert_array_equal(found, values[finite].astype(np.float64))


def with_features(graph: Graph, dtype: str) -> Graph:
    """The graph with its features rounded to float16 and kept as ``dtype``, and its tables built from these."""
    features = graph.features
    if isinstance(features, DenseFeatures):
        changed = replace(graph, features=DenseFeatures(features.x.astype(np.float16).astype(dtype)))
    else:
        assert isinstance(features, SparseFeatures)
        changed = replace(graph, features=replace(features, data=features.data.astype(np.float16).astype(dtype)))
    return replace(changed, tables=build_tables(changed))


def sequences(graph: Graph) -> Sequences:
    return build_sequences(
        graph,
        np.arange(graph.num_nodes, dtype=np.int64),
        num_sampled=9,
        num_super=2,
        weights=np.array([0.1, 0.1, 0.1, 0.7]),
        rng_seed=3,
        epoch=0,
        view=0,
        threads=1,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_inputs_are_those_of_the_rounded_rows(kind: str) -> None:
    graph = random_graph(kind, num_nodes=60)
    half, full = with_features(graph, "float16"), with_features(graph, "float32")
    ours, theirs = sequences(half), sequences(full)
    np.testing.assert_array_equal(ours.nodes, theirs.nodes)
    np.testing.assert_array_equal(ours.arms, theirs.arms)
    assert (ours.arms == 3).any()
    rows = np.array([0, 3, 4, 65])
    own, other = (read_features(one.features, place(rows)) for one in (half, full))
    for name in ("dense", "values"):
        mine, its = getattr(own, name), getattr(other, name)
        assert (mine is None) == (its is None)
        if mine is not None:
            assert mine.dtype == np.float32
            np.testing.assert_array_equal(mine, its)


def place(rows: NDArray[np.int64]) -> InputRows:
    return InputRows(rows, np.arange(rows.size)[None])


def test_rounding_is_checked_and_decides_what_is_zero() -> None:
    x = np.array([[1.0, 1e-9], [65504.0, -0.1]])
    dense = kept(x, 2, "float16")
    assert isinstance(dense, np.ndarray)
    assert dense.dtype == np.float16
    np.testing.assert_array_equal(dense[:2], x.astype(np.float16))
    thin = np.zeros((3, 8))
    thin[1, 2], thin[2, 5], thin[0, 0] = 0.1, 1e-9, 2.0  # 1e-9 becomes 0 and is no entry any more
    for given in (thin, sparse.csr_matrix(thin)):
        found = kept(given, 3, "float16")
        assert sparse.issparse(found)
        assert found[:3].nnz == 2
        np.testing.assert_array_equal(found[:3].toarray(), thin.astype(np.float16).astype(np.float32))
    with pytest.raises(MgraphError, match=r"beyond float16 at node 1; replace it with a finite number$"):
        kept(np.array([[0.0], [np.nan]]), 2, "float16")
    for given in (x * 2, sparse.csr_matrix(np.pad(x * 2, ((0, 0), (0, 9))))):
        with pytest.raises(MgraphError, match=r"beyond float16.*set dataset\.feature_dtype=float32"):
            kept(given, 2, "float16")
        assert kept(given, 2) is not None


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_recipe_says_what_features_are_kept_as(density: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.where(rng.random((60, 12)) < density, rng.normal(size=(60, 12)), 0.0)
    np.savez(tmp_path / "own.npz", edge_index=rng.integers(0, 60, (2, 200)), x=x, y=np.arange(60) % 3)
    folders = Folders(tmp_path, tmp_path / "cache")
    graphs = {
        dtype: prepare(
            DatasetSection(name=str(tmp_path / "own.npz"), feature_dtype=dtype, split="random:0.6,0.2,0.2"),
            folders,
            Screen.stderr(),
        )[0]
        for dtype in ("float32", "float16")
    }
    half, full = (values_of(graphs[dtype]) for dtype in ("float16", "float32"))
    assert half.dtype == np.float16
    assert full.dtype == np.float32
    of_nodes = 60 if density == 1.0 else np.count_nonzero(x)  # super nodes' rows are means of rounded rows
    assert len(half) > of_nodes
    np.testing.assert_array_equal(half[:of_nodes], full[:of_nodes].astype(np.float16))
    assert graphs["float16"].digest != graphs["float32"].digest
    assert graphs["float16"].path != graphs["float32"].path


def values_of(graph: Graph) -> NDArray[np.float32] | NDArray[np.float16]:
    features = graph.features
    if isinstance(features, DenseFeatures):
        return features.x
    assert isinstance(features, SparseFeatures)
    return features.data


@pytest.mark.ranks
def test_training_is_that_on_the_rounded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without super nodes, whose rows are rounded means."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    edges, labels, x = rng.integers(0, 60, (2, 300)), np.arange(60) % 3, rng.normal(size=(60, 12))
    losses = []
    for name, values, dtype in (("half", x, "float16"), ("full", x.astype(np.float16), "float32")):
        np.savez(f"{name}.npz", edge_index=edges, x=values, y=labels)
        workload = Workload(
            dataset=DatasetSection(name=str(tmp_path / f"{name}.npz"), feature_dtype=dtype, split="random:0.6,0.2,0.2"),
            model=ModelSection(num_layers=2, num_heads=2, hidden_dim=8, ffn_dim=8),
            batch=BatchSection(batch_size=12, num_sampled=6, num_super=0),
        )
        plan = Plan(
            gpus=2,
            device="cpu",
            workload=workload,
            dims=Dims(pp=2, dp=1, cp=1),
            layers_per_stage=[1, 1],
            num_microbatches=2,
        )
        plan.save(Path(f"{name}.json"))
        request = TrainRequest(Folders(tmp_path, tmp_path / "cache"), plan_path=Path(f"{name}.json"), max_steps=4)
        _, where = train.run(request, Screen.stderr())
        lines = (where / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
