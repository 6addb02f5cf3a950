"""A pipeline step, simulated: when each stage does which micro-batch, and when the last is done.

Sends do not block the sender. A receive is posted when its stage gets to it and the transfer occupies the receiver,
so a boundary never hides behind the receiver's compute (that is how torch's pipeline schedules behave). A stage's
receive and the work that needs it are therefore one piece of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megagraph_cli.layout.schedules import SCHEDULES


@dataclass(frozen=True)
class Timeline:
    """Ends in seconds from the step's beginning: of every stage's work, and of the whole pipeline."""

    stage_end_s: tuple[float, ...]
    makespan_s: float


def with_receives(
    forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float
) -> tuple[list[float], list[float]]:
    """Times of one micro-batch per stage and the receive it begins with (at the ends there is none)."""
    last = len(forward_s) - 1
    forward = [time + p2p_s * (stage > 0) for stage, time in enumerate(forward_s)]
    backward = [time + p2p_s * (stage < last) for stage, time in enumerate(backward_s)]
    return forward, backward


def simulate(
    forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float, num_microbatches: int, schedule: str
) -> Timeline:
    """Timeline of K micro-batches through stages of the given seconds per micro-batch under a named schedule."""
    forward, backward = with_receives(forward_s, backward_s, p2p_s)
    ends = stage_ends(forward, backward, num_microbatches, schedule)
    return Timeline(tuple(ends), max(ends))


def stage_ends(
    forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, schedule: str
) -> list[float]:
    """End of each stage's work; receives are already part of the times."""
    pp = len(forward_s)
    time_s = (*forward_s, *backward_s)
    stage_end, ends = [0.0] * pp, [0.0]
    for stage, piece, source in program(schedule, pp, num_microbatches):
        end = max(stage_end[stage], ends[source]) + time_s[piece]
        stage_end[stage] = end
        ends.append(end)
    return stage_end


@dataclass(frozen=True)
class Event:
    """One piece of a stage's work on the simulated clock; ``receive_s`` of it wait for the neighbour's message."""

    stage: int
    kind: Literal["forward", "backward"]
    microbatch: int
    start_s: float
    receive_s: float
    end_s: float


def events(
    forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float, num_microbatches: int, schedule: str
) -> list[Event]:
    """All work of the step, by stage and then in the order in which the stage does it."""
    pp = len(forward_s)
    forward, backward = with_receives(forward_s, backward_s, p2p_s)
    time_s = (*forward, *backward)
    stage_end, ends = [0.0] * pp, [0.0]
    counts = [0] * (2 * pp)
    found: list[list[Event]] = [[] for _ in range(pp)]
    for stage, piece, source in program(schedule, pp, num_microbatches):
        start = max(stage_end[stage], ends[source])
        end = start + time_s[piece]
        kind: Literal["forward", "backward"] = "forward" if piece < pp else "backward"
        received = stage > 0 if piece < pp else stage < pp - 1
        found[stage].append(Event(stage, kind, counts[piece], start, p2p_s * received, end))
        counts[piece] += 1
        stage_end[stage] = end
        ends.append(end)
    return [event for row in found for event in row]


@lru_cache(maxsize=64)
def program(schedule: str, pp: int, num_microbatches: int) -> list[tuple[int, int, int]]:
    """All work in an order in which it can be done: (stage, which time, number of the work whose result it needs).

    The times are all forwards by stage, then all backwards; work is numbered from 1, and 0 needs nothing.
    """
    orders = [SCHEDULES[schedule].order(stage, pp, num_microbatches) for stage in range(pp)]
    numbers: dict[tuple[str, int, int], int] = {}
    work: list[tuple[int, int, int]] = []
    done = [0] * pp
    waiting = list(range(pp - 1, -1, -1))
    while waiting:
        stage = waiting.pop()
        begun = done[stage]
        while done[stage] < len(orders[stage]):
            kind, microbatch = orders[stage][done[stage]]
            neighbour = stage - 1 if kind == "forward" else stage + 1
            source = numbers.get((kind, neighbour, microbatch), 0)
            if not source and 0 <= neighbour < pp:
                break
            work.append((stage, stage if kind == "forward" else pp + stage, source))
            numbers[kind, stage, microbatch] = len(work)
            done[stage] += 1
        if done[stage] > begun:
            waiting.extend(neighbour for neighbour in (stage + 1, stage - 1) if 0 <= neighbour < pp)
    assert len(work) == 2 * num_microbatches * pp, "the schedule deadlocks"
    return work
