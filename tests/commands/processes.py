"""``mgraph`` as a process: started in a folder, watched by its metrics, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

DOWN_S = 20.0
"""All workers must be gone this many seconds after one died."""
START_S = 240.0
"""Long enough for imports and compilation on a busy machine; nothing is measured by it."""


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
