"""A pipeline step, simulated: when each stage does which micro-batch, and when the last is done.

Sends do not block the sender. A receive is posted when its stage gets to it and the transfer occupies the receiver,
so a boundary never hides behind the receiver's compute (that is how torch's pipeline schedules behave). A stage's
receive and the work that needs it are therefore one piece of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megagraph_cli.layout.schedules import SCHEDULES

NEVER = float("-inf")


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
    ends, _ = longest_paths(forward, backward, num_microbatches, schedule)
    return Timeline(tuple(ends), max(ends))


def longest_paths(
    forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, schedule: str
) -> tuple[list[float], float]:
    """(end of each stage, longest chain of work that passes the last stage and ends on the first).

    Receives are already part of the times. The second figure serves the search's bound: such a chain holds every
    stage's forward and backward at least once (docs/cost-model.md).
    """
    pp = len(forward_s)
    time_s = (*forward_s, *backward_s)
    stage_end, stage_chain = [0.0] * pp, [NEVER] * pp
    ends, chains = [0.0], [NEVER]
    for stage, piece, source in program(schedule, pp, num_microbatches):
        end, chain = ends[source], chains[source]
        if stage_end[stage] > end:
            end = stage_end[stage]
        if stage_chain[stage] > chain:
            chain = stage_chain[stage]
        end += time_s[piece]
        chain = end if stage == pp - 1 else chain + time_s[piece]
        stage_end[stage], stage_chain[stage] = end, chain
        ends.append(end)
        chains.append(chain)
    return stage_end, stage_chain[0]


def critical_counts(
    forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, schedule: str
) -> list[int]:
    """How often each stage's forward (first pp entries) and backward stand on the longest path of the step."""
    pp = len(forward_s)
    time_s = (*forward_s, *backward_s)
    work = program(schedule, pp, num_microbatches)
    latest = [0] * pp
    ends, before = [0.0], [0]
    for number, (stage, piece, source) in enumerate(work, start=1):
        previous = latest[stage] if ends[latest[stage]] > ends[source] else source
        ends.append(ends[previous] + time_s[piece])
        before.append(previous)
        latest[stage] = number
    counts = [0] * (2 * pp)
    number = max(range(len(ends)), key=ends.__getitem__)
    while number:
        counts[work[number - 1][1]] += 1
        number = before[number]
    return counts


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
