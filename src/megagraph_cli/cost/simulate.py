"""A pipeline step, simulated: when each stage does which micro-batch, and when the last is done.

A boundary transfer does not occupy a stage. The receive of a direction's next message is posted when its stage takes
the one before, so a message travels as soon as it has been sent and its receive is posted, beside whatever the stage
then does. That also keeps the messages of a direction apart: the one before has arrived when it is taken.
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


@dataclass(frozen=True)
class Event:
    """One piece of a stage's work on the simulated clock.

    What it needs from its neighbour travels for ``travel_s`` until ``arrival_s``; both are 0 where nothing is received.
    """

    stage: int
    kind: Literal["forward", "backward"]
    microbatch: int
    travel_s: float
    arrival_s: float
    start_s: float
    end_s: float


def simulate(
    forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float, num_microbatches: int, schedule: str
) -> Timeline:
    """Timeline of K micro-batches through stages of the given seconds per micro-batch under a named schedule."""
    pp = len(forward_s)
    time_s = (*forward_s, *backward_s)
    stage_end, ends, taken = [0.0] * pp, [0.0], [0.0] * (2 * pp)
    for stage, piece, source in program(schedule, pp, num_microbatches):
        start = stage_end[stage]
        if source:
            # Its receive was posted when the stage took the message before.
            start = max(start, max(ends[source], taken[piece]) + p2p_s)
        taken[piece] = start
        stage_end[stage] = start + time_s[piece]
        ends.append(stage_end[stage])
    return Timeline(tuple(stage_end), max(stage_end))


def events(
    forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float, num_microbatches: int, schedule: str
) -> list[Event]:
    """All work of the step, by stage and then in the order in which the stage does it."""
    pp = len(forward_s)
    time_s = (*forward_s, *backward_s)
    stage_end, ends, taken = [0.0] * pp, [0.0], [0.0] * (2 * pp)
    counts = [0] * (2 * pp)
    found: list[list[Event]] = [[] for _ in range(pp)]
    for stage, piece, source in program(schedule, pp, num_microbatches):
        travel, arrival = (p2p_s, max(ends[source], taken[piece]) + p2p_s) if source else (0.0, 0.0)
        start = max(stage_end[stage], arrival)
        end = start + time_s[piece]
        kind: Literal["forward", "backward"] = "forward" if piece < pp else "backward"
        found[stage].append(Event(stage, kind, counts[piece], travel, arrival, start, end))
        counts[piece] += 1
        taken[piece], stage_end[stage] = start, end
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
