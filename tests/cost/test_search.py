"""The search against an enumeration that shares no code with it, and its promises about limits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.partition import Choice, Split
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import search_candidates
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_INFEASIBLE, MgraphError
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.units import MIB
from tests.cost import planted
from tests.cost.exact import HOSTS, LONG, RELATIVE, check_named_limit, compare, instance, searched
from tests.cost.fitted import planted_model
from tests.cost.oracle import Oracle

NUM_INSTANCES = 24
NUM_LIMITS = 16
OVER_HOSTS_SEEDS = (0, 2, 5, 7, 20)
"""4 and 8 workers on 2 and on 4 hosts, and 6 on 2."""
GROUPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_optimum_front_and_counts_equal_an_enumeration(group: int) -> None:
    # bench/search.py compares a thousand.
    for seed in range(group, NUM_INSTANCES, GROUPS):
        compare(seed)


@pytest.mark.parametrize("seed", [1000, 1001])
def test_long_models_and_deep_pipelines_equal_an_enumeration(seed: int) -> None:
    compare(seed, LONG)


def test_every_order_of_the_axes_over_hosts_equals_an_enumeration() -> None:
    for seed in OVER_HOSTS_SEEDS:
        compare(seed, HOSTS)


def test_deep_1f1b_is_proven_quickly() -> None:
    # A pinned depth leaves nothing but splits of stages that hardly differ.
    model = fit(planted.profile(gpus=4, work=planted.workload(48, 4096)))
    found = searched(model, 32, 1 << 50, Pins(pp=16, schedule="1f1b"))
    assert found.max_gap == 0.0
    assert found.best.choice.step_s == pytest.approx(found.pareto[0].choice.step_s, rel=RELATIVE)


@pytest.mark.slow
def test_runners_up_are_the_next_best_settings() -> None:
    for seed in range(5):
        model, gpus, _ = instance(seed)
        best: dict[tuple[object, ...], float] = {}
        for plan in Oracle(model.canonical()).plans(gpus):
            key = (plan.pp, plan.dp, plan.cp, plan.count, plan.schedule, plan.recompute, plan.context)
            best[key] = min(best.get(key, float("inf")), plan.step_s)
        found = searched(model, gpus, 1 << 50)
        steps = [item.choice.step_s for item in (found.best, *found.runners_up)]
        assert steps == pytest.approx(sorted(best.values())[:4], rel=2 * RELATIVE), seed


def test_the_forecast_of_the_pick_is_what_the_search_promised() -> None:
    for seed in range(15):
        model, gpus, _ = instance(seed)
        found = searched(model, gpus, 1 << 50)
        for item in (found.best, *found.runners_up, *found.pareto):
            forecast = Predictor(model, model.workload).forecast(item.setting, item.choice.split)
            assert forecast.step_s == pytest.approx(item.choice.step_s, rel=2 * RELATIVE)
            assert forecast.peak_bytes == item.choice.peak_bytes


@pytest.mark.slow
def test_the_named_minimum_is_right_to_one_mib() -> None:
    for seed in range(NUM_LIMITS):
        check_named_limit(seed)


def least_limit(model: CostModel, gpus: int, pins: Pins) -> int:
    """The smallest limit that fits, as an infeasible search names it."""
    with pytest.raises(MgraphError) as caught:
        searched(model, gpus, MIB, pins)
    return int(str(caught.value.details["minimum_bytes"]))


def way_out(model: CostModel, gpus: int, mem_bytes: int, pins: Pins) -> str:
    """What the sentence of an infeasible search says after the smallest limit."""
    with pytest.raises(MgraphError) as caught:
        searched(model, gpus, mem_bytes, pins)
    assert caught.value.exit_code == EXIT_INFEASIBLE
    _, _, rest = caught.value.message.partition("the smallest limit that fits is --mem ")
    return rest.partition("MiB")[2]


def test_an_infeasible_search_names_the_pins_to_loosen() -> None:
    model = planted_model()
    free, stored = least_limit(model, 4, Pins()), least_limit(model, 4, Pins(recompute="none"))
    assert free < stored
    assert way_out(model, 4, free, Pins(recompute="none")) == ", and a plan fits without --recompute none"
    # A pin is named alone where the plans of the others fit; both are where either is one too many.
    both, spread = Pins(cp=4, recompute="none"), least_limit(model, 4, Pins(cp=4))
    assert free < stored < spread < least_limit(model, 4, both)
    assert way_out(model, 4, spread, both) == ", and a plan fits without --cp 4 or without --recompute none"
    assert way_out(model, 4, spread - 1, both) == ", and a plan fits without --cp 4"
    assert way_out(model, 4, stored - 1, both) == ", and a plan fits without --cp 4 --recompute none"


def test_an_infeasible_search_without_pins_names_more_workers_where_they_help() -> None:
    model = planted_model()
    four, eight = least_limit(model, 4, Pins()), least_limit(model, 8, Pins())
    assert eight < four
    assert way_out(model, 4, eight, Pins()) == ", and a plan fits on --gpus 8"
    assert way_out(model, 4, eight - 1, Pins()) == ""
    # What one worker measured says nothing of two.
    alone = fit(planted.profile(gpus=1))
    assert way_out(alone, 1, MIB, Pins()) == ""


class OutOfWork:
    """A candidate of two plans that runs out of work only where the limit leaves no room for the faster one."""

    def __init__(self) -> None:
        self.setting = Setting(ParallelDims(pp=1, dp=1, cp=1), 1, "gpipe")
        self.max_gap = 0.0
        self.plans = ((100, Choice(1.0, 100, (2,))), (50, Choice(2.0, 50, (1,))))

    def num_splits(self) -> int:
        return len(self.plans)

    def num_within(self, need_bytes: int) -> int:
        return sum(need <= need_bytes for need, _ in self.plans)

    def least_need(self) -> int:
        return 50

    def need_of(self, split: Split) -> int:
        return next(need for need, choice in self.plans if choice.split == split)

    def quick_bound(self, need_bytes: int) -> float:
        return min((choice.step_s for need, choice in self.plans if need <= need_bytes), default=math.inf)

    def fastest(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        self.max_gap = max(self.max_gap, 0.25 if need_bytes < 100 else 0.0)
        return next((choice for need, choice in self.plans if need <= need_bytes and choice.step_s < cutoff_s), None)

    def leanest(self, choice: Choice, need_bytes: int) -> Choice:  # noqa: ARG002
        return choice


def test_the_gap_is_that_of_the_front_too() -> None:
    found = search_candidates([OutOfWork()], 100, 0, 0)
    assert [item.choice.step_s for item in found.pareto] == [1.0, 2.0]
    assert found.max_gap == 0.25


@pytest.mark.slow
def test_pins_only_remove_plans() -> None:
    for seed in range(6):
        model, gpus, rng = instance(seed)
        free = searched(model, gpus, 1 << 50)
        plan = rng.choice(list(Oracle(model.canonical()).plans(gpus)))
        way = {"recompute": plan.recompute, "context": plan.context}
        pins = Pins(plan.pp, plan.cp, plan.dp, plan.count, plan.schedule, layers=plan.split, **way)
        pinned = searched(model, gpus, 1 << 50, pins)
        assert pinned.num_candidates == 1
        assert pinned.best.choice.split == plan.split
        assert pinned.best.choice.step_s == pytest.approx(plan.step_s, rel=RELATIVE)
        assert pinned.best.choice.step_s >= free.best.choice.step_s * (1 - 2 * RELATIVE)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0))
def test_more_memory_never_makes_the_step_slower(seed: int, share: float) -> None:
    model, gpus, _ = instance(seed)
    least = min(item.choice.peak_bytes for item in searched(model, gpus, 1 << 50).pareto)
    most = searched(model, gpus, 1 << 50)
    margin = 1 + model.terms["margin"]["relative"]
    floor = int(least * margin) + 1 + model.machine.overhead_bytes
    tight = searched(model, gpus, floor + int(share * most.best.choice.peak_bytes))
    assert tight.best.choice.step_s >= most.best.choice.step_s * (1 - 2 * RELATIVE)
    assert tight.num_feasible <= most.num_feasible


@pytest.mark.parametrize(("layers", "gpus", "least_plans"), [(96, 64, 10**25), (32, 1024, 10**10)])
def test_a_large_search_is_proven_and_counts_every_plan(layers: int, gpus: int, least_plans: int) -> None:
    model = fit(planted.profile(gpus=4, work=planted.workload(layers, 8192)))
    found = searched(model, gpus, 1 << 50)
    assert found.max_gap == 0.0
    assert found.num_feasible == found.num_candidates > least_plans
    peaks = [item.choice.peak_bytes for item in found.pareto]
    steps = [item.choice.step_s for item in found.pareto]
    assert peaks == sorted(set(peaks), reverse=True)
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("gpus", "pins", "words"),
    [
        (0, Pins(), "--gpus 0"),
        (4097, Pins(), "--gpus 4097"),
        (2, Pins(pp=3), "--pp 3"),
        (4, Pins(cp=3), "--cp 3 does not divide"),
        (4, Pins(dp=-1), "--dp -1"),
        (4, Pins(num_microbatches=9999), "--microbatches 9999"),
        (4, Pins(pp=4, num_microbatches=2, schedule="1f1b"), "1f1b needs"),
        (4, Pins(pp=2, cp=1, dp=1), "leaves no plan"),
        (2, Pins(layers=(1, 2)), "adds up to 3"),
        (2, Pins(layers=(4, 0)), "without a layer"),
        (1, Pins(schedule="1f1b"), "1f1b needs"),
        (4093, Pins(), "cannot be cut"),
    ],
)
def test_pins_that_cannot_be_exit_2(gpus: int, pins: Pins, words: str) -> None:
    model = planted_model()
    with pytest.raises(MgraphError) as caught:
        searched(model, gpus, 1 << 50, pins)
    assert caught.value.exit_code == 2
    assert words in caught.value.message


def test_what_was_never_measured_names_the_call_that_measures_it(tmp_path: Path) -> None:
    model = fit(planted.profile(gpus=1))
    assert searched(model, 1, 1 << 50).num_feasible > 0
    with pytest.raises(MgraphError) as caught:
        searched(model, 2, 1 << 50)
    assert caught.value.exit_code == 4
    assert "mgraph profile --dataset demo --device cpu --gpus 2" in caught.value.message
