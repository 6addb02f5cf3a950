"""Seconds of each communication by message size: never looked up, always measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import CommSample, Link
from megagraph_cli.parallel.collectives import all_gather
from megagraph_cli.runtime.grid import RUNS
from megagraph_cli.runtime.measure import NANO, max_over_ranks, timed

_REPEATS = 5
"""Messages timed together: one alone is shorter than the clock and the scheduler are exact."""
_LONG_S = 0.1
"""A message that takes longer is timed alone: over a slow network the profile would take minutes."""
Pair = tuple[int, int]


def measure_p2p(device: torch.device, message_bytes: int, pair: Pair | None, link: Link) -> CommSample:
    """One message between neighbours: half a round trip of every pair of ranks at once while the others wait."""
    rank = dist.get_rank()
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)

    def round_trips(count: int) -> None:
        if pair is None:
            return
        first, second = pair
        for _ in range(count):
            if rank == first:
                dist.send(message, second)
                dist.recv(message, second)
            else:
                dist.recv(message, first)
                dist.send(message, first)

    samples = _samples(round_trips, device, active=pair is not None, messages=2)
    return CommSample(
        op="p2p",
        axis="pp",
        group_size=2,
        link=link,
        message_bytes=message_bytes,
        time_s=statistics.median(samples),
        samples_s=samples,
    )


def measure_all_reduce(
    device: torch.device, group: dist.ProcessGroup | None, group_size: int, message_bytes: int, link: Link
) -> CommSample:
    """One sum over every group of ``group_size`` ranks at once; ranks without a ``group`` wait."""
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)

    def reductions(count: int) -> None:
        for _ in range(count if group is not None else 0):
            dist.all_reduce(message, group=group)

    samples = _samples(reductions, device, active=group is not None)
    return _of_group("all_reduce", group_size, link, message_bytes, samples)


def measure_all_gather(
    device: torch.device, group: dist.ProcessGroup | None, group_size: int, message_bytes: int, link: Link
) -> CommSample:
    """As ``measure_all_reduce``, but each rank gives its share of ``message_bytes`` (rounded up), and gets all."""
    own = torch.zeros(-(-message_bytes // (4 * group_size)), dtype=torch.float32, device=device)
    everyones = own.new_empty(group_size * own.numel())

    def gathers(count: int) -> None:
        if group is None:
            return
        for _ in range(count):
            all_gather(everyones, own, group)

    samples = _samples(gathers, device, active=group is not None)
    return _of_group("all_gather", group_size, link, everyones.nbytes, samples)


def _of_group(
    op: Literal["all_reduce", "all_gather"], group_size: int, link: Link, message_bytes: int, samples: list[float]
) -> CommSample:
    return CommSample(
        op=op,
        axis="dp",
        group_size=group_size,
        link=link,
        message_bytes=message_bytes,
        time_s=statistics.median(samples),
        samples_s=samples,
    )


def _samples(function: Callable[[int], None], device: torch.device, *, active: bool, messages: int = 1) -> list[float]:
    """Seconds of one of the ``messages`` of a call in each of several runs, after one for warm-up.

    The slowest active rank's; ``function`` is told how many calls to make.
    """
    dist.barrier()
    (first,) = _slowest([timed(lambda: function(1), device)], device, active)
    repeats = 1 if first > _LONG_S else _REPEATS
    taken = []
    for _ in range(RUNS):
        dist.barrier()
        taken.append(timed(lambda: function(repeats), device) / (repeats * messages))
    return _slowest(taken, device, active)


def _slowest(taken: list[float], device: torch.device, active: bool) -> list[float]:
    nanoseconds = max_over_ranks([round(seconds / NANO) for seconds in taken], device, active)
    return [value * NANO for value in nanoseconds]
