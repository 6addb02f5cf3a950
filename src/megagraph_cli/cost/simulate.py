"""A pipeline step, simulated: when each stage does which micro-batch, and when the last is done.

Sends do not block the sender. A receive is posted when its stage gets to it and the transfer occupies the receiver,
so a boundary never hides behind the receiver's compute (that is how torch's pipeline schedules behave). A stage's
receive and the work that needs it are therefore one piece of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    orders = [SCHEDULES[schedule].order(stage, pp, num_microbatches) for stage in range(pp)]
    # [stage][micro-batch] -> (end, longest chain through the last stage that ends here)
    forward_end: list[list[tuple[float, float] | None]] = [[None] * num_microbatches for _ in range(pp)]
    backward_end: list[list[tuple[float, float] | None]] = [[None] * num_microbatches for _ in range(pp)]
    here = [(0.0, NEVER)] * pp
    done = [0] * pp
    waiting = list(range(pp - 1, -1, -1))
    while waiting:
        stage = waiting.pop()
        order = orders[stage]
        begun = done[stage]
        end, chain = here[stage]
        while done[stage] < len(order):
            kind, microbatch = order[done[stage]]
            source: tuple[float, float] | None
            if kind == "forward":
                source = (0.0, NEVER) if stage == 0 else forward_end[stage - 1][microbatch]
                time, ends = forward_s[stage], forward_end
            else:
                source = (0.0, NEVER) if stage == pp - 1 else backward_end[stage + 1][microbatch]
                time, ends = backward_s[stage], backward_end
            if source is None:
                break
            end = max(end, source[0]) + time
            chain = end if stage == pp - 1 else max(chain, source[1]) + time
            ends[stage][microbatch] = (end, chain)
            done[stage] += 1
        here[stage] = (end, chain)
        if done[stage] > begun:
            waiting.extend(neighbour for neighbour in (stage + 1, stage - 1) if 0 <= neighbour < pp)
    assert all(count == 2 * num_microbatches for count in done), "the schedule deadlocks"
    return [end for end, _ in here], here[0][1]
