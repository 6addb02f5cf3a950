"""A limit on the memory of a command and of all that it starts, page cache included, by a control group of Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
_PATIENCE_S = 10.0


@contextmanager
def limited(most_bytes: int) -> Iterator[Path]:
    """A group that allows ``most_bytes``; a process joins it by writing 0 into the file that is given.

    Raises OSError where this user may make no such group.
    """
    for root, name in _ROOTS:
        group = root / f"mgraph-bench-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        group.mkdir()
        try:
            (group / name).write_text(str(most_bytes), encoding="ascii")
            yield group / "cgroup.procs"
        finally:
            _remove(group)
        return
    raise OSError("this system has no memory controller of control groups")


def _remove(group: Path) -> None:
    """Remove a group once the last of its processes has ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def forget(folder: Path) -> None:
    """Let go of what memory holds of the files in a folder, as far as nobody maps them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk yet would be kept
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
