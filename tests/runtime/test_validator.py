"""The validating worker: every plan once, then the pick and the best ones in turn, and no plan in another's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import Recipe
from megagraph_cli.commands.workloads import graph_info, workload_of
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.runtime.job import ValidateJob
from megagraph_cli.runtime.setup import Worker
from megagraph_cli.runtime.validate import Validator
from tests.ranks import run_ranks
from tests.runtime.small import CPU, RECIPE, make_plan

pytestmark = pytest.mark.ranks

ROUNDS, BEST_AGAIN, STEPS = 2, 2, 4
SMALL, LARGE = 8, 36
"""Targets of a batch; the larger one is all training targets, so that both draw the same ones whenever they run."""


def _plans(graph: Any) -> list[Plan]:
    def plan(batch_size: int, **order: Any) -> Plan:
        sections = RECIPE | {"batch": RECIPE["batch"] | {"batch_size": batch_size}}
        recipe = Recipe.model_validate(sections | {"dataset": RECIPE["dataset"] | {"name": graph.name}})
        split = make_split(graph, recipe.dataset.split, recipe.dataset.split_seed)
        return make_plan(workload_of(recipe, graph, split), **order)

    return [
        plan(SMALL, dp=2),
        plan(LARGE, dp=2),
        plan(SMALL, dp=2),
        plan(SMALL, cp=2, context="allgather"),
        plan(SMALL, pp=2, layers=(1, 2), num_microbatches=2),
    ]


def _validate(rank: int, job: ValidateJob) -> None:
    Validator(Worker(rank, rank, 2, CPU, job.work_dir), job).run()


def test_the_best_are_measured_again_and_no_plan_counts_in_anothers_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    own = tmp_path / "own.npz"
    np.savez(own, edge_index=rng.integers(0, 60, (2, 200)), x=rng.random((60, 12)), y=np.arange(60) % 3)
    graph = load_graph(str(own), tmp_path, tmp_path / "cache")
    split = make_split(graph, RECIPE["dataset"]["split"], 42)
    paths = [tmp_path / f"plan-{number}.json" for number in range(5)]
    for path, plan in zip(paths, _plans(graph), strict=True):
        plan.save(path)
    job = ValidateJob(
        graph_path=graph.path,
        device="cpu",
        threads=1,
        launcher_pid=0,
        plans=paths,
        graph=graph_info(graph, split),
        steps=STEPS,
        rounds=ROUNDS,
        best_again=BEST_AGAIN,
        results=tmp_path / "results",
        work_dir=tmp_path / "work",
    )
    (tmp_path / "work").mkdir()
    run_ranks(2, _validate, job)
    lines = _lines(tmp_path / "results")
    once, again = lines[:5], lines[5:]
    assert [(line["round"], line["plan"]) for line in once] == [(0, number) for number in range(5)]
    best = sorted(range(1, 5), key=lambda number: once[number]["step_s"])[:BEST_AGAIN]
    assert [(line["round"], line["plan"]) for line in again] == [
        (number, plan) for number in range(1, ROUNDS + 1) for plan in (0, *best)
    ]
    assert min(line["step_s"] for line in lines) > 0
    peaks = [line["peak_bytes"] for line in once]
    assert peaks[1] > 1.5 * peaks[0]
    # The same plan, after a larger one. A thread of gloo's may let go of a message a moment later than last time.
    assert peaks[2] == pytest.approx(peaks[0], rel=0.02)
    for line in again:
        assert line["peak_bytes"] == pytest.approx(peaks[line["plan"]], rel=0.02)

    known = {0: 1.0, 3: 1e-9}
    goes_on = {"known": known, "left_out": [1], "results": tmp_path / "rest", "rounds": 1}
    run_ranks(2, _validate, ValidateJob.model_validate(job.model_dump(mode="json") | goes_on))
    lines = _lines(tmp_path / "rest")
    assert [(line["round"], line["plan"]) for line in lines[:2]] == [(0, 2), (0, 4)]
    best = min((2, 4), key=lambda number: next(line["step_s"] for line in lines if line["plan"] == number))
    assert [(line["round"], line["plan"]) for line in lines[2:]] == [(1, 0), (1, 3), (1, best)]


def _lines(results: Path) -> list[dict[str, Any]]:
    """What was measured; before each stands what begins, which tells the plan at fault should the worker end there."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert lines[0::2] == [{"plan": line["plan"], "round": line["round"]} for line in lines[1::2]]
    return lines[1::2]
