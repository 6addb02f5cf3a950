"""What this host offers: cores this process may use, and cuda devices; torch is imported only beside a driver."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megagraph_cli.cgroups import fields, group_folders


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, cut to its cgroup's cpu quota (v1 and v2), at least 1.

    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = min(_quotas(root), default=math.inf)
    return max(1, min(cores, math.floor(quota) if math.isfinite(quota) else cores))


def threads_per_worker(local_workers: int) -> int:
    """Compute threads of each of ``local_workers`` workers on this host: more than its share makes all of them slow."""
    return max(1, usable_cores() // local_workers)


def threads_as_measured(local_workers: int, measured: int | None) -> int:
    """As many threads per worker as a forecast was ``measured`` with, none: their share; never more than that.

    Fewer workers on the same cores could have more each, but would then be faster than what was foretold of them.
    """
    share = threads_per_worker(local_workers)
    return share if measured is None else min(share, measured)


def _quotas(root: Path) -> Iterator[float]:
    """Cpu quotas in cores of every control group above this process; a group without one yields nothing."""
    for version, folder in group_folders("cpu", root):
        quota = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None:
            yield quota


def _quota_v2(folder: Path) -> float | None:
    found = fields(folder / "cpu.max")
    return None if len(found) < 2 or found[0] == "max" else int(found[0]) / int(found[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = fields(folder / "cpu.cfs_quota_us"), fields(folder / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def cuda_devices() -> int:
    """Cuda devices that workers could use: none without a driver, else what torch counts (imported only then)."""
    if not _driver_devices():
        return 0
    import torch

    return torch.cuda.device_count()


def _driver_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
