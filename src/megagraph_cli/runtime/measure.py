"""Timing by rank: warm-up first, then several runs that all ranks start together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

RUNS = 3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def mean_over_ranks(values: list[float], device: torch.device, active: bool) -> list[float]:
    """Each value averaged over the ranks that measured it; every rank of the world calls it."""
    sums = torch.tensor([*values, 1.0], dtype=torch.float64, device=device) * float(active)
    dist.all_reduce(sums)
    *totals, count = sums.tolist()
    return [total / count for total in totals]


def max_over_ranks(values: list[int], device: torch.device, active: bool) -> list[int]:
    """Each value's largest over the ranks that measured it; every rank of the world calls it."""
    largest = torch.tensor(values, dtype=torch.int64, device=device) * int(active)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(value) for value in largest.tolist()]
