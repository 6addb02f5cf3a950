"""Real workers in mid-training: one is killed, the user stops them, and what can be resumed goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagraph_cli.artifacts.run import Run
from megagraph_cli.errors import EXIT_INTERRUPTED, EXIT_WORKER

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

DOWN_S = 20.0
"""All workers must be gone this many seconds after one died."""
START_S = 240.0
"""Long enough for imports and compilation on a busy machine; nothing is measured by it."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One prepared graph for all tests here."""
    return os.environ | {"MGRAPH_CACHE": str(tmp_path_factory.mktemp("graphs"))}


@pytest.fixture
def mgraph(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``mgraph`` in an empty folder."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "megagraph_cli.cli", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def write_plan(folder: Path, *, batch_size: int, eval_views: int) -> None:
    """Two pipeline stages of a tiny model on the demo graph."""
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "ffn_dim": 8}
    plan = {
        "schema": "mgraph.plan/1",
        "gpus": 2,
        "workload": {
            "dataset": {"name": "demo"},
            "model": sizes,
            "batch": {"batch_size": batch_size, "eval_views": eval_views},
            "train": {"epochs": 1000},
        },
        "dims": {"pp": 2, "dp": 1, "cp": 1},
        "layers_per_stage": [1, 1],
        "num_microbatches": 2,
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def steps(run_dir: Path) -> list[int]:
    """The steps that metrics.jsonl tells of, as far as its lines are whole."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + START_S
    while len(steps(run_dir)) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.05)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def worker_of(processes: list[psutil.Process], rank: int) -> psutil.Process:
    (found,) = (each for each in processes if each.environ().get("RANK") == str(rank))
    return found


def assert_none_left(processes: list[psutil.Process]) -> None:
    assert [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = process.communicate(timeout=START_S)
    assert out, err
    return process.returncode, json.loads(out)


def test_a_killed_worker_takes_all_down_and_is_named(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    write_plan(tmp_path, batch_size=64, eval_views=1)
    process = mgraph("train", "--run-dir", "run")
    wait_for_steps(process, tmp_path / "run", 2)
    processes = descendants(process)
    worker_of(processes, 1).kill()
    _, err = process.communicate(timeout=DOWN_S)
    assert process.returncode == EXIT_WORKER
    assert err.startswith("mgraph: rank 1 (pp=1 dp=0 cp=0) was killed by SIGKILL")
    assert err.count("\n") == 1
    run = Run.load(tmp_path / "run" / "run.json")
    assert run.status == "failed"
    assert run.failure is not None
    assert (run.failure.rank, run.failure.pp, run.failure.signal) == (1, 1, "SIGKILL")
    assert_none_left(processes)


def test_a_restart_goes_on_from_the_last_checkpoint(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    write_plan(tmp_path, batch_size=64, eval_views=1)
    per_epoch, end = 38, 100  # 2400 targets; far enough that the worker dies before the end
    process = mgraph("train", "--run-dir", "run", "--max-restarts", "1", "--max-steps", str(end), "--json")
    wait_for_steps(process, tmp_path / "run", per_epoch + 2)
    processes = descendants(process)
    worker_of(processes, 1).kill()
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 0, err
    assert re.fullmatch(
        r"warning: rank 1 \(pp=1 dp=0 cp=0\) was killed by SIGKILL; .*; going on from step \d+ \(restart 1 of 1\)\n",
        err,
    )
    assert int(err.split("from step ")[1].split()[0]) % per_epoch == 0
    assert steps(tmp_path / "run") == list(range(1, end + 1))
    run = json.loads(out)
    assert (run["status"], [each["signal"] for each in run["restarts"]]) == ("completed", ["SIGKILL"])
    assert_none_left(processes)


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


def living_in(folder: Path) -> list[psutil.Process]:
    """All processes that work in ``folder``, whoever their parent is."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and Path(each.cwd()) == folder:
                found.append(each)
    return found


def ranks_of(processes: list[psutil.Process]) -> set[str]:
    ranks = set()
    for each in processes:
        with suppress(psutil.Error):
            ranks |= {each.environ()["RANK"]} if "RANK" in each.environ() else set()
    return ranks


@pytest.mark.parametrize("ranks", [set(), {"0", "1"}], ids=["torchrun imports", "workers import"])
def test_mgraph_killed_before_the_first_step_leaves_no_process(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path, ranks: set[str]
) -> None:
    """No handler of mgraph's own runs, and its workers do not watch it yet."""
    write_plan(tmp_path, batch_size=64, eval_views=1)
    process = mgraph("train", "--run-dir", "run")
    deadline = time.monotonic() + START_S
    while not (children := descendants(process)) or ranks_of(children) != ranks:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "torchrun did not start"
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=DOWN_S)
    deadline = time.monotonic() + DOWN_S
    while living_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living_in(tmp_path) == []
    assert steps(tmp_path / "run") == []
