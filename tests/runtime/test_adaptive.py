"""Sampling weights that follow the rewards: the same under every plan, kept in checkpoints, told in run.json."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import Run
from megagraph_cli.graph.batch import replica_targets
from megagraph_cli.model.target_scores import node_scores
from megagraph_cli.runtime.checkpoint import whole_checkpoints
from megagraph_cli.runtime.evaluate import predict
from megagraph_cli.runtime.rewards import ArmRewards
from tests.ranks import run_ranks
from tests.runtime.small import BATCH, make_parts, make_plan, make_trainer, one_rank, small_graph, small_workload

EVERY, EPOCHS, STEPS_PER_EPOCH = 2, 4, 5
STOP = 2 * STEPS_PER_EPOCH + 1
"""One step after the first update."""
# float64 rounding of 1e-16 grows over 20 steps of lr 0.01; the parity suite allows plans the same.
TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-4

pytestmark = pytest.mark.ranks


def plans(dtype: str = "float64") -> dict[str, Plan]:
    workload = small_workload(small_graph(), train={"sampling_update_epochs": EVERY, "dtype": dtype})
    return {
        "one": make_plan(workload),
        "pp": make_plan(workload, pp=2, layers=(1, 2), num_microbatches=3, schedule="1f1b"),
        "dp": make_plan(workload, dp=2, num_microbatches=3),
        "cp": make_plan(workload, cp=2),
    }


def train(rank: int, tasks: list[tuple[Path, str, int | None]], dtype: str = "float64") -> None:
    """(run directory, plan, steps in all) one after another; a directory with a checkpoint is resumed."""
    graph = small_graph()
    for run_dir, plan, max_steps in tasks:
        trainer = make_trainer(rank, run_dir, plans(dtype)[plan], graph, max_steps=max_steps)
        dist.barrier()
        trainer.resume()
        trainer.run()


def weights_of(run_dir: Path) -> list[list[float]]:
    return [epoch.sampling_weights for epoch in Run.load(run_dir / "run.json").epochs]


def losses_of(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_plan_and_a_resumed_run_come_to_the_same_weights(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with one_rank():
        train(0, [(whole, "one", None), (stopped, "one", STOP)])
    expected = weights_of(whole)
    assert len(expected) == EPOCHS
    assert expected[:EVERY] == [[0.25] * 4] * EVERY
    assert expected[EVERY] == expected[EVERY + 1] != expected[0]
    (*_, last) = whole_checkpoints(stopped)
    kept = json.loads((last / "state.json").read_text(encoding="utf-8"))
    assert kept["sampling_weights"] == expected[EVERY]
    shutil.copytree(stopped, tmp_path / "resumed")
    tasks = [(tmp_path / plan, plan, None) for plan in ("pp", "dp", "cp")]
    run_ranks(2, train, [*tasks, (tmp_path / "resumed", "pp", None)])
    for name in ("pp", "dp", "cp", "resumed"):
        assert weights_of(tmp_path / name) == expected, name
        got, reference = losses_of(tmp_path / name), losses_of(whole)
        assert len(got) == EPOCHS * STEPS_PER_EPOCH
        assert all(abs(mine / its - 1) <= TOLERANCE for mine, its in zip(got, reference, strict=True)), name
        assert Run.load(tmp_path / name / "run.json").test_score == Run.load(whole / "run.json").test_score


def test_in_float32_every_plan_comes_to_the_same_weights_too(tmp_path: Path) -> None:
    with one_rank():
        train(0, [(tmp_path / "one", "one", None)], "float32")
    run_ranks(2, train, [(tmp_path / plan, plan, None) for plan in ("pp", "dp", "cp")], "float32")
    expected, reference = weights_of(tmp_path / "one"), losses_of(tmp_path / "one")
    assert expected[EVERY] != expected[0]
    for name in ("pp", "dp", "cp"):
        assert weights_of(tmp_path / name) == expected, name
        np.testing.assert_allclose(losses_of(tmp_path / name), reference, rtol=FLOAT32_TOLERANCE, err_msg=name)


def test_rewards_are_the_scores_over_the_weight_of_the_arm_that_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a loop over targets and nodes: score_j / p_k where arm k drew j, p over the arms that a target has."""
    graph, p = small_graph(), (0.1, 0.2, 0.3, 0.4)
    targets = np.array([0, 3, 7, 11, 19, 20, 33, 41, 42, 59])
    scores: list[Tensor] = []

    def kept(*inputs: Any) -> Tensor:
        scores.append(node_scores(*inputs))
        return scores[-1]

    monkeypatch.setattr("megagraph_cli.runtime.rewards.node_scores", kept)
    with one_rank():
        parts = make_parts(make_plan(small_workload(graph), num_microbatches=2), graph)
        parts = replace(parts, builder=parts.builder.with_weights(p))
        rewards = ArmRewards(parts)
        predict(parts, targets, BATCH, rewards=rewards)
        views = parts.workload.batch.eval_views
        means = rewards.means(targets.size * views)
    expected = [0.0] * 4
    found = iter(scores)
    for start in range(0, targets.size, BATCH):
        for view in range(views):
            batch = replica_targets(targets[start : start + BATCH], BATCH, 1, 0, 2)
            for part in parts.builder.build(batch, epoch=0, view=view):
                rows = next(found)
                for target, arms, values in zip(part.targets.tolist(), part.sequences.arms, rows, strict=True):
                    linked = graph.indptr[target + 1] > graph.indptr[target]
                    has = [linked, linked, linked, graph.tables["feature_norm"][target] > 0]
                    whole = sum(share for share, there in zip(p, has, strict=True) if there)
                    for place, arm in enumerate(arms.tolist()):
                        if arm >= 0:
                            expected[arm] += float(values[place]) * whole / p[arm]
    assert next(found, None) is None
    assert min(expected) > 0
    assert means == pytest.approx([total / (targets.size * views) for total in expected], rel=1e-12)


def test_fixed_weights_stay(tmp_path: Path) -> None:
    graph = small_graph()
    with one_rank():
        make_trainer(0, tmp_path, make_plan(small_workload(graph)), graph).run()
    assert weights_of(tmp_path) == [[0.25] * 4] * EPOCHS
