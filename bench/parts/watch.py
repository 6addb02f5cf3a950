"""Memory of a tree of processes, looked at many times a second from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_EVERY_S = 0.05


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory, mapped files included."""
    return int(process.memory_info().rss)


def private_bytes(process: psutil.Process) -> int:
    """Memory that no other process shares, pages of mapped files that it alone has touched included."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Watch:
    """The most that ``measure`` gave at one moment, summed over this process's descendants that ``chosen`` picks."""

    def __init__(
        self,
        measure: Callable[[psutil.Process], int],
        chosen: Callable[[psutil.Process], bool] = lambda _process: True,
    ) -> None:
        self._measure, self._chosen = measure, chosen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.most = 0
        self.times = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(_EVERY_S):
            total = 0
            for process in me.children(recursive=True):
                try:
                    if self._chosen(process):
                        total += self._measure(process)
                except (psutil.Error, OSError):  # it ended meanwhile
                    continue
            self.most = max(self.most, total)
            self.times += 1


def is_worker(process: psutil.Process) -> bool:
    """Whether a process is a training worker rather than what started it."""
    words = process.cmdline()
    return "torch.distributed.run" not in words and any(word.endswith("job.json") for word in words)
