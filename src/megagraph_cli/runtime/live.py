"""What torch's profiler cannot see of a CPU's live tensors, seen in other ways.

The profiler reports what torch's allocator gives and takes back on the profiled thread since it began. It does not see
a tensor that is freed and is older than that, memory that NumPy or Numba allocated and a tensor took over, what other
threads allocate, or a tensor that a thread of gloo's lets go of last, as it may with any that went through a
collective. So: storages are watched until they die, ``torch.from_numpy`` and collectives are overheard on the profiled
thread, all by the profile's own clock, and what is alive at the end and was never seen counts from the start. What
the loader's thread sends to its peers is host memory that comes and goes beside the step: it never counts.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
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


COLLECTIVES = [
    name
    for name in (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    )
    if hasattr(dist, name)
]
"""Functions of torch.distributed whose tensors a thread of gloo's holds on to."""


class End(NamedTuple):
    """A storage died (ns since 1970); it lay at ``address`` when it went through a collective."""

    when: int
    address: int
    passed: int


@dataclass
class Watch:
    """What no profile tells of, all in ns since 1970, the profile's clock.

    ``changes``: (when, bytes) of storages that are older than the profile or are NumPy's; ``ends`` of those that the
    profile saw allocated and may not see freed.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    _alive: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    def add(self, storage: torch.UntypedStorage) -> int:
        """Tell when a storage dies, in whatever thread; returns its bytes."""
        size = storage.nbytes()
        self._alive.append(weakref.ref(storage, lambda _: self._tell(-size)))
        return size

    def _tell(self, size: int) -> None:
        self.changes.append((time.time_ns(), size))

    def _passed(self, tensor: Tensor) -> None:
        """A tensor goes through a collective: tell when its storage dies."""
        storage = tensor.untyped_storage()
        address, passed = storage.data_ptr(), time.time_ns()
        self._alive.append(weakref.ref(storage, lambda _: self.ends.append(End(time.time_ns(), address, passed))))

    @contextmanager
    def overhear(self) -> Iterator[None]:
        """Inside the block, hear of what this thread takes over from NumPy and of what it gives to collectives."""
        from_numpy, listener = torch.from_numpy, threading.get_ident()

        def telling(array: Any) -> Tensor:
            tensor = from_numpy(array)
            if threading.get_ident() == listener:
                self._tell(self.add(tensor.untyped_storage()))
            return tensor

        def passing(collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == listener:
                    for tensor in _tensors_of([*args, *kwargs.values()]):
                        self._passed(tensor)
                return collective(*args, **kwargs)

            return call

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "from_numpy", telling))
            for name in COLLECTIVES:
                stack.enter_context(mock.patch.object(dist, name, passing(getattr(dist, name))))
            yield

    def close(self) -> None:
        """Deaths are told of no longer."""
        self._alive = []


def _tensors_of(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list):
            yield from _tensors_of(each)


def rise(profiler: profile, watch: Watch, *, watched: bool) -> tuple[int, int]:
    """(highest, final) sum of what was allocated minus what was freed, in time order, over the profiled block.

    ``watched``: the ``watch`` tells of the end of everything that is older than the profile.
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
    level = highest = 0
    for _, size in sorted([*changes_in(told, watch.ends, watched), *watch.changes], key=lambda change: change[0]):
        level += size
        highest = max(highest, level)
    return highest, level


def changes_in(told: list[tuple[int, int, int]], ends: list[End], watched: bool) -> Iterator[tuple[int, int]]:
    """(when, bytes) of all that the profile saw allocated, each with its end, from (when, bytes, address) and ends.

    The allocator remembers what an earlier profile saw allocated. It then tells of the end of it, or of another
    tensor's that came to lie at the same address, which is told of already where all is ``watched``. An end that both
    tell of counts once, when the first does; at the latest when something else comes to lie at the address.
    """
    alive: dict[int, tuple[int, int]] = {}
    over: set[int] = set()
    for when, size, address, passed in sorted(
        [(when, size, address, None) for when, size, address in told]
        + [(end.when, 0, end.address, end.passed) for end in ends],
        key=lambda change: change[:2],  # what goes in a moment goes before what comes
    ):
        since, held = alive.get(address, (0, 0))
        if passed is not None:
            if held and since <= passed:
                del alive[address]
                over.add(address)
                yield when, -held
        elif size > 0:
            if held:
                yield when, -held
            alive[address] = when, size
            over.discard(address)
            yield when, size
        elif held:
            del alive[address]
            yield when, -held
        elif address in over:
            over.remove(address)
        elif not watched:
            yield when, size
