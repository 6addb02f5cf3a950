"""A worker dies and training goes on from the last checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.processes import (
    START_S,
    assert_none_left,
    descendants,
    steps,
    wait_for_steps,
    worker_of,
    write_plan,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_a_restart_goes_on_from_the_last_checkpoint(
    mgraph: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    write_plan(tmp_path, batch_size=64, eval_views=1)
    per_epoch, end = 38, 100  # 2400 targets; far enough that the worker dies before the end
    process = mgraph("train", "--run-dir", "run", "--max-restarts", "1", "--max-steps", str(end), "--json")
    wait_for_steps(process, tmp_path / "run", per_epoch + 2)
    taken = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:per_epoch]
    processes = descendants(process)
    worker_of(processes, 1).kill()
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 0, err
    assert re.fullmatch(
        r"warning: rank 1 \(pp=1 dp=0 cp=0\) was killed by SIGKILL; .*; going on from step \d+ \(restart 1 of 1\)\n",
        err,
    )
    resumed_from = int(err.split("from step ")[1].split()[0])
    assert resumed_from >= per_epoch
    assert resumed_from % per_epoch == 0
    # With their seconds: these steps were not taken again.
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:per_epoch] == taken
    assert steps(tmp_path / "run") == list(range(1, end + 1))
    run = json.loads(out)
    assert (run["status"], [each["signal"] for each in run["restarts"]]) == ("completed", ["SIGKILL"])
    assert_none_left(processes)
