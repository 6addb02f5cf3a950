"""Timing by rank: warm-up first, then several runs that all ranks start together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")
NANO = 1e-9
"""Seconds: what times are rounded to where ranks agree on the largest."""


def synchronize(device: torch.device) -> None:
    """Wait for all that the device does, on every stream: no receive may be posted that waits for this rank."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, all of the device's work included: a send is on a stream that the caller never waits for.

    What ``function`` receives it also waits for, so that no message of another call is outstanding.
    """
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


def unless_exhausted(function: Callable[[], _T]) -> _T | None:
    """What ``function`` gives; None where the device ran out of memory, whose caches are then free again."""
    try:
        return function()
    except torch.OutOfMemoryError:
        pass
    # Not within the handler: the exception's frames hold the tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
