"""A run's scores under a published split and the ROC curve's area, against pairs counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.artifacts.run import Run
from megagraph_cli.graph.graph import Graph, Masks
from megagraph_cli.runtime.evaluate import predict
from tests.runtime.small import BATCH, make_plan, make_trainer, small_graph, small_workload

SPLITS, CHOSEN = 4, 2


def graph_of_two_classes() -> Graph:
    """60 nodes, 24 of class 1, with four published splits of 24, 18 and 18 nodes."""
    graph = small_graph()
    generator = np.random.default_rng(7)
    labels = (generator.permutation(graph.num_nodes) < 24).astype(np.int64)
    parts = np.stack([generator.permutation(graph.num_nodes) for _ in range(SPLITS)])
    masks = Masks(parts < 24, (parts >= 24) & (parts < 42), parts >= 42)
    return replace(graph, labels=labels, num_classes=2, masks=masks)


def share_in_order(scores: np.ndarray, labels: np.ndarray) -> float:
    """Of all pairs of a positive and a negative, those whose positive scores higher; ties count half."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    gaps = positive[:, None] - negative[None, :]
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean())


@pytest.mark.usefixtures("alone")
def test_a_run_under_a_published_split_is_scored_by_its_own_targets(tmp_path: Path) -> None:
    graph = graph_of_two_classes()
    workload = small_workload(
        graph, dataset={"split": f"public:{CHOSEN}", "metric": "roc_auc"}, train={"epochs": 2}, batch={"eval_views": 2}
    )
    trainer = make_trainer(0, tmp_path, make_plan(workload), graph)
    trainer.run()
    run = Run.load(tmp_path / "run.json")
    assert [epoch.epoch for epoch in run.epochs] == [1, 2]
    assert trainer.state.step == 2 * 24 // BATCH
    # The weights are still those that the test was scored with: the best epoch's.
    assert graph.masks is not None
    scores = []
    for mask in (graph.masks.val, graph.masks.test):
        for chosen in range(SPLITS):
            targets = np.flatnonzero(mask[chosen])
            found = predict(trainer.parts, targets, BATCH)
            assert found is not None
            scores.append(share_in_order(found[:, 1].numpy(), graph.labels[targets]))
    # Another split, or the other part of this one, would have given another score.
    assert scores.count(scores[CHOSEN]) == scores.count(scores[SPLITS + CHOSEN]) == 1
    best = next(epoch for epoch in run.epochs if epoch.epoch == run.best_epoch)
    # Both are ratios of the same whole numbers; a sum of ranks rounds at the last digits.
    assert best.val_score == pytest.approx(scores[CHOSEN], abs=1e-12)
    assert run.test_score == pytest.approx(scores[SPLITS + CHOSEN], abs=1e-12)
