"""Seconds of each communication by message size: never looked up, always measured."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import CommSample
from megagraph_cli.runtime.measure import RUNS, max_over_ranks, timed

_REPEATS = 5
"""Messages timed together: one alone is shorter than the clock and the scheduler are exact."""
_NANO = 1e-9


def measure_p2p(device: torch.device, message_bytes: int) -> CommSample:
    """One message between neighbours: half a round trip between ranks 0 and 1 while the others wait."""
    rank = dist.get_rank()
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)

    def round_trips() -> None:
        for _ in range(_REPEATS):
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
                dist.send(message, 0)

    samples = _samples(round_trips, device, active=rank < 2, calls=2 * _REPEATS)
    return CommSample(
        op="p2p",
        axis="pp",
        group_size=2,
        link="host",
        message_bytes=message_bytes,
        time_s=statistics.median(samples),
        samples_s=samples,
    )


def measure_all_reduce(
    device: torch.device, group: dist.ProcessGroup, group_size: int, message_bytes: int
) -> CommSample:
    """One sum over the first ``group_size`` ranks while the others wait."""
    active = dist.get_rank() < group_size
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)

    def reductions() -> None:
        for _ in range(_REPEATS if active else 0):
            dist.all_reduce(message, group=group)

    samples = _samples(reductions, device, active=active, calls=_REPEATS)
    return CommSample(
        op="all_reduce",
        axis="dp",
        group_size=group_size,
        link="host",
        message_bytes=message_bytes,
        time_s=statistics.median(samples),
        samples_s=samples,
    )


def _samples(function: object, device: torch.device, *, active: bool, calls: int) -> list[float]:
    """Seconds of one call in each of several runs, the slowest active rank's, after one run for warm-up."""
    assert callable(function)
    taken = []
    for _ in range(RUNS + 1):
        dist.barrier()
        taken.append(timed(function, device) / calls)
    nanoseconds = max_over_ranks([round(seconds / _NANO) for seconds in taken[1:]], device, active)
    return [value * _NANO for value in nanoseconds]
