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
        self._alive.append(weakref.ref(storage, lambda _: self.changes.append((time.time_ns(), -size))))
        return size

    @contextmanager
    def overhear(self) -> Iterator[None]:
        """Inside the block, tell of memory that a tensor of this thread takes over from NumPy."""
        from_numpy, listener = torch.from_numpy, threading.get_ident()

        def telling(array: Any) -> Tensor:
            tensor = from_numpy(array)
            if threading.get_ident() == listener:
                self.changes.append((time.time_ns(), self.add(tensor.untyped_storage())))
            return tensor

        with mock.patch.object(torch, "from_numpy", telling):
            yield

    def close(self) -> list[tuple[int, int]]:
        """All changes so far; deaths are told of no longer."""
        self._alive = []
        return list(self.changes)


def rise(profiler: profile, others: list[tuple[int, int]]) -> tuple[int, int]:
    """(highest, final) sum of what was allocated minus what was freed, in time order, over the profiled block."""
    results = profiler.kineto_results
    assert results is not None
    told = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]  # type: ignore[attr-defined]
    level = highest = 0
    for _, size in sorted(told + others, key=lambda change: change[0]):
        level += size
        highest = max(highest, level)
    return highest, level
