"""What a worker may take in all and what it takes besides live tensors: ``memory_bytes`` and ``overhead_bytes``.

On cuda a plan of ``peak_bytes`` needs room for the context, which is there when the profile starts; for libraries,
their workspaces and communicators, which come with use; and for fragmentation, what the allocator holds beyond live
tensors while these are at their peak. The first two are what is in use when no tensor is left. The third is gone by
then, so that it is watched while modules are measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megagraph_cli.runtime.measure import max_over_ranks
from megagraph_cli.runtime.meters import free_bytes, overhead_bytes


@dataclass
class Fragmentation:
    """The most bytes that cuda's allocator held beyond live tensors, at the peak of one measured pass."""

    most_bytes: int = 0

    @contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Watch what happens inside, from an empty cache on: what larger work left there is no fragmentation."""
        if device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield
        held, live = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        self.most_bytes = max(self.most_bytes, held - live)


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that every worker can have in all, its overhead included, and the most overhead of any; alike on all."""

    memory_bytes: int
    overhead_bytes: int

    @classmethod
    def at_start(cls, device: torch.device, workers_per_host: int) -> WorkerMemory:
        """Before the first batch; every rank calls it. On a CPU the free memory of the host is shared equally."""
        own = overhead_bytes(device)
        # Everyone's overhead before anyone's free memory: with every worker's overhead already taken.
        (most,) = max_over_ranks([own], device, True)
        if device.type == "cuda":
            share = free_bytes(device) + own
        else:
            share = free_bytes(device) // workers_per_host + most
        return cls(-max_over_ranks([-share], device, True)[0], most)

    def at_end(self, device: torch.device, fragmentation: Fragmentation) -> WorkerMemory:
        """After the last measurement; every rank calls it. What came since the start leaves less of the same memory."""
        if device.type != "cuda":
            return self
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # No module is left: what still is allocated are workspaces.
        (most,) = max_over_ranks([total - free + fragmentation.most_bytes], device, True)
        return WorkerMemory(self.memory_bytes, max(self.overhead_bytes, most))
