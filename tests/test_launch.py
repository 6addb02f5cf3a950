"""Launching, watching and ending real torchrun workers: which rank is blamed, and that no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bench.parts.running import killed_at_end

from megagraph_cli import launch as launching
from megagraph_cli.errors import EXIT_WORKER
from megagraph_cli.failures import WorkerFailed
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.launch import Launch, Outcome, launch, torchrun_command
from megagraph_cli.layout.dims import ParallelDims

pytestmark = pytest.mark.ranks
TESTS = Path(__file__).parent
DOWN_S = 20.0
"""All workers must be gone this many seconds after one died."""

PARENT = """
import sys
from pathlib import Path
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.launch import Launch, launch
folder = Path(sys.argv[1])
print(launch(Launch("launch_worker", folder / "job.json", 2, folder / "logs", stop_file=folder / "stop")))
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Makes a launch of two test workers that do ``what``."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))

    def make(what: str, **fields: object) -> Launch:
        (tmp_path / "marks").mkdir()
        job = {"what": what, "folder": str(tmp_path / "marks"), "stop_file": str(tmp_path / "stop"), **fields}
        (tmp_path / "job.json").write_text(json.dumps(job))
        dims = ParallelDims(pp=2, dp=1, cp=1)
        return Launch(
            "launch_worker", tmp_path / "job.json", 2, tmp_path / "logs", tmp_path / "stop", dims.place, failing_s=3.0
        )

    return make


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in (folder / "marks").glob("pid-*")]


def assert_all_gone(folder: Path) -> None:
    found = pids(folder)
    assert 1 <= len(found) <= 2  # the first to fail may end the other before that has written its pid
    left = [pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert left == []


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not come"
        time.sleep(0.05)


def test_workers_that_end_well_are_no_failure(
    spec: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[int] = []
    made = spec("succeed")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    assert launch(Launch(**(vars(made) | {"on_poll": lambda: polls.append(1)}))) == Outcome()
    assert polls
    assert_all_gone(tmp_path)
    assert int((tmp_path / "marks/threads-1").read_text()) == launching.threads_per_worker(2)
    assert (tmp_path / "logs" / "launcher.log").exists()
    assert list(scratch.iterdir()) == []


def test_threads_are_those_that_were_asked_for(spec: Callable[..., Launch], tmp_path: Path) -> None:
    assert launch(replace(spec("succeed"), threads=3)) == Outcome()
    assert [(tmp_path / f"marks/threads-{rank}").read_text() for rank in range(2)] == ["3", "3"]


def test_an_exception_names_its_rank_place_and_log(spec: Callable[..., Launch], tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(spec("raise"))
    failure = caught.value.failure
    assert caught.value.exit_code == EXIT_WORKER
    assert (failure.rank, failure.pp, failure.dp, failure.cp) == (1, 1, 0, 0)
    assert failure.exception == "ValueError"
    assert caught.value.message == (
        "rank 1 (pp=1 dp=0 cp=0) failed with ValueError: the second rank is broken; "
        f"its log is {tmp_path / 'logs' / 'rank-1.log'}"
    )
    assert_all_gone(tmp_path)


def test_a_workers_own_exit_code_is_kept(spec: Callable[..., Launch]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(spec("raise", exit_code=4))
    assert caught.value.exit_code == 4
    assert caught.value.message.startswith("the second rank is broken (rank 1, pp=1 dp=0 cp=0; ")


def test_the_cause_is_blamed_and_not_its_echo(spec: Callable[..., Launch]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(spec("echo"))
    assert caught.value.failure.rank == 1
    assert "the cause" in caught.value.message


def test_a_silent_exit_is_named(spec: Callable[..., Launch]) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 \(pp=1 dp=0 cp=0\) ended with exit code 7"):
        launch(spec("exit"))


def test_sigkill_is_named_although_the_other_rank_ignores_sigterm(spec: Callable[..., Launch], tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(spec("stubborn"))
    assert caught.value.failure.rank == 1
    assert caught.value.failure.signal == "SIGKILL"
    assert "smaller --mem" in caught.value.message
    assert_all_gone(tmp_path)


Start = Callable[[Launch], "subprocess.Popen[str]"]


@pytest.fixture
def start_parent(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that launches a spec, and waits for its workers; nothing of it outlives a test that failed."""
    parents: list[subprocess.Popen[str]] = []

    def start(made: Launch) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARENT, str(made.job_path.parent)]
        parents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        wait_for(lambda: len(list((tmp_path / "marks").glob("threads-*"))) == 2, 60)
        return parents[-1]

    with killed_at_end(parents):
        yield start
    for worker in pids(tmp_path):  # whose parent is gone, should that have left them
        with suppress(psutil.Error):  # gone as well
            if str(tmp_path / "job.json") in psutil.Process(worker).cmdline():
                psutil.Process(worker).kill()


def test_sigkill_from_outside_brings_all_down_in_time(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path
) -> None:
    parent = start_parent(spec("wait"))
    os.kill(int((tmp_path / "marks/pid-1").read_text()), signal.SIGKILL)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out == ""
    assert parent.returncode == 1  # an uncaught WorkerFailed
    assert_all_gone(tmp_path)


def test_sigterm_makes_workers_stop_by_themselves(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path
) -> None:
    parent = start_parent(spec("wait"))
    parent.send_signal(signal.SIGTERM)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out.strip() == "Outcome(interrupted=True, killed=False)"
    assert (tmp_path / "marks/stopped-0").exists()
    assert (tmp_path / "marks/stopped-1").exists()
    assert_all_gone(tmp_path)


@pytest.mark.parametrize("to_torchrun", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_finish_although_torchrun_was_signalled_too(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path, to_torchrun: signal.Signals
) -> None:
    parent = start_parent(spec("steady"))
    wait_for(lambda: len(list((tmp_path / "marks").glob("steady-*"))) == 2, 20)
    (torchrun,) = psutil.Process(parent.pid).children()
    for worker in pids(tmp_path):
        os.kill(worker, signal.SIGTERM)
    torchrun.send_signal(to_torchrun)
    parent.send_signal(signal.SIGTERM)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out.strip() == "Outcome(interrupted=True, killed=False)"
    assert (tmp_path / "marks/stopped-0").exists()
    assert (tmp_path / "marks/stopped-1").exists()
    assert_all_gone(tmp_path)


def test_a_stop_that_kills_workers_which_do_not_ignore_it_is_no_failure(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path
) -> None:
    parent = start_parent(spec("wait"))
    parent.send_signal(signal.SIGTERM)
    for worker in pids(tmp_path):
        os.kill(worker, signal.SIGTERM)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out.strip() == "Outcome(interrupted=True, killed=False)"
    assert_all_gone(tmp_path)


def test_a_sigkill_during_a_stop_stays_a_failure(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path
) -> None:
    parent = start_parent(spec("deaf"))
    parent.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "stop").exists, 10)
    for worker in pids(tmp_path):
        os.kill(worker, signal.SIGKILL)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert (out, parent.returncode) == ("", 1)
    assert_all_gone(tmp_path)


def test_a_second_signal_kills_workers_that_hang(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path
) -> None:
    parent = start_parent(spec("deaf"))
    parent.send_signal(signal.SIGINT)
    wait_for((tmp_path / "stop").exists, 10)
    time.sleep(0.6)  # signals closer together than half a second are one
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out.strip() == "Outcome(interrupted=True, killed=True)"
    assert_all_gone(tmp_path)


def test_workers_that_do_not_stop_in_time_are_killed(
    spec: Callable[..., Launch], start_parent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spec("deaf")
    monkeypatch.setattr(sys.modules[__name__], "PARENT", PARENT.replace('/ "stop")', '/ "stop", stop_s=0.5)'))
    parent = start_parent(made)
    parent.send_signal(signal.SIGTERM)
    out, _ = parent.communicate(timeout=DOWN_S)
    assert out.strip() == "Outcome(interrupted=True, killed=True)"
    assert_all_gone(tmp_path)


def test_a_taken_port_is_tried_once_more(
    spec: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import socket

    free = launching.free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(launching, "free_port", lambda: next(ports))
        assert launch(spec("succeed")) == Outcome()
    assert next(ports, None) is None
    assert_all_gone(tmp_path)


def test_a_module_that_does_not_exist_is_a_failure_with_a_log(spec: Callable[..., Launch], tmp_path: Path) -> None:
    made = spec("succeed")
    with pytest.raises(WorkerFailed, match=r"launcher\.log"):
        launch(Launch(**(vars(made) | {"worker_module": "no_such_worker_module"})))


def test_the_command_line_is_torchruns() -> None:
    command = torchrun_command("megagraph_cli.runtime.train", Path("runs/x-1/job.json"), 4, Hosts(port=29500))
    assert command[0] == sys.executable
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=4" in command
    assert "--max-restarts=0" in command
    assert command[-3:] == ["-m", "megagraph_cli.runtime.train", "runs/x-1/job.json"]
    assert {"--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29500"} <= set(command)
    second = torchrun_command("megagraph_cli.runtime.train", Path("job.json"), 4, Hosts(3, 1, "first", 29511))
    assert {"--nnodes=3", "--node-rank=1", "--master-addr=first", "--master-port=29511"} <= set(second)
