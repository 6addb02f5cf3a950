"""What torch's profiler cannot see of a CPU's live tensors, seen in other ways.

The profiler reports what torch's allocator gives and takes back on the profiled thread since it began. It does not see
a tensor that is freed and is older than that, memory that NumPy or Numba allocated and a tensor took over, or what
other threads allocate. So: storages are watched until they die, ``torch.from_numpy`` is overheard on the profiled
thread, both by the profile's own clock, and what is alive at the end and was never seen counts from the start. What
the loader's thread sends to its peers is host memory that comes and goes beside the step: it never counts.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd.profiler import profile

from megagraph_cli.parallel.replica import ON_HOST


def live_storages() -> dict[int, torch.UntypedStorage]:
    """All CPU storages that a Python tensor refers to, each once, by address; not what the loader's thread sends."""
    gc.collect()
    storages: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        # By type alone: asking some objects for their __class__ runs their code, torch's deprecated ones warn.
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes() and not hasattr(thing, ON_HOST):
                storages[storage.data_ptr()] = storage
    return storages


def live_tensor_bytes() -> int:
    """Bytes of all CPU storages that a Python tensor refers to, each counted once."""
    return sum(storage.nbytes() for storage in live_storages().values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass
class Watch:
    """Changes (when in ns since 1970, the profile's clock, and bytes) of storages that no profile tells of."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    _alive: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    def add(self, storage: torch.UntypedStorage) -> int:
        """Tell when a storage dies, in whatever thread; returns its bytes."""
        size = storage.nbytes()
        self._alive.append(weakref.ref(storage, lambda _: self._tell(-size)))
        return size

    def _tell(self, size: int) -> None:
        self.changes.append((time.time_ns(), size))

    @contextmanager
    def overhear(self) -> Iterator[None]:
        """Inside the block, tell of memory that a tensor of this thread takes over from NumPy."""
        from_numpy, listener = torch.from_numpy, threading.get_ident()

        def telling(array: Any) -> Tensor:
            tensor = from_numpy(array)
            if threading.get_ident() == listener:
                self._tell(self.add(tensor.untyped_storage()))
            return tensor

        with mock.patch.object(torch, "from_numpy", telling):
            yield

    def close(self) -> list[tuple[int, int]]:
        """All changes so far; deaths are told of no longer."""
        self._alive = []
        return list(self.changes)


def rise(profiler: profile, others: list[tuple[int, int]], *, watched: bool) -> tuple[int, int]:
    """(highest, final) sum of what was allocated minus what was freed, in time order, over the profiled block.

    ``watched``: ``others`` tell of the end of everything that is older than the profile.
    """
    results = profiler.kineto_results
    assert results is not None
    told: list[tuple[int, int, int]] = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            told.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    told.sort()
    seen = _of_this_profile(told) if watched else [(when, size) for when, size, _ in told]
    level = highest = 0
    for _, size in sorted([*seen, *others], key=lambda change: change[0]):
        level += size
        highest = max(highest, level)
    return highest, level


def _of_this_profile(told: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(when, bytes) of allocations and of the frees that belong to them, from (when, bytes, address) in time order.

    The allocator remembers what an earlier profile saw allocated. It then tells of the end of it, or of another
    tensor's that came to lie at the same address, which is told of already.
    """
    alive: set[int] = set()
    found = []
    for when, size, address in told:
        if size > 0:
            alive.add(address)
        elif address not in alive:
            continue
        else:
            alive.remove(address)
        found.append((when, size))
    return found
