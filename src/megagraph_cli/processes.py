"""The processes of a launch: found wherever they hang in the tree, ended with it."""

from __future__ import annotations

import signal
import subprocess

import psutil

TERMINATE_S = 5.0
MARK = "MGRAPH_LAUNCH_ID"
"""A variable in the environment of every process of a launch."""


def kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End torchrun and all that it started: SIGTERM, after five seconds SIGKILL. Does nothing where none is left."""
    victims = marked(mark)
    if process.poll() is None:  # else its pid may be another's by now
        victims += [*descendants(process), psutil.Process(process.pid)]
    for victim in victims:
        send_signal(victim, signal.SIGTERM)
    _, alive = psutil.wait_procs(victims, timeout=TERMINATE_S)
    for victim in {*alive, *marked(mark)}:
        send_signal(victim, signal.SIGKILL)
    process.wait()


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Children of a process, theirs, and so on."""
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> list[psutil.Process]:
    """Processes of this launch wherever they hang in the tree: workers whose torchrun died belong to init."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if candidate.environ().get(MARK) == mark:
                found.append(candidate)
        except (psutil.Error, OSError):
            continue  # another user's, or gone by now: not ours
    return found


def send_signal(victim: psutil.Process, number: int) -> None:
    """A signal to a process that may be gone by now."""
    try:
        victim.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended first, as it should
