"""Folders of one call: gone with it, kept for a failure that names a log, swept after a call that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megagraph_cli.artifacts.run import Failure
from megagraph_cli.commands.scratch import scratch
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed

HOLD = """
import sys, tempfile
from megagraph_cli.commands.scratch import scratch
tempfile.tempdir = sys.argv[1]
with scratch("test-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_with_its_call_and_with_its_error(temporary: Path) -> None:
    with scratch("test-") as folder:
        assert folder.parent == temporary
        (folder / "logs").mkdir()
    with pytest.raises(KeyboardInterrupt), scratch("test-"):
        raise KeyboardInterrupt
    assert list(temporary.iterdir()) == []


FAILURE = Failure(rank=1, pp=None, dp=None, cp=None, message="planted")


@pytest.mark.parametrize("error", [WorkerFailed("planted", FAILURE), MgraphError("planted", EXIT_WORKER)])
def test_a_workers_failure_keeps_it_for_good(error: MgraphError, temporary: Path) -> None:
    with pytest.raises(MgraphError), scratch("test-") as folder:
        raise error
    with scratch("test-"):
        assert folder.is_dir()


def test_the_next_call_removes_what_a_killed_one_left_and_nothing_in_use(temporary: Path) -> None:
    (temporary / "test-others").mkdir()  # has no lock: not ours
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(temporary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    with scratch("test-"):
        assert held.is_dir()
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=60)
    assert held.is_dir()
    with scratch("test-"):
        assert not held.exists()
    assert [path.name for path in temporary.iterdir()] == ["test-others"]
