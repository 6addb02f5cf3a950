"""The simulated pipeline step against the enumeration's own simulation and against closed forms."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megagraph_cli.cost.makespans import Paths, gpipe_makespans, one_f_one_b_makespans
from megagraph_cli.cost.simulate import events, simulate, with_receives
from tests.cost.oracle import makespan

ROUNDING = 1e-12
"""Sums of at most a few hundred float64 times."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equals_an_independent_simulation(schedule: str) -> None:
    rng = random.Random(7)
    for _ in range(500):
        pp = rng.randint(1, 6)
        count = rng.randint(pp, 12)
        forward = [rng.choice([0.0, rng.random(), 3.0]) for _ in range(pp)]
        backward = [rng.choice([0.0, rng.random(), 5.0]) for _ in range(pp)]
        transfer = rng.choice([0.0, 0.3])
        mine = simulate(forward, backward, transfer, count, schedule)
        assert mine.makespan_s == pytest.approx(makespan(forward, backward, transfer, count, schedule), rel=ROUNDING)


def test_one_stage_works_without_a_pause() -> None:
    assert simulate([2.0], [3.0], 9.0, 4, "gpipe").makespan_s == pytest.approx(4 * 5.0, rel=ROUNDING)


def test_gpipe_has_its_closed_form() -> None:
    forward, backward, transfer, count = [1.0, 4.0, 2.0], [2.0, 3.0, 7.0], 0.5, 6
    f, b = with_receives(forward, backward, transfer)
    expected = sum(f) + sum(b) + (count - 1) * (max(f) + max(b))
    assert simulate(forward, backward, transfer, count, "gpipe").makespan_s == pytest.approx(expected, rel=ROUNDING)


def test_equal_stages_under_1f1b_take_as_long_as_under_gpipe() -> None:
    args = ([1.0] * 4, [2.0] * 4, 0.0, 8)
    assert simulate(*args, "1f1b").makespan_s == pytest.approx(simulate(*args, "gpipe").makespan_s, rel=ROUNDING)


def test_a_receive_occupies_its_receiver() -> None:
    # Stage 1 receives while stage 0 goes on: 1 + (0.5 + 1) per micro-batch, then backwards of 1, received by stage 0.
    timeline = simulate([1.0, 1.0], [1.0, 1.0], 0.5, 2, "gpipe")
    assert timeline.stage_end_s[1] == pytest.approx(1 + 2 * 1.5 + 2 * 1.0, rel=ROUNDING)
    assert timeline.makespan_s == pytest.approx(1 + 2 * 1.5 + 1 + 2 * 1.5, rel=ROUNDING)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_events_are_the_work_of_each_stage_without_overlap(schedule: str) -> None:
    forward, backward, transfer, count = [1.0, 4.0, 2.0], [2.0, 3.0, 7.0], 0.5, 5
    found = events(forward, backward, transfer, count, schedule)
    timeline = simulate(forward, backward, transfer, count, schedule)
    assert len(found) == 2 * 3 * count
    for stage in range(3):
        mine = [event for event in found if event.stage == stage]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
        assert mine[-1].end_s == pytest.approx(timeline.stage_end_s[stage], rel=ROUNDING)
        assert {(event.kind, event.microbatch) for event in mine} == {
            (kind, number) for kind in ("forward", "backward") for number in range(count)
        }
        lengths = {event.kind: event.end_s - event.start_s - event.receive_s for event in mine}
        assert lengths == pytest.approx({"forward": forward[stage], "backward": backward[stage]}, rel=ROUNDING)
    # What a stage needs was done before it began.
    ends = {(event.kind, event.stage, event.microbatch): event.end_s for event in found}
    for event in found:
        source = event.stage + (-1 if event.kind == "forward" else 1)
        assert ends.get((event.kind, source, event.microbatch), 0.0) <= event.start_s


def test_closed_forms_equal_the_simulation() -> None:
    rng = random.Random(11)
    for _ in range(500):
        pp = rng.randint(1, 8)
        count = pp + rng.choice([0, 0, 1, 2, 9])
        forward = np.array([[rng.choice([0.0, rng.random(), 3.0]) for _ in range(pp)] for _ in range(3)])
        backward = np.array([[rng.choice([0.0, rng.random(), 5.0]) for _ in range(pp)] for _ in range(3)])
        for name, makespans in (("gpipe", gpipe_makespans), ("1f1b", one_f_one_b_makespans)):
            expected = [
                simulate(ahead, back, 0.0, count, name).makespan_s
                for ahead, back in zip(forward.tolist(), backward.tolist(), strict=True)
            ]
            assert makespans(forward, backward, count) == pytest.approx(expected, rel=ROUNDING)


def test_paths_of_some_stages_bound_those_of_all() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        pp = int(rng.integers(2, 8))
        count = pp + int(rng.integers(0, 6))
        forward, backward = rng.random((4, pp)), rng.random((4, pp))
        whole = one_f_one_b_makespans(forward, backward, count)
        total = (forward + backward).sum(axis=1)
        for known in range(1, pp):
            paths = Paths(forward[:, :known], backward[:, :known], pp, count)
            within = np.max([paths.down_to(stage) for stage in range(known)], axis=0)
            assert np.all(within <= whole * (1 + ROUNDING))
            assert np.all(paths.through_the_end(total) <= whole * (1 + ROUNDING))
