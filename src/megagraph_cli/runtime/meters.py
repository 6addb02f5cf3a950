"""The memory meter: the most bytes of live tensors a rank holds at any moment of a step.

On cuda the allocator keeps the figure. On a CPU nothing does, so the meter adds what is alive when the step begins
(every tensor Python can reach, each storage once) and the rise that torch's profiler sees during the step. It
shares no code with the cost model that it judges.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megagraph_cli.hostmemory import available_bytes


@dataclass
class Reading:
    """Bytes live at the start, the most at any moment, and live at the end of what was metered."""

    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0


@contextmanager
def metered(device: torch.device, *, from_zero: bool = False) -> Iterator[Reading]:
    """Meter the block; the reading is filled in when it ends. Slows the block down: keep it out of timings.

    ``from_zero`` leaves out (on a CPU) the slow search for what is alive at the start: the reading then tells
    changes alone.
    """
    reading = Reading()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        reading.start_bytes = torch.cuda.memory_allocated(device)
        yield reading
        torch.cuda.synchronize(device)
        reading.peak_bytes = torch.cuda.max_memory_allocated(device)
        reading.end_bytes = torch.cuda.memory_allocated(device)
        return
    reading.start_bytes = 0 if from_zero else live_tensor_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield reading
    rise, change = _rise(profiler)
    reading.peak_bytes = reading.start_bytes + rise
    reading.end_bytes = reading.start_bytes + change


def live_tensor_bytes() -> int:
    """Bytes of all CPU storages that a Python tensor refers to, each counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type alone: asking some objects for their __class__ runs their code, torch's deprecated ones warn.
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _rise(profiler: profile) -> tuple[int, int]:
    """(highest, final) sum of allocations minus frees, in time order, over the profiled block."""
    inner = profiler.profiler
    assert inner is not None
    results = inner.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()  # type: ignore[attr-defined]
        highest = max(highest, level)
    return highest, level


def overhead_bytes(device: torch.device) -> int:
    """What a worker takes besides live tensors.

    cuda: all memory in use on the device by this process's context, libraries and fragmentation, beyond live tensors;
    cpu: resident bytes (call it before the first batch).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(max(0, total - free - torch.cuda.memory_allocated(device)))
    return int(psutil.Process(os.getpid()).memory_info().rss)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device (cpu: what the host, or the tightest of its control groups, can still give)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()
