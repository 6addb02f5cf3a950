"""The search against an enumeration that shares no code with it, and its promises about limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import MgraphError
from megagraph_cli.units import MIB, ceil_mib
from tests.cost import planted
from tests.cost.exact import RELATIVE, compare, instance, searched
from tests.cost.fitted import planted_model
from tests.cost.oracle import Oracle

NUM_INSTANCES = 24
GROUPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_optimum_front_and_counts_equal_an_enumeration(group: int) -> None:
    # bench/search.py compares a thousand.
    for seed in range(group, NUM_INSTANCES, GROUPS):
        compare(seed)


@pytest.mark.parametrize("seed", [1000, 1001])
def test_long_models_and_deep_pipelines_equal_an_enumeration(seed: int) -> None:
    compare(seed)


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
    for seed in range(10):
        model, gpus, _ = instance(seed)
        with pytest.raises(MgraphError) as caught:
            searched(model, gpus, MIB)
        assert caught.value.exit_code == 3
        minimum = caught.value.details["minimum_bytes"]
        assert isinstance(minimum, int)
        named = ceil_mib(minimum)
        assert f"--mem {named}MiB" in caught.value.message
        assert searched(model, gpus, named * MIB).num_feasible >= 1, seed
        assert searched(model, gpus, minimum).num_feasible >= 1, seed
        with pytest.raises(MgraphError):
            searched(model, gpus, (named - 1) * MIB)
        with pytest.raises(MgraphError):
            searched(model, gpus, minimum - 1)


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


def test_a_large_search_is_proven_and_counts_every_plan() -> None:
    model = fit(planted.profile(gpus=4, work=planted.workload(96, 8192)))
    found = searched(model, 64, 1 << 50)
    assert found.max_gap == 0.0
    assert found.num_feasible == found.num_candidates > 10**25
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
