"""Real workers in mid-training: one is killed, or mgraph itself before they began."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megagraph_cli.artifacts.run import Run
from megagraph_cli.errors import EXIT_WORKER
from tests.commands.processes import (
    DOWN_S,
    START_S,
    assert_none_left,
    descendants,
    steps,
    wait_for_steps,
    worker_of,
    write_plan,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


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
