"""What a test starts does not outlive it, though it fails while a process and that one's child still run."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from bench.parts.running import killed_at_end

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
time.sleep(300)
"""


def test_a_failed_block_leaves_no_process() -> None:
    processes: list[subprocess.Popen[str]] = []

    def fail() -> None:
        processes.append(subprocess.Popen([sys.executable, "-c", ""], text=True))
        processes[0].wait(60)
        processes.append(subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True))
        assert processes[1].stdout is not None
        children.append(psutil.Process(int(processes[1].stdout.readline())))
        raise ValueError("planted")

    children: list[psutil.Process] = []
    with pytest.raises(ValueError, match="planted"), killed_at_end(processes):
        fail()
    (child,) = children
    psutil.wait_procs([child], timeout=10)
    assert [process.returncode for process in processes] == [0, -9]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
