"""The memory meter: the most bytes of live tensors a rank holds at any moment of a step.

On cuda the allocator keeps the figure. On a CPU nothing does, so the meter adds what is alive when the step begins
(every tensor Python can reach, each storage once) and the rise that torch's profiler sees during the step, mended by
``live.py`` where the profiler is blind. It shares no code with the cost model that it judges.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from megagraph_cli.hostmemory import available_bytes
from megagraph_cli.runtime.gloo_threads import settle
from megagraph_cli.runtime.live import Watch, live_storages, live_tensor_bytes, rise, storage_bytes

Holders = Mapping[str, Iterable[Tensor]]
"""Tensors that live through the whole block, by category."""


@dataclass
class Reading:
    """Bytes live at the start, the most at any moment, and live at the end of what was metered.

    ``categories`` add up to the peak: what the ``holders`` hold, ``buffers`` (whatever else was alive at the start)
    and ``activations`` (the rise since then, temporaries included).
    """

    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    categories: dict[str, int] = field(default_factory=dict)


@contextmanager
def metered(device: torch.device, *, holders: Holders | None = None, from_zero: bool = False) -> Iterator[Reading]:
    """Meter the block; the reading is filled in when it ends. Slows the block down: keep it out of timings.

    ``from_zero`` leaves out (on a CPU) the slow search for what is alive before and after: the reading then tells
    changes alone, and of these only what the profiler, ``torch.from_numpy`` and collectives tell of.
    """
    reading = Reading()
    held = {name: storage_bytes(tensors) for name, tensors in (holders or {}).items()}
    with _on_cuda(device, reading) if device.type == "cuda" else _on_cpu(reading, from_zero):
        yield reading
    if holders is not None:
        buffers = reading.start_bytes - sum(held.values())
        rest = {"buffers": buffers, "activations": reading.peak_bytes - reading.start_bytes}
        reading.categories = held | rest


@contextmanager
def _on_cuda(device: torch.device, reading: Reading) -> Iterator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    reading.start_bytes = torch.cuda.memory_allocated(device)
    yield
    torch.cuda.synchronize(device)
    reading.peak_bytes = torch.cuda.max_memory_allocated(device)
    reading.end_bytes = torch.cuda.memory_allocated(device)


@contextmanager
def _on_cpu(reading: Reading, from_zero: bool) -> Iterator[None]:
    watch = Watch()
    if not from_zero:
        reading.start_bytes = sum(watch.add(storage) for storage in live_storages().values())
    # torch.profiler, which wraps this one, imports torch's compiler: seconds at each worker's start.
    with watch.overhear(), profile(use_cpu=True, profile_memory=True) as profiler:
        yield
        settle()
        watch.close()
    highest, change = rise(profiler, watch, watched=not from_zero)
    # What nothing told of (another thread's, say) is alive now or it is not known: it counts from the start.
    unseen = 0 if from_zero else max(0, live_tensor_bytes() - reading.start_bytes - change)
    reading.peak_bytes = reading.start_bytes + highest + unseen
    reading.end_bytes = reading.start_bytes + change + unseen


def overhead_bytes(device: torch.device) -> int:
    """What a worker takes besides live tensors.

    cuda: all memory in use on the device by this process's context, libraries and cached blocks, beyond live tensors;
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
