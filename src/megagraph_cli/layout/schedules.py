"""Pipeline schedules: one entry serves the runtime, which does its work, and the cost model, which simulates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Work(NamedTuple):
    """One piece of a stage's work: the forward or backward of one micro-batch."""

    kind: Literal["forward", "backward"]
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """A named schedule.

    ``order(stage, pp, K)`` is the work of a stage in the order it is done; ``in_flight(stage, pp, K)`` the most
    micro-batches whose activations a stage holds at once; ``min_microbatches(pp)`` the fewest micro-batches it accepts.
    """

    name: str
    order: Callable[[int, int, int], tuple[Work, ...]]
    in_flight: Callable[[int, int, int], int]
    min_microbatches: Callable[[int], int]


def _gpipe_order(stage: int, pp: int, num_microbatches: int) -> tuple[Work, ...]:  # noqa: ARG001
    forward = tuple(Work("forward", i) for i in range(num_microbatches))
    return forward + tuple(Work("backward", i) for i in range(num_microbatches))


def _one_f_one_b_order(stage: int, pp: int, num_microbatches: int) -> tuple[Work, ...]:
    warm_up = min(num_microbatches, pp - stage)
    order = [Work("forward", i) for i in range(warm_up)]
    for i in range(num_microbatches):
        order.append(Work("backward", i))
        if warm_up + i < num_microbatches:
            order.append(Work("forward", warm_up + i))
    return tuple(order)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(
        name="gpipe",
        order=_gpipe_order,
        in_flight=lambda stage, pp, num_microbatches: 1 if pp == 1 else num_microbatches,  # noqa: ARG005
        min_microbatches=lambda pp: 1,  # noqa: ARG005
    ),
    "1f1b": Schedule(
        name="1f1b",
        order=_one_f_one_b_order,
        in_flight=lambda stage, pp, num_microbatches: min(num_microbatches, pp - stage),
        min_microbatches=lambda pp: pp,
    ),
}


def receive_buffers(in_flight: int, num_microbatches: int) -> int:
    """Most x that a stage has received or is receiving: one for each micro-batch in flight, and the next."""
    return min(in_flight + 1, num_microbatches)
