"""Gloo's own threads, which work for a collective a little longer than the caller waits for it.

A profiler that is stopped while one of them still lets go of its tensors does not see these go, and tells too many
bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE_S = 2e-4
_MOST_LOOKS = 500


def settle() -> bool:
    """Wait until these threads have gone to sleep, 0.1 s at most; whether they have. True where there are none.

    On other systems than Linux there is no way to see them, and nothing is waited for.
    """
    tasks = [path for path in _TASKS.glob("*") if _read(path / "comm").strip() == _NAME]
    before: list[list[str]] = []
    for _ in range(_MOST_LOOKS if tasks else 0):
        time.sleep(_PAUSE_S)  # lets go of the interpreter, which they may be waiting for
        now = [_account(path) for path in tasks]
        if now == before and all(account[:1] in (["S"], []) for account in now):
            return True
        before = now
    return not tasks


def _account(task: Path) -> list[str]:
    """A thread's state, its processor time and how often it went to sleep: the same twice, it slept all the while."""
    values = _read(task / "stat").rpartition(")")[2].split()
    switches = [line for line in _read(task / "status").splitlines() if "ctxt_switches" in line]
    return [*values[:1], *values[11:13], *switches]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # it ended meanwhile
        return ""
