"""Predictions under any cut of the targets, views averaged, and the scores against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.runtime.build import StageParts
from megagraph_cli.runtime.evaluate import predict, roc_auc, score
from megagraph_cli.runtime.tensors import to_device
from tests.runtime.small import CPU, make_parts, make_plan, small_graph, small_workload

# float64: a matrix product over other batch sizes may add in another order.
TOLERANCE = 1e-12
TARGETS = np.random.default_rng(0).permutation(60)[:11]


def make(batch_size: int, num_microbatches: int, views: int = 2) -> StageParts:
    graph = small_graph()
    workload = small_workload(graph, batch={"batch_size": batch_size, "num_sampled": 5, "eval_views": views})
    return make_parts(make_plan(workload, num_microbatches=num_microbatches), graph)


@pytest.mark.usefixtures("alone")
def test_predictions_do_not_depend_on_how_the_targets_are_cut() -> None:
    expected = predict(make(11, 1), TARGETS, 11)
    assert expected is not None
    assert expected.shape == (11, 2)
    assert len(set(expected[:, 1].tolist())) > 5  # the targets differ, so a mix-up would show
    for batch_size, num_microbatches in ((11, 3), (4, 1), (4, 3), (1, 1), (64, 5)):
        got = predict(make(batch_size, num_microbatches), TARGETS, batch_size)
        assert got is not None
        assert torch.equal(got[:, 0], expected[:, 0])
        assert float((got - expected).abs().max()) <= TOLERANCE


@pytest.mark.usefixtures("alone")
def test_the_probabilities_of_the_views_are_averaged_and_then_compared() -> None:
    parts = make(11, 1, views=3)
    found = predict(parts, TARGETS, 11)
    runner = parts.runner.eval()
    total = torch.zeros(11, 3, dtype=torch.float64)
    for view in range(3):
        (batch,) = parts.builder.build(TARGETS, epoch=0, view=view)
        runner.inbox = [to_device(batch, CPU)]
        with torch.no_grad():
            total += torch.softmax(runner(torch.zeros(1), torch.zeros(1, dtype=torch.int64)), -1) / 3
    assert found is not None
    assert torch.equal(found[:, 0], total.argmax(-1).double())
    assert float((found[:, 1] - total[:, 1]).abs().max()) <= TOLERANCE


@pytest.mark.usefixtures("alone")
def test_no_target_gives_no_prediction_and_a_vote_to_stop_ends_it() -> None:
    parts = make(4, 1)
    none = predict(parts, TARGETS[:0], 4)
    assert none is not None
    assert none.shape == (0, 2)
    votes = iter([False, True])
    assert predict(parts, TARGETS, 4, stopped=lambda: next(votes)) is None
    assert next(votes, "all cast") == "all cast"


@pytest.mark.usefixtures("alone")
def test_evaluation_drops_nothing() -> None:
    graph = small_graph()
    found = []
    for rate in (0.0, 0.5):
        rates = dict.fromkeys(("dropout", "attention_dropout", "input_dropout"), rate)
        parts = make_parts(make_plan(small_workload(graph, model=rates)), graph)
        parts.runner.train()
        found.append(predict(parts, TARGETS, 8))
    assert found[0] is not None
    assert torch.equal(found[0], found[1])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=30))
def test_roc_auc_is_the_share_of_pairs_in_order_ties_counting_half(pairs: list[tuple[int, int]]) -> None:
    scores = np.array([score / 5 for score, _ in pairs], dtype=np.float64)
    labels = np.array([label for _, label in pairs], dtype=np.int64)
    positive, negative = scores[labels == 1], scores[labels == 0]
    if not positive.size or not negative.size:
        assert roc_auc(scores, labels) is None
        return
    wins = sum(float(p > n) + 0.5 * float(p == n) for p in positive for n in negative)
    got = roc_auc(scores, labels)
    assert got is not None
    assert abs(got - wins / (positive.size * negative.size)) <= 1e-12


def test_accuracy_is_the_share_of_right_classes() -> None:
    found = torch.tensor([[0, 0.1], [1, 0.9], [2, 0.3], [1, 0.5]], dtype=torch.float64)
    assert score(found, np.array([0, 1, 1, 1]), "accuracy") == 0.75


def test_a_score_that_is_not_defined_is_none() -> None:
    found = torch.zeros((2, 2), dtype=torch.float64)
    assert score(found[:0], np.array([], dtype=np.int64), "accuracy") is None
    assert score(found[:0], np.array([], dtype=np.int64), "roc_auc") is None
    assert score(found, np.array([1, 1]), "roc_auc") is None
    assert score(found, np.array([0, 0]), "roc_auc") is None
    assert score(found, np.array([0, 1]), "roc_auc") == 0.5


def test_roc_auc_of_three_classes_is_refused() -> None:
    with pytest.raises(MgraphError, match="two classes") as caught:
        score(torch.zeros((3, 2), dtype=torch.float64), np.array([0, 1, 2]), "roc_auc")
    assert caught.value.exit_code == EXIT_USAGE
