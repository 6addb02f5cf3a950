"""The user stops a training: what can be resumed goes on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megagraph_cli.artifacts.run import Run
from megagraph_cli.errors import EXIT_INTERRUPTED
from tests.commands.processes import assert_none_left, descendants, finish, steps, wait_for_steps, write_plan

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize(
    ("number", "whole_tree"), [(signal.SIGINT, False), (signal.SIGTERM, True)], ids=["SIGINT", "SIGTERM to the tree"]
)
def test_a_stop_leaves_a_checkpoint_that_goes_on(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals, whole_tree: bool
) -> None:
    write_plan(tmp_path, batch_size=64, eval_views=1)
    run_dir = tmp_path / "run"
    process = mgraph("train", "--run-dir", "run", "--json")
    wait_for_steps(process, run_dir, 2)
    processes = descendants(process)
    for each in processes if whole_tree else []:
        each.send_signal(number)
    process.send_signal(number)
    code, printed = finish(process)
    assert code == printed["error"]["code"] == EXIT_INTERRUPTED
    assert "mgraph train --resume run" in printed["error"]["message"]
    assert_none_left(processes)
    done = steps(run_dir)
    assert Run.load(run_dir / "run.json").status == "interrupted"
    assert (run_dir / "checkpoints" / f"step-{done[-1]:09d}" / "state.json").exists()

    code, printed = finish(mgraph("train", "--resume", "run", "--max-steps", str(len(done) + 2), "--json"))
    assert (code, printed["status"]) == (0, "completed")
    assert steps(run_dir) == list(range(1, len(done) + 3))


def test_a_stop_during_evaluation_goes_on_with_the_evaluation(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    # 2400 targets are two steps; 800 nodes x 24 views take many times as long, so the stop comes in between.
    write_plan(tmp_path, batch_size=1200, eval_views=24)
    run_dir = tmp_path / "run"
    process = mgraph("train", "--run-dir", "run", "--json")
    wait_for_steps(process, run_dir, 2)
    process.send_signal(signal.SIGTERM)
    code, _ = finish(process)
    assert code == EXIT_INTERRUPTED
    stopped = Run.load(run_dir / "run.json")
    assert (stopped.status, stopped.epochs) == ("interrupted", [])

    code, printed = finish(mgraph("train", "--resume", "run", "--max-steps", "2", "--json"))
    assert (code, printed["status"], printed["best_epoch"]) == (0, "completed", 1)
    assert [epoch["epoch"] for epoch in printed["epochs"]] == [1]
    assert printed["test_score"] is not None
    assert steps(run_dir) == [1, 2]
