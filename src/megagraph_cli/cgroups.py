"""Control groups of this process: the folders in which a limit on it may stand (v1 and v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

Version = Literal[1, 2]


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Version, Path]]:
    """(version, folder) of every control group at or above this process that may limit ``controller``.

    A folder may be absent. ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no control groups here (macOS)
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            yield from ((2, folder) for folder in _upwards(mount, name))
        elif controller in controllers.split(","):
            for own in dict.fromkeys((mount / controllers, mount / controller)):
                yield from ((1, folder) for folder in _upwards(own, name))


def _upwards(mount: Path, name: str) -> Iterator[Path]:
    # Inside a container the group's own name may not exist below the mount; its ancestors do, the mount at least.
    group = PurePosixPath(name.lstrip("/"))
    yield from (mount / folder for folder in (group, *group.parents))


def fields(path: Path) -> list[str]:
    """The words of a control file; none where the group has no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []
