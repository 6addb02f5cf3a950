"""The simulated pipeline step against an event-by-event clockwork, and what is told about it without simulating."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megagraph_cli.cost.families import bounds_of, families
from megagraph_cli.cost.makespans import gpipe_makespans, longest_paths, one_f_one_b_makespans
from megagraph_cli.cost.simulate import events, simulate
from tests.cost.clockwork import Clockwork
from tests.cost.oracle import makespan

ROUNDING = 1e-12
"""Sums of at most a few hundred float64 times."""


def stage_times(rng: random.Random, pp: int) -> tuple[list[float], list[float], float]:
    """Seconds of every stage's forward and backward, and of a transfer: none, short, or longer than any work."""
    draw = rng.choice([rng.random, lambda: rng.choice([0.0, rng.random(), 3.0]), lambda: float(rng.randint(0, 4))])
    alike = rng.random() < 0.2
    forward, backward = ([draw()] * pp if alike else [draw() for _ in range(pp)] for _ in range(2))
    return forward, backward, rng.choice([0.0, 0.01, 0.3, 1.0, 10.0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equals_an_event_by_event_clockwork(schedule: str) -> None:
    rng = random.Random(7)
    for _ in range(1000):
        pp, count = rng.randint(1, 6), rng.randint(1, 12)
        case = (*stage_times(rng, pp), count, schedule)
        mine, ends = simulate(*case), Clockwork(*case).ends
        assert mine.makespan_s == pytest.approx(max(ends.values()), rel=ROUNDING), case
        assert makespan(*case[:2], *case[2:]) == pytest.approx(mine.makespan_s, rel=ROUNDING), case
        # A sender that waits until its gradients have left never keeps the first stage, where a step ends.
        last = ends["B", 0, count - 1]
        assert mine.stage_end_s[0] == pytest.approx(last, rel=ROUNDING), case


def test_one_stage_works_without_a_pause() -> None:
    assert simulate([2.0], [3.0], 9.0, 4, "gpipe").makespan_s == pytest.approx(4 * 5.0, rel=ROUNDING)


def test_gpipe_has_its_closed_form() -> None:
    forward, backward, count = [1.0, 4.0, 2.0], [2.0, 3.0, 7.0], 6
    for transfer, ways in ((0.5, 4.0 + 7.0), (5.0, 5.0 + 7.0), (9.0, 9.0 + 9.0)):
        expected = sum(forward) + sum(backward) + 4 * transfer + (count - 1) * ways
        found = simulate(forward, backward, transfer, count, "gpipe").makespan_s
        assert found == pytest.approx(expected, rel=ROUNDING)


def test_equal_stages_under_1f1b_take_as_long_as_under_gpipe() -> None:
    args = ([1.0] * 4, [2.0] * 4, 0.0, 8)
    assert simulate(*args, "1f1b").makespan_s == pytest.approx(simulate(*args, "gpipe").makespan_s, rel=ROUNDING)


def test_transfers_hide_behind_work_where_it_lasts_longer() -> None:
    # Down: stage 1 gets its first x at 1.5 and then one each second. Up: stage 0 likewise.
    timeline = simulate([1.0, 1.0], [1.0, 1.0], 0.5, 3, "gpipe")
    assert timeline.stage_end_s[1] == pytest.approx(1.5 + 3 + 3, rel=ROUNDING)
    assert timeline.makespan_s == pytest.approx(1.5 + 3 + 1 + 0.5 + 3, rel=ROUNDING)


def test_1f1b_waits_for_every_round_trip() -> None:
    # Two in flight on stage 0: each two of its micro-batches take a round trip of both stages.
    timeline = simulate([1.0, 1.0], [1.0, 1.0], 0.5, 8, "1f1b")
    assert timeline.makespan_s == pytest.approx(4 * (2 + 2 + 2 * 0.5) + 2, rel=ROUNDING)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("transfer", [0.5, 9.0])
def test_events_are_the_work_of_each_stage_without_overlap(schedule: str, transfer: float) -> None:
    forward, backward, count = [1.0, 4.0, 2.0], [2.0, 3.0, 7.0], 5
    found = events(forward, backward, transfer, count, schedule)
    timeline = simulate(forward, backward, transfer, count, schedule)
    assert len(found) == 2 * 3 * count
    ends = {(event.kind, event.stage, event.microbatch): event.end_s for event in found}
    for stage in range(3):
        mine = [event for event in found if event.stage == stage]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
        assert mine[-1].end_s == pytest.approx(timeline.stage_end_s[stage], rel=ROUNDING)
        assert {(event.kind, event.microbatch) for event in mine} == {
            (kind, number) for kind in ("forward", "backward") for number in range(count)
        }
        lengths = {event.kind: event.end_s - event.start_s for event in mine}
        assert lengths == pytest.approx({"forward": forward[stage], "backward": backward[stage]}, rel=ROUNDING)
        for kind, source in (("forward", stage - 1), ("backward", stage + 1)):
            messages = [event for event in mine if event.kind == kind]
            if not 0 <= source < 3:
                assert {event.travel_s for event in messages} == {0.0}
                continue
            # A message leaves after its sender is done and the one before was taken, and is there before it is used.
            leaves = [event.arrival_s - event.travel_s for event in messages]
            slack = ROUNDING * timeline.makespan_s
            assert {event.travel_s for event in messages} == {transfer}
            assert all(event.arrival_s <= event.start_s for event in messages)
            assert all(a.start_s <= b + slack for a, b in zip(messages, leaves[1:], strict=False))
            sent = [ends[kind, source, event.microbatch] for event in messages]
            assert all(a <= b + slack for a, b in zip(sent, leaves, strict=True))


def test_many_splits_at_once_equal_the_simulation() -> None:
    rng = random.Random(11)
    for _ in range(500):
        pp = rng.randint(1, 8)
        count = pp + rng.choice([0, 0, 1, 2, 9, 20])
        forward, backward, transfer = stage_times(rng, pp)
        splits = [rng.sample(range(pp), pp) for _ in range(3)]
        ahead, back = ([[times[i] for i in split] for split in splits] for times in (forward, backward))
        for name, makespans in (("gpipe", gpipe_makespans), ("1f1b", one_f_one_b_makespans)):
            expected = [simulate(f, b, transfer, count, name).makespan_s for f, b in zip(ahead, back, strict=True)]
            assert makespans(np.array(ahead), np.array(back), transfer, count) == pytest.approx(expected, rel=ROUNDING)


def test_paths_of_some_stages_bound_those_of_all() -> None:
    rng = random.Random(5)
    for _ in range(500):
        pp = rng.randint(2, 8)
        count = pp + rng.choice([0, 0, 1, 2, 9, 20])
        forward, backward, transfer = stage_times(rng, pp)
        whole = simulate(forward, backward, transfer, count, "1f1b").makespan_s * (1 + ROUNDING)
        ahead, back = np.array([forward]), np.array([backward])
        both = np.add(forward, backward)
        for known in range(1, pp):
            rest = np.array([both[known:].sum()])
            assert longest_paths(ahead[:, :known], back[:, :known], transfer, pp, count, rest)[0] <= whole
        for stage in range(pp):
            ends = np.array([max(forward[stage], transfer if stage else 0.0)])
            starts = np.array([max(backward[stage], transfer if stage < pp - 1 else 0.0)])
            weights = families(stage, pp, count)
            before, after, known = bounds_of(weights, both[stage : stage + 1], (ends, starts), transfer)
            lengths = before * both[:stage].sum() + after * both[stage + 1 :].sum() + known[:, 0]
            assert lengths.max() <= whole, (forward, backward, transfer, count, stage)
            assert lengths.max() >= count * both[stage] / (1 + ROUNDING)


def test_equal_stages_leave_nothing_to_search() -> None:
    """Where all stages are alike the paths through single stages hold the longest: whole round trips, and a part."""
    for pp, count in itertools.product((2, 3, 5, 8), (8, 9, 12, 17, 32)):
        for transfer in (0.0, 0.1, 2.0):
            whole = simulate([1.0] * pp, [2.0] * pp, transfer, count, "1f1b").makespan_s
            found = []
            for stage in range(pp):
                ends = np.array([max(1.0, transfer if stage else 0.0)]), np.array([max(2.0, transfer)])
                before, after, known = bounds_of(families(stage, pp, count), np.array([3.0]), ends, transfer)
                found.append((before * 3.0 * stage + after * 3.0 * (pp - 1 - stage) + known[:, 0]).max())
            assert max(found) == pytest.approx(whole, rel=ROUNDING)
