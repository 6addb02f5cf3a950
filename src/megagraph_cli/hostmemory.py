"""Memory that this host, or the control group this process lives in, can still give."""

from __future__ import annotations

from pathlib import Path

import psutil

from megagraph_cli.cgroups import Version, fields, group_folders

_FILES: dict[Version, tuple[str, str, str]] = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version: the limit, what is used, and the field of memory.stat that the kernel takes back when it needs to."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be taken: the host's available memory, or what is left in the tightest control group.

    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    left = [_left_bytes(version, folder) for version, folder in group_folders("memory", root)]
    return min([int(psutil.virtual_memory().available), *(each for each in left if each is not None)])


def _left_bytes(version: Version, folder: Path) -> int | None:
    """What one group leaves; None where it sets no limit. Cached file pages that are idle count as free."""
    limit_file, usage_file, idle_field = _FILES[version]
    limit, usage = fields(folder / limit_file), fields(folder / usage_file)
    if not limit or not usage or limit[0] == "max":
        return None
    stat = fields(folder / "memory.stat")
    idle = int(stat[stat.index(idle_field) + 1]) if idle_field in stat else 0
    return max(0, int(limit[0]) - max(0, int(usage[0]) - idle))
