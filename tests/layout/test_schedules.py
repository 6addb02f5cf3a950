"""What a schedule says of itself agrees with the work it lists."""

from __future__ import annotations

import pytest

from megagraph_cli.layout.schedules import SCHEDULES, Schedule, receive_buffers

CASES = [
    (schedule, pp, num_microbatches)
    for schedule in SCHEDULES.values()
    for pp in (1, 2, 3, 4)
    for num_microbatches in (1, 2, 4, 7)
    if num_microbatches >= schedule.min_microbatches(pp)
]


@pytest.mark.parametrize(("schedule", "pp", "num_microbatches"), CASES)
def test_each_micro_batch_goes_forward_once_and_then_back_once(
    schedule: Schedule, pp: int, num_microbatches: int
) -> None:
    for stage in range(pp):
        order = schedule.order(stage, pp, num_microbatches)
        forward = [work.microbatch for work in order if work.kind == "forward"]
        backward = [work.microbatch for work in order if work.kind == "backward"]
        assert forward == backward == list(range(num_microbatches))
        live = most = 0
        for work in order:
            live += 1 if work.kind == "forward" else -1
            assert live >= 0
            most = max(most, live)
        # A single stage runs its micro-batches one after another, whatever the order lists.
        assert schedule.in_flight(stage, pp, num_microbatches) == (most if pp > 1 else 1)


def test_one_receive_is_posted_ahead_while_there_is_more_to_receive() -> None:
    assert [receive_buffers(in_flight, 4) for in_flight in (1, 2, 3, 4)] == [2, 3, 4, 4]
