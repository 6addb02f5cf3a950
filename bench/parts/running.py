"""Processes that a test or a bench starts: whatever becomes of their caller, none outlives it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megagraph_cli.processes import descendants, send_signal


@contextmanager
def killed_at_end(processes: Iterable[subprocess.Popen[Any]]) -> Iterator[None]:
    """What still runs of ``processes`` (which may grow) when the block ends is killed, with all that it started."""
    try:
        yield
    finally:
        for process in processes:
            _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:  # else its pid may be another's by now
        for victim in descendants(process):
            send_signal(victim, signal.SIGKILL)
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
