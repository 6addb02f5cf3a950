"""What a worker of a cuda device has and takes besides its tensors, on a planted device: to the byte."""

from __future__ import annotations

import pytest
import torch

from megagraph_cli.runtime import spare
from megagraph_cli.runtime.spare import Fragmentation, WorkerMemory
from tests.runtime.small import CPU

CUDA = torch.device("cuda", 0)
TOTAL = 80_000


class PlantedDevice:
    """A caching allocator on a device: bytes used by others than tensors, live ones, and what the allocator holds."""

    def __init__(self) -> None:
        self.context, self.live, self.held = 500, 0, 0
        self.most_live = self.most_held = 0

    def use(self, live: int, held: int) -> None:
        self.live, self.held = live, max(self.held, held)
        self.most_live, self.most_held = max(self.most_live, live), max(self.most_held, self.held)

    def empty_cache(self) -> None:
        self.held = self.live

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.most_live, self.most_held = self.live, self.held

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return TOTAL - self.context - self.held, TOTAL

    def memory_allocated(self, _: torch.device) -> int:
        return self.live

    def max_memory_allocated(self, _: torch.device) -> int:
        return self.most_live

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.most_held


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlantedDevice:
    planted = PlantedDevice()
    for name in vars(PlantedDevice):
        if not name.startswith("_") and name != "use":
            monkeypatch.setattr(torch.cuda, name, getattr(planted, name))
    monkeypatch.setattr(spare, "max_over_ranks", lambda values, *_: values)
    return planted


def test_fragmentation_is_what_is_held_beyond_the_peak_of_one_pass(device: PlantedDevice) -> None:
    found = Fragmentation()
    for peak, held, most in ((30_000, 33_000, 3_000), (1_000, 1_200, 3_000), (40_000, 44_000, 4_000)):
        with found.watched(CUDA):
            device.use(peak, held)
            device.use(0, held)  # all of it is cached now, for the next pass to use: no fragmentation
        assert found.most_bytes == most


def test_on_a_cpu_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "empty_cache")
    found = Fragmentation()
    with found.watched(CPU):
        pass
    assert found.most_bytes == 0


def test_what_comes_with_use_leaves_less_of_the_same_device(device: PlantedDevice) -> None:
    start = WorkerMemory.at_start(CUDA, 1)
    assert (start.memory_bytes, start.overhead_bytes) == (TOTAL, 500)
    found = Fragmentation()
    with found.watched(CUDA):
        device.use(30_000, 33_000)
    device.context += 2_000  # communicators, kernels loaded at their first use
    device.use(64, 33_000)  # a library's workspace stays
    end = start.at_end(CUDA, found)
    assert end.memory_bytes == TOTAL
    assert end.overhead_bytes == 500 + 2_000 + 64 + 3_000
    # A plan's tensors up to the default limit, with what they are held in: no more than the device has.
    assert end.memory_bytes - end.overhead_bytes + found.most_bytes <= device.mem_get_info(CUDA)[0]


def test_another_process_on_the_device_is_overhead(device: PlantedDevice) -> None:
    device.context += 10_000
    end = WorkerMemory.at_start(CUDA, 1).at_end(CUDA, Fragmentation())
    assert end.memory_bytes - end.overhead_bytes == TOTAL - 10_500


def test_on_a_cpu_workers_share_what_is_free_and_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "max_over_ranks", lambda values, *_: values)
    monkeypatch.setattr(spare, "overhead_bytes", lambda _: 300)
    monkeypatch.setattr(spare, "free_bytes", lambda _: 10_000)
    start = WorkerMemory.at_start(CPU, 4)
    assert start == WorkerMemory(memory_bytes=2_800, overhead_bytes=300)
    assert start.at_end(CPU, Fragmentation(7)) == start
