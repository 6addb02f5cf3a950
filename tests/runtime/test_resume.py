"""A run stopped in mid-epoch goes on under any plan as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import Run
from megagraph_cli.errors import EXIT_STALE, MgraphError
from tests.ranks import run_ranks
from tests.runtime.small import RECIPE, make_plan, make_trainer, one_rank, small_graph, small_workload

STOP, END = 7, 20
# float64 rounding of 1e-16 grows over 20 steps of lr 0.01; the parity suite allows plans the same.
TOLERANCE = 1e-10

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def plans(embedding: str = "auto") -> dict[str, Plan]:
    workload = small_workload(small_graph(), model={"embedding": embedding})
    return {
        "one": make_plan(workload),
        "pp": make_plan(workload, pp=2, layers=(1, 2), num_microbatches=3, schedule="1f1b"),
        "dp": make_plan(workload, dp=2, num_microbatches=3),
        "cp": make_plan(workload, cp=2),
    }


def train(rank: int, tasks: list[tuple[Path, str, int]], embedding: str = "auto") -> None:
    """(run directory, plan, steps in all) one after another; a directory with a checkpoint is resumed."""
    graph = small_graph()
    for run_dir, plan, max_steps in tasks:
        trainer = make_trainer(rank, run_dir, plans(embedding)[plan], graph, max_steps=max_steps)
        dist.barrier()
        trainer.resume()
        trainer.run()


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def leave_later_lines(run_dir: Path) -> None:
    """What a run that was killed after its last checkpoint leaves: a step to take again, and half a line."""
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "loss": 0.0}\n{"step": 9, "lo')


def check_same(run_dir: Path, reference: Path) -> None:
    """Every step's loss, norm and learning rate, every epoch's scores, and the test score."""
    got, expected = lines(run_dir), lines(reference)
    assert [line["step"] for line in got] == list(range(1, END + 1))
    assert [line["epoch"] for line in got] == [1 + step // 5 for step in range(END)]
    for mine, theirs in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(mine[key] / theirs[key] - 1) <= TOLERANCE, (run_dir.name, mine["step"], key)
        assert mine["lr"] == theirs["lr"]
    run, whole = (Run.load(path / "run.json") for path in (run_dir, reference))
    assert run.status == "completed"
    assert [epoch.val_score for epoch in run.epochs] == [epoch.val_score for epoch in whole.epochs]
    for epoch, theirs_too in zip(run.epochs, whole.epochs, strict=True):
        assert abs(epoch.train_loss / theirs_too.train_loss - 1) <= TOLERANCE
    assert (run.best_epoch, run.test_score) == (whole.best_epoch, whole.test_score)
    assert run.test_score is not None


def test_a_run_stopped_at_step_7_goes_on_under_every_plan(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with one_rank():
        train(0, [(whole, "one", END), (stopped, "one", STOP)])
    assert len(lines(whole)) == END
    assert [line["loss"] for line in lines(stopped)] == [line["loss"] for line in lines(whole)[:STOP]]
    leave_later_lines(stopped)
    for plan in ("pp", "dp", "cp"):
        shutil.copytree(stopped, tmp_path / plan)
    back = tmp_path / "back"
    run_ranks(2, train, [*((tmp_path / plan, plan, END) for plan in ("pp", "dp", "cp")), (back, "pp", STOP)])
    with one_rank():
        train(0, [(back, "one", END)])
    for run_dir in (tmp_path / "pp", tmp_path / "dp", tmp_path / "cp", back):
        check_same(run_dir, whole)


def test_a_table_goes_on_in_mid_epoch_under_another_plan(tmp_path: Path) -> None:
    """Its rows and their moments, of which each step touches a few, come back with the plan's other parameters."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_ranks(2, train, [(whole, "pp", END), (stopped, "pp", STOP), (stopped, "dp", END)], "table")
    check_same(stopped, whole)


def test_a_checkpoint_of_another_workload_is_refused(tmp_path: Path) -> None:
    graph = small_graph()
    other = small_workload(graph, train={"lr": 0.02, "dtype": "float64"})
    with one_rank():
        train(0, [(tmp_path, "one", 1)])
        with pytest.raises(MgraphError, match="another workload") as caught:
            make_trainer(0, tmp_path, make_plan(other), graph).resume()
    assert caught.value.exit_code == EXIT_STALE


def mgraph(folder: Path, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """One call of the command line with --json; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "megagraph_cli.cli", *arguments, "--json"],
        cwd=folder,
        env=environment | {"MGRAPH_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def write_plan(path: Path, **order: Any) -> None:
    """A plan as one would write it by hand."""
    recipe = RECIPE | {
        "dataset": {"name": "demo"},
        "batch": RECIPE["batch"] | {"batch_size": 64},
        "train": RECIPE["train"] | {"epochs": 1},
    }
    path.write_text(json.dumps({"schema": "mgraph.plan/1", "workload": recipe} | order), encoding="utf-8")


def test_the_command_line_resumes_under_another_plan(tmp_path: Path, environment: dict[str, str]) -> None:
    write_plan(
        tmp_path / "plan.json", gpus=1, dims={"pp": 1, "dp": 1, "cp": 1}, layers_per_stage=[3], num_microbatches=2
    )
    write_plan(
        tmp_path / "other.json", gpus=2, dims={"pp": 2, "dp": 1, "cp": 1}, layers_per_stage=[2, 1], num_microbatches=1
    )
    mgraph(tmp_path, environment, "train", "--max-steps", "10", "--run-dir", "whole")
    mgraph(tmp_path, environment, "train", "--max-steps", "7", "--run-dir", "run")
    leave_later_lines(tmp_path / "run")
    mgraph(tmp_path, environment, "train", "--resume", "run", "--plan", "other.json", "--max-steps", "10")
    got, expected = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert [line["step"] for line in got] == list(range(1, 11))
    for mine, theirs in zip(got, expected, strict=True):
        assert abs(mine["loss"] / theirs["loss"] - 1) <= TOLERANCE
        assert abs(mine["grad_norm"] / theirs["grad_norm"] - 1) <= TOLERANCE
    run = Run.load(tmp_path / "run" / "run.json")
    assert (run.status, run.epochs, run.test_score) == ("completed", [], None)
    assert [(rank.pp, rank.dp, rank.cp) for rank in run.ranks] == [(0, 0, 0), (1, 0, 0)]
