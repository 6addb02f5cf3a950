"""Keeping to a budget, with a clock that goes as the works of the test say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megagraph_cli.runtime.estimates import modules_s
from megagraph_cli.runtime.grid import PLAIN, RUNS, Grid, Sizes, Way, ends, ways
from megagraph_cli.runtime.pace import Extent, Pace, Work

FULL_S, LEAST_S, NEEDED, OPTIONAL = 10.0, 1.0, 6, 4


def nothing(_: bool) -> None:
    """What these works do: the clock is moved for them."""


def works() -> list[Work]:
    """6 that must be measured and 4 that need not: 100 s whole, 6 s at the least."""
    return [Work(f"work {n}", nothing, FULL_S, LEAST_S, n >= NEEDED) for n in range(NEEDED + OPTIONAL)]


def taken(limit_s: float, factor: Callable[[int], float], start_s: float = 5.0) -> tuple[list[Extent], float]:
    """The extent of each work and when the last ends, where work n takes ``factor(n)`` times what was foretold."""
    pace, now_s, extents = Pace(works(), limit_s), start_s, []
    for place, work in enumerate(pace.works):
        extents.append(pace.choose(place, now_s))
        now_s += factor(place) * {"full": work.full_s, "least": work.least_s, "none": 0.0}[extents[-1]]
    return extents, now_s


def test_everything_is_measured_whole_where_there_is_time() -> None:
    assert taken(111.0, lambda _: 1.0) == (["full"] * 10, 105.0)


@pytest.mark.parametrize(
    ("limit_s", "slower"), [(30.0, 0.3), (30.0, 1.5), (60.0, 1.0), (60.0, 3.0), (100.0, 1.5), (100.0, 3.0)]
)
def test_what_must_be_measured_always_is_and_ends_in_time(limit_s: float, slower: float) -> None:
    extents, end_s = taken(limit_s, lambda _: slower)
    assert "none" not in extents[:NEEDED]
    assert "full" in extents
    assert end_s <= limit_s


def test_what_need_not_be_measured_is_cut_down_first() -> None:
    """Six must be measured, until 65 s; then each is whole that ends in time if it takes half as long again."""
    assert taken(100.0, lambda _: 1.0) == (["full"] * 9 + ["least"], 96.0)
    assert taken(66.0, lambda _: 1.0)[0] == ["full"] * 5 + ["least"] * 5
    assert taken(12.4, lambda _: 1.0)[0] == ["least"] * NEEDED + ["none"] * OPTIONAL


def test_a_work_that_takes_far_longer_cuts_down_all_that_follow() -> None:
    extents, end_s = taken(80.0, lambda place: 6.0 if place == 0 else 1.0)
    assert extents[0] == "full"
    assert extents[1:NEEDED] == ["least"] * (NEEDED - 1)
    assert end_s <= 80.0


def test_the_least_is_measured_though_the_budget_is_gone() -> None:
    extents, _ = taken(4.0, lambda _: 1.0)
    assert extents == ["least"] * NEEDED + ["none"] * OPTIONAL


def test_the_time_left_is_that_of_the_works_or_of_the_budget() -> None:
    pace = Pace(works(), 200.0)
    assert pace.left_s(0, 5.0) == pytest.approx(100.0)
    assert pace.left_s(7, 75.0) == pytest.approx(30.0)
    # 40 s of the budget are left for 60 s of what must be measured whole, and more that need not be.
    assert Pace(works(), 60.0).left_s(0, 20.0) == pytest.approx(40.0)
    assert Pace(works(), 60.0).left_s(0, 59.0) == pytest.approx(NEEDED * LEAST_S)


def test_the_least_sizes_keep_the_largest_micro_batch_and_two_of_each() -> None:
    grid = Grid.of(1024, 16, quick=False, largest=256)
    assert grid.sizes(PLAIN, 1) == Sizes((1, 2, 4, 8), (16, 64, 128, 256), (12, 15))
    assert grid.sizes(PLAIN, 1).least() == Sizes((1, 2), (16, 256), (), 1)
    for cp in (1, 2):
        for way in ways(cp):
            sizes = grid.sizes(way, cp)
            assert ends(sizes.microbatches) == ends(sizes.least().microbatches) == (16, 256)
            assert len(sizes.least().layers) == 2
            for link in ("host", "network"):
                assert modules_s(sizes.least(), way, cp, link, 1e-3) < modules_s(sizes, way, cp, link, 1e-3)


def test_only_whole_sequences_run_the_plain_way_go_deep_and_only_at_few_sequences() -> None:
    for layers, deep in ((4, ()), (9, ()), (10, (9,)), (13, (12,)), (16, (12, 15)), (40, (12, 16))):
        grid = Grid.of(1024, layers, quick=False, largest=256)
        assert grid.sizes(PLAIN, 1).deep == deep
        assert grid.sizes(PLAIN, 2).deep == grid.sizes(Way("full", "ring"), 1).deep == ()
        assert Grid.of(1024, layers, quick=True, largest=256).sizes(PLAIN, 1).deep == ()
        for depth in deep:
            assert grid.sizes(PLAIN, 1).microbatches_of(depth) == (16, 64)
        assert grid.sizes(PLAIN, 1).microbatches_of(1) == (16, 64, 128, 256)


def test_a_pass_is_estimated_by_its_sequences_layers_and_runs() -> None:
    """Of long sequences nothing else counts: 3 timed runs, a first one and a metered one worth 2 make 6 passes."""
    sizes = Sizes((1, 2), (10, 20))
    layers, others = 3 * 30, 3 * 30 / 2
    assert sizes.runs == RUNS == 3
    assert modules_s(sizes, PLAIN, 2, "host", 1e3) == pytest.approx(6 * 1e3 / 2 * (layers + others), rel=1e-3)
