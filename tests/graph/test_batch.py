"""From targets to micro-batches: labels, input rows row by row, and one global batch however it is cut."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import random_graph

from megagraph_cli.graph.batch import (
    IGNORED_LABEL,
    BatchBuilder,
    InputRows,
    MicroBatch,
    SequenceSpec,
    epoch_order,
    gather_inputs,
    replica_targets,
)
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.layout.rows import RowLayout

SPEC = SequenceSpec(num_sampled=6, num_super=2, num_global=1, rng_seed=4)
TARGETS = np.array([3, 39, 0, 7, -1, 12, 0, -1])  # 39 has no neighbour, 0 comes twice


def labelled(kind: str = "sparse") -> Graph:
    graph = random_graph(kind)
    return replace(graph, labels=np.arange(graph.num_nodes) % 3, num_classes=3)


def builder(
    graph: Graph, num_microbatches: int = 1, *, num_global: int = 2, cp: int = 1, cp_rank: int = 0
) -> BatchBuilder:
    return BatchBuilder(
        graph=graph,
        spec=SPEC,
        num_microbatches=num_microbatches,
        microbatch_size=TARGETS.size // num_microbatches,
        threads=1,
        input_layout=RowLayout(SPEC.num_sampled, SPEC.num_super, num_global, cp),
        cp_rank=cp_rank,
    )


def build(graph: Graph, num_microbatches: int = 1) -> list[MicroBatch]:
    return builder(graph, num_microbatches).build(TARGETS, epoch=1, view=0)


def feature_rows(graph: Graph) -> NDArray[np.float32]:
    """All feature rows [U, F], nodes first, dense."""
    features = graph.features
    if isinstance(features, DenseFeatures):
        return features.x
    assert isinstance(features, SparseFeatures)
    x = np.zeros((features.indptr.size - 1, features.num_columns), dtype=np.float32)
    x[np.repeat(np.arange(len(x)), np.diff(features.indptr)), features.indices] = features.data
    return x


def values_of(inputs: InputRows, num_columns: int) -> NDArray[np.float32]:
    """The gathered rows [n, F], dense."""
    if inputs.dense is not None:
        return inputs.dense
    assert inputs.columns is not None
    assert inputs.offsets is not None
    assert inputs.values is not None
    x = np.zeros((inputs.rows.size, num_columns), dtype=np.float32)
    x[np.repeat(np.arange(inputs.rows.size), np.diff(inputs.offsets)), inputs.columns] = inputs.values
    return x


@pytest.mark.parametrize("num_global", [0, 2])
@pytest.mark.parametrize("cp", [1, 2, 3, 12])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_every_row_of_a_rank_finds_its_features_its_token_or_zero(kind: str, cp: int, num_global: int) -> None:
    graph = labelled(kind)
    layout = RowLayout(SPEC.num_sampled, SPEC.num_super, num_global, cp)
    expected_x = feature_rows(graph)
    for rank in range(cp):
        (batch,) = builder(graph, num_global=num_global, cp=cp, cp_rank=rank).build(TARGETS, epoch=1, view=0)
        inputs, sequences = batch.inputs, batch.sequences
        assert inputs is not None
        assert inputs.place.shape == (TARGETS.size, layout.rows_per_rank)
        found = set()
        for t in range(TARGETS.size):
            for local, row in enumerate(layout.rows_of(rank)):
                place = int(inputs.place[t, local])
                is_super = SPEC.num_sampled <= row < SPEC.num_sampled + SPEC.num_super
                if SPEC.num_sampled + SPEC.num_super <= row < layout.sequence_rows:
                    assert place == inputs.rows.size + row - SPEC.num_sampled - SPEC.num_super
                    continue
                known = -1
                if row < SPEC.num_sampled:
                    known = int(sequences.nodes[t, row])
                elif is_super and sequences.supers[t, row - SPEC.num_sampled] >= 0:
                    known = graph.num_nodes + int(sequences.supers[t, row - SPEC.num_sampled])
                if known < 0:
                    assert place == inputs.rows.size + num_global
                    continue
                assert inputs.rows[place] == known
                found.add(known)
        assert inputs.rows.tolist() == sorted(found)
        assert np.array_equal(values_of(inputs, graph.num_features), expected_x[inputs.rows])


def test_a_table_needs_ids_but_no_features() -> None:
    (batch,) = replace(builder(labelled()), use_features=False).build(TARGETS, epoch=1, view=0)
    (graphs_own,) = build(random_graph("none"))
    for inputs in (batch.inputs, graphs_own.inputs):
        assert inputs is not None
        assert inputs.rows.size > 0
        assert inputs.dense is inputs.columns is inputs.offsets is inputs.values is None


def test_a_batch_of_padding_alone_reads_no_feature() -> None:
    graph = labelled()
    (batch,) = builder(graph).build(np.full(8, -1), epoch=1, view=0)
    assert batch.inputs is not None
    assert batch.inputs.rows.size == 0
    assert not batch.real.any()
    assert (batch.labels == IGNORED_LABEL).all()
    assert set(batch.inputs.place[:, :8].flatten()) == {2}


def test_later_stages_read_no_features() -> None:
    (batch,) = replace(builder(labelled()), input_layout=None).build(TARGETS, epoch=1, view=0)
    assert batch.inputs is None


def test_labels_are_the_targets_and_padded_targets_are_ignored() -> None:
    graph = labelled()
    (batch,) = build(graph)
    assert batch.labels.dtype == np.int64
    assert batch.labels.tolist() == [0, 0, 0, 1, IGNORED_LABEL, 0, 0, IGNORED_LABEL]
    assert (batch.sequences.nodes[:, 0] == TARGETS).all()
    assert np.array_equal(batch.real, np.concatenate((batch.sequences.nodes >= 0, batch.sequences.supers >= 0), 1))
    assert not batch.real[TARGETS < 0].any()


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_cutting_into_micro_batches_changes_no_sequence(num_microbatches: int) -> None:
    graph = labelled()
    (whole,) = build(graph)
    parts = build(graph, num_microbatches)
    assert len(parts) == num_microbatches
    for field in fields(whole.sequences):
        joined = np.concatenate([getattr(part.sequences, field.name) for part in parts])
        assert np.array_equal(joined, getattr(whole.sequences, field.name)), field.name
    assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_gathering_alone_equals_what_a_batch_holds() -> None:
    graph = labelled()
    (batch,) = build(graph)
    layout = RowLayout(SPEC.num_sampled, SPEC.num_super, 2)
    again = gather_inputs(graph, batch.sequences, layout, 0, True)
    assert batch.inputs is not None
    assert np.array_equal(again.rows, batch.inputs.rows)
    assert np.array_equal(again.place, batch.inputs.place)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_an_epoch_visits_every_target_once_in_one_order_under_every_cut(
    num_train: int, batch_size: int, dp: int, num_microbatches: int, epoch: int
) -> None:
    train = np.arange(num_train) * 3 + 1
    order = epoch_order(train, 7, epoch)
    visited: list[int] = []
    for start in range(0, num_train, batch_size):
        targets = order[start : start + batch_size]
        shares = [replica_targets(targets, batch_size, dp, rank, num_microbatches) for rank in range(dp)]
        size = -(-batch_size // (dp * num_microbatches))
        assert {share.shape for share in shares} == {(size * num_microbatches,)}
        joined = np.concatenate(shares)
        assert (joined[: targets.size] == targets).all()
        assert (joined[targets.size :] == -1).all()
        visited += joined[joined >= 0].tolist()
    assert visited == order.tolist()
    assert sorted(visited) == train.tolist()


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    train = np.arange(100)
    orders = [epoch_order(train, seed, epoch).tolist() for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
