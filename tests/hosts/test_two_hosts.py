"""Two hosts as network namespaces, two workers each: losses of one process, a failure of all, a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.parts.slow_link import Host, mgraph_on, missing, two_hosts

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import Run
from megagraph_cli.artifacts.workload import Recipe
from megagraph_cli.commands.workloads import workload_of
from megagraph_cli.errors import EXIT_WORKER
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split
from tests.runtime.small import RECIPE, make_plan, make_trainer, one_rank

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
# float64; the split changes the order of sums.
TOLERANCE = 1e-10
START_S, DOWN_S = 280.0, 30.0
BATCH, END = 800, 8
"""Three steps an epoch of the demo graph."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with two_hosts() as found:
        yield found


def recipe() -> dict[str, dict[str, Any]]:
    return RECIPE | {
        "dataset": {"name": "demo"},
        "batch": RECIPE["batch"] | {"batch_size": BATCH, "eval_views": 1},
        "train": RECIPE["train"] | {"epochs": 1000},
    }


def losses(run_dir: Path) -> list[float]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def losses_alone(folder: Path, cache: Path) -> list[float]:
    """One process's losses."""
    graph = load_graph("demo", folder, cache)
    chosen = Recipe.model_validate(recipe())
    workload = workload_of(chosen, graph, make_split(graph, chosen.dataset.split, chosen.dataset.split_seed))
    with one_rank():
        make_trainer(0, folder / "alone", make_plan(workload), graph, max_steps=END).run()
    return losses(folder / "alone")


def wait_for_steps(processes: Sequence[subprocess.Popen[str]], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + START_S
    while len(losses(run_dir)) < count:
        ended = [process.communicate()[1] for process in processes if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.05)


def worker(processes: Sequence[subprocess.Popen[str]], rank: int) -> psutil.Process:
    (found,) = (
        child
        for process in processes
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.environ().get("RANK") == str(rank)
    )
    return found


def test_two_hosts_train_as_one_process_fail_together_and_go_on(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    plan = {
        "schema": Plan.SCHEMA,
        "gpus": 4,
        "workload": recipe(),
        "dims": {"pp": 2, "dp": 1, "cp": 2},
        "layers_per_stage": [1, 2],
        "num_microbatches": 2,
    }
    (folders[0] / "plan.json").write_text(json.dumps(plan), encoding="utf-8")  # needed on host 0 alone
    cache = {"MGRAPH_CACHE": str(tmp_path / "graphs"), "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"]}

    # One worker on host 1 is killed: both hosts end, and say which.
    run_dir = folders[0] / "run"
    with mgraph_on(hosts, ["train", "--run-dir", "run"], folders, **cache) as processes:
        wait_for_steps(processes, run_dir, 4)
        ranks = [worker(processes, rank) for rank in range(4)]
        ranks[3].send_signal(signal.SIGKILL)
        said = [process.communicate(timeout=DOWN_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_WORKER] * 2
    killed = "rank 3 (pp=1 dp=0 cp=1) was killed by SIGKILL"
    assert said[0].startswith(f"mgraph: on host 1: {killed}")
    assert said[1].startswith(f"mgraph: {killed}")
    assert [text.count("\n") for text in said] == [1, 1]
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks)
    failed = Run.load(run_dir / "run.json")
    assert failed.failure is not None
    assert (failed.status, failed.failure.rank, failed.failure.pp) == ("failed", 3, 1)

    # Host 0 alone has the checkpoints, with both stages; both hosts go on from there.
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    assert sorted(path.name for path in checkpoint.iterdir()) == ["part-0.pt", "part-1.pt", "state.json"]
    assert not list(folders[1].rglob("*.pt"))
    resumed = ["train", "--resume", "run", "--max-steps", str(END), "--json"]
    with mgraph_on(hosts, resumed, folders, **cache) as processes:
        printed = [process.communicate(timeout=START_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [err for _, err in printed]
    runs = [json.loads(out) for out, _ in printed]
    assert [run.pop("run_dir") for run in runs] == ["run", "run/host-1"]
    assert runs[0] == runs[1]
    assert runs[0]["status"] == "completed"
    assert not list(folders[1].rglob("*.pt"))

    found, expected = losses(run_dir), losses_alone(tmp_path, tmp_path / "graphs")
    assert len(found) == len(expected) == END
    assert max(abs(mine / other - 1) for mine, other in zip(found, expected, strict=True)) <= TOLERANCE
