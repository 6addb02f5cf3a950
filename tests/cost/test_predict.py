"""Forecasts: exact static bytes, phases, and growth with every size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph_cli.cost.explain import cost_of
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.memory import messages_down
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting, role_of
from megagraph_cli.cost.touched import Touched
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.layout import halves
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.layout.schedules import SCHEDULES
from tests.cost import planted
from tests.cost.fitted import planted_model


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(planted_model(), planted.workload(12, 256))


def test_weights_gradients_and_moments_are_exact(predictor: Predictor) -> None:
    forecast = predictor.forecast(Setting(ParallelDims(2, 1, 1), 4, "gpipe"), (5, 7))
    counts = predictor.workload.parameters()
    for stage, held in enumerate((5, 7)):
        size = 4 * counts.of_stage(held, first=stage == 0, last=stage == 1)
        terms = forecast.stages[stage].memory_bytes
        assert (terms["parameters"], terms["gradients"], terms["optimizer"]) == (size, size, 2 * size)


def test_messages_posted_ahead_and_leaving_are_held() -> None:
    """As ``parallel/pipeline.py`` holds them, in every schedule, whichever way its stages get ahead of each other."""
    for name, schedule in SCHEDULES.items():
        for pp, count in itertools.product((2, 3, 5), (1, 2, 3, 4, 5, 6, 9)):
            if count < schedule.min_microbatches(pp):
                continue
            for stage in range(1, pp):
                most = {"forward": 0, "backward": 0}
                in_use = leaving = begun = 0
                for kind, _ in schedule.order(stage, pp, count):
                    if kind == "forward":
                        begun, in_use = begun + 1, in_use + 1
                    else:
                        leaving = min(leaving, 1)
                    held = in_use + leaving + (begun < count)
                    # Phases are those in which all activations are held; else there are fewer of these, each larger.
                    if in_use == schedule.in_flight(stage, pp, count):
                        most[kind] = max(most[kind], held)
                    if kind == "backward":
                        in_use, leaving = in_use - 1, leaving + 1
                for kind, least in most.items():
                    assert messages_down(schedule.in_flight(stage, pp, count), count, kind) == least, (name, pp, count)  # type: ignore[arg-type]


def test_boundary_bytes_are_those_of_the_largest_phase(predictor: Predictor) -> None:
    forecast = predictor.forecast(Setting(ParallelDims(3, 1, 1), 8, "1f1b"), (4, 4, 4))
    x_bytes = (256 // 8) * 17 * 32 * 4
    held = [stage.memory_bytes["boundary"] // x_bytes for stage in forecast.stages]
    # In a backward: x in flight (2 on stage 1, 1 on stage 2), the next x, a gradient leaving; two gradients coming.
    assert held == [2, 2 + 1 + 1 + 2, 1 + 1 + 1]
    assert all(stage.memory_bytes["boundary"] % x_bytes == 0 for stage in forecast.stages)


def with_table(predictor: Predictor, nodes: int, **terms: dict[str, float]) -> Predictor:
    """The predictor of the same workload with a table of so many nodes (and 200 clusters) beside the features."""
    work = predictor.workload
    assert work.graph is not None
    graph = work.graph.model_copy(update={"nodes": nodes})
    model = work.model.model_copy(update={"embedding": "both"})
    cost_model = predictor.cost_model.model_copy(update={"terms": {**predictor.terms, **TOUCHED, **terms}})
    return Predictor(cost_model, work.model_copy(update={"graph": graph, "model": model}))


TRUTH = planted.Planted()
TOUCHED = {
    "touched_merge_s": {"sum": TRUTH.merge_sum_s, "call": TRUTH.merge_call_s, "bytes": TRUTH.merge_byte_s},
    "touched_update_s": {"step": TRUTH.update_step_s, "call": TRUTH.update_call_s, "bytes": TRUTH.update_byte_s},
}
"""What a profile of the workload with a table tells beside the rest."""


def test_a_table_has_no_gradient_of_its_size(predictor: Predictor) -> None:
    setting = Setting(ParallelDims(1, 2, 1), 1, "gpipe")
    small, large = (with_table(predictor, nodes).forecast(setting, (12,)) for nodes in (10**6, 10**7))
    # Two moments, and for each row how often it was updated.
    for term, row_bytes in (("parameters", 32 * 4), ("gradients", 0), ("optimizer", 2 * 32 * 4 + 4)):
        more = large.stages[0].memory_bytes[term] - small.stages[0].memory_bytes[term]
        assert more == 9 * 10**6 * row_bytes, term
    # Of some two thousand rows a few are looked up twice in the smaller one.
    assert small.step_s <= large.step_s <= small.step_s * (1 + 1e-3)


def test_the_touched_rows_of_a_table_are_gathered(predictor: Predictor) -> None:
    """Three replicas of 86 targets look up 16 rows each, of more than there are chances to meet one twice."""
    truth, setting = planted.Planted(), Setting(ParallelDims(1, 3, 1), 1, "gpipe")
    first, layers = role_of(0, 1), np.array([12.0])
    seconds = [
        float(each.tail_parts(setting, first, layers)["reduction"][0])
        for each in (predictor, with_table(predictor, 10**9))
    ]
    rows = 86 * 16
    expected = 2 * truth.reduce_hop_s + truth.reduce_byte_s * 4 / 3 * 8  # how many rows: one number
    # All ids at once; 1376 rows of 32 numbers are less than a piece.
    expected += 2 * 2 * truth.join_hop_s + truth.join_byte_s * 2 / 3 * 3 * rows * (8 + 32 * 4)
    assert seconds[1] - seconds[0] == pytest.approx(expected, rel=1e-3)


def test_what_a_step_does_to_its_touched_rows_is_in_its_time(predictor: Predictor) -> None:
    """Of 10^9 rows none is looked up twice: 32 numbers of four bytes each. Half of them are one piece."""
    table, layers, row = with_table(predictor, 10**9), np.array([12.0]), 32 * 4
    for dp, count, calls, sums in ((1, 4, 0, 1), (2, 2, 2, 2)):
        setting, first = Setting(ParallelDims(1, dp, 1), count, "gpipe"), role_of(0, 1)
        plain, more = (each.tail_parts(setting, first, layers) for each in (predictor, table))
        assert plain.keys() == more.keys() - {"touched"}
        # Its weights are those of the table too, but these are not updated with the others.
        assert more["optimizer"][0] == pytest.approx(plain["optimizer"][0], rel=1e-12)
        rows = 256 * 16  # of all replicas together
        merged = sums * TRUTH.merge_sum_s + calls * TRUTH.merge_call_s + (dp > 1) * TRUTH.merge_byte_s * rows * row
        # 4096 rows of 32 numbers: two pieces.
        updated = TRUTH.update_step_s + 2 * TRUTH.update_call_s + TRUTH.update_byte_s * rows * row
        assert float(more["touched"][0]) == pytest.approx(merged + updated, rel=1e-4)
        backward = table.pass_parts("backward_s", setting, first, layers)
        one = TRUTH.merge_call_s + TRUTH.merge_byte_s * 64 * 16 * row
        assert float(backward["merge"][0]) == pytest.approx(one, rel=1e-4)
        assert float(table.pass_parts("forward_s", setting, first, layers)["merge"][0]) == 0.0
        cost = cost_of(table, setting, (12,))
        assert cost.stages[0].time_s["merging"] == pytest.approx(count * one, rel=1e-4)
        assert cost.stages[0].time_s["touched"] == float(more["touched"][0])
        assert sum(cost.stages[0].time_s.values()) == pytest.approx(table.step_s(setting, (12,)), rel=1e-9)
    last = table.tail_parts(Setting(ParallelDims(2, 1, 1), 4, "gpipe"), role_of(1, 2), layers)
    assert "touched" not in last


@pytest.mark.parametrize("quantity", ["touched_merge_s", "touched_update_s"])
def test_touched_rows_that_were_never_measured_are_missed_by_every_plan_with_a_table(
    predictor: Predictor, quantity: str
) -> None:
    table = with_table(predictor, 10**6)
    terms = {name: values for name, values in table.terms.items() if name != quantity}
    older = replace(table, cost_model=table.cost_model.model_copy(update={"terms": terms}), _known={})
    with pytest.raises(MgraphError, match=rf"{quantity}.*`mgraph profile --dataset demo .*`, then fit") as caught:
        older.forecast(Setting(ParallelDims(1, 1, 1), 1, "gpipe"), (12,))
    assert caught.value.exit_code == EXIT_STALE


def test_a_gather_that_was_never_measured_is_missed_by_who_needs_it_alone(predictor: Predictor) -> None:
    terms = {name: values for name, values in predictor.terms.items() if name != "all_gather_s"}
    older = Predictor(predictor.cost_model.model_copy(update={"terms": terms}), predictor.workload)
    spread, staged = Setting(ParallelDims(1, 2, 1), 1, "gpipe"), Setting(ParallelDims(2, 1, 1), 1, "gpipe")
    older.forecast(spread, (12,))
    table = with_table(older, 10**6)
    table.forecast(staged, (6, 6))
    with pytest.raises(MgraphError, match=r"all_gather_s.*`mgraph profile --dataset demo .*--gpus 4`") as caught:
        table.forecast(spread, (12,))
    assert caught.value.exit_code == EXIT_STALE


def test_touched_rows_are_held_once_and_what_is_made_of_them_piece_by_piece() -> None:
    alone, few, many = (Touched(300, sharers, 1000, 32, 4) for sharers in (1, 3, 4))
    row = 32 * 4 + 8
    for each, summed in ((alone, 300), (few, 900), (many, 1000)):
        assert (each.passing_bytes, each.summed_bytes) == (300 * row, summed * row)
    assert (alone.gathers, alone.gathered_bytes, alone.exchange_bytes) == (0, 0, 0)
    assert (few.gathers, few.gathered_bytes) == (1, 3 * 300 * 32 * 4)
    assert few.exchange_bytes == 300 * row + 3 * 300 * 8 + 3 * 3 * 300 * 32 * 4
    assert alone.update_bytes == 300 * (4 * 32 * 4 + 40)
    # 300 rows of 10,000 numbers are 46 pieces of 65,536 and more: seven rows in each.
    wide = Touched(300, 4, 1000, 10_000, 4)
    assert (wide.gathers, wide.gathered_bytes) == (46, 4 * 7 * 10_000 * 4)
    assert wide.update_bytes == 16 * (4 * 10_000 * 4 + 40) + 2 * wide.gathered_bytes  # a 64th of 1000 rows
    # On cuda in one piece, of which nothing is copied aside.
    whole = replace(wide, device="cuda")
    assert (whole.gathers, whole.gathered_bytes, whole.late_bytes) == (1, 4 * 300 * 10_000 * 4, 0)
    assert whole.exchange_bytes == 300 * (40_000 + 8) + 4 * 300 * 8 + whole.gathered_bytes
    assert whole.update_bytes == 334 * (4 * 10_000 * 4 + 40)  # a third of 1000 rows
    nothing = Touched()
    assert (nothing.passing_bytes, nothing.summed_bytes, nothing.exchange_bytes, nothing.update_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("dims", [ParallelDims(1, 1, 1), ParallelDims(1, 4, 1), ParallelDims(2, 2, 1)], ids=str)
def test_a_peak_is_its_largest_phase_whatever_touches_the_table(predictor: Predictor, dims: ParallelDims) -> None:
    """The peak that the search weighs is the one that the plan tells of, term by term."""
    phases = set()
    for nodes, work in itertools.product((10**3, 10**8), (predictor.workload, planted.workload(12, 2**15))):
        table = with_table(replace(predictor, workload=work, _known={}, _sizes={}), nodes)
        for count in (1, 64, 4096):
            setting = Setting(dims, count, "gpipe")
            memory = table.memory(setting, role_of(0, dims.pp), np.array([1.0]))
            terms = memory.at_peak(count, 1)
            assert terms["touched"] > 0
            assert memory.peak(count, 1).tolist() == [sum(terms.values())]
            phases.add("activations" in terms)
    assert phases == {True, False}


def test_a_ring_that_works_in_halves_holds_the_gradients_of_the_first_to_the_end(predictor: Predictor) -> None:
    """2 (b / 2) R numbers of four bytes for each of d = 32 dimensions and as many more: 4 heads are computed as 8."""

    def backward(context: str, cp: int = 2) -> float:
        setting = Setting(ParallelDims(3, 1, cp), 8, "gpipe", context=context)
        fresh = Predictor(predictor.cost_model, predictor.workload)
        return float(fresh.memory(setting, role_of(1, 3), np.array([2.0])).backward[0])

    ways = (("ring", 2), ("allgather", 2), ("ring", 1))
    size = predictor.size(Setting(ParallelDims(3, 1, 2), 8, "gpipe"))
    pairs = size.microbatch * size.rows**2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "PAIRS_TO_HALVE", pairs + 1)
        whole = [backward(*way) for way in ways]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "PAIRS_TO_HALVE", pairs)
        halved = [backward(*way) for way in ways]
    held = 2 * (size.microbatch // 2) * size.rows * 2 * 32 * 4
    assert [more - less for more, less in zip(halved, whole, strict=True)] == [held, 0, 0]


def test_1f1b_holds_fewer_micro_batches_on_late_stages(predictor: Predictor) -> None:
    split = (4, 4, 4)
    held = {
        name: [
            stage.memory_bytes["activations"]
            for stage in predictor.forecast(Setting(ParallelDims(3, 1, 1), 8, name), split).stages
        ]
        for name in ("gpipe", "1f1b")
    }
    # In flight: 8 of 8 under GPipe; 3, 2 and 1 under 1F1B. Rounding up leaves a byte.
    for stage, in_flight in enumerate((3, 2, 1)):
        assert held["1f1b"][stage] == pytest.approx(held["gpipe"][stage] * in_flight / 8, abs=1)


def test_the_peak_is_the_largest_stage_and_the_margin_its_share(predictor: Predictor) -> None:
    forecast = predictor.forecast(Setting(ParallelDims(2, 2, 1), 4, "gpipe"), (6, 6))
    sums = [sum(stage.memory_bytes.values()) for stage in forecast.stages]
    assert forecast.peak_bytes == max(sums)
    assert forecast.margin_bytes == predictor.margin_bytes(max(sums))
    assert forecast.overhead_bytes == planted.Planted().overhead_bytes


def test_an_epoch_is_its_steps(predictor: Predictor) -> None:
    forecast = predictor.forecast(Setting(ParallelDims(1, 1, 1), 1, "gpipe"), (12,))
    assert forecast.epoch_s == pytest.approx(5 * forecast.step_s, rel=1e-12)  # 1200 targets in batches of 256


def test_the_planted_truth_is_the_forecast(predictor: Predictor) -> None:
    truth = planted.Planted()
    forecast = predictor.forecast(Setting(ParallelDims(1, 1, 1), 4, "gpipe"), (12,))
    b, rows = 64, 17
    layers = truth.forward_s("layer", 11, b, rows, 1) + truth.forward_s("last_layer", 1, b, rows, 1)
    layers -= truth.stage_call_s + truth.stage_row_s * b * rows  # one stage, one pass
    one = layers + truth.forward_s("input", 0, b, rows, 1) + truth.forward_s("head", 0, b, rows, 1)
    size = 4 * predictor.workload.parameters().of_model(12)
    expected = 4 * one * (1 + truth.backward_factor) + truth.optimizer_call_s + truth.optimizer_byte_s * size
    expected += 256 * (truth.construct_target_s + truth.gather_target_s)  # the cores that compute build the batch
    assert forecast.step_s == pytest.approx(expected, rel=1e-6)


def test_a_starved_step_waits_for_its_batch() -> None:
    slow = planted.Planted(construct_target_s=1.0)
    work = planted.workload(4, 256)
    model = fit(planted.profile(slow, work=work))
    model = model.model_copy(update={"machine": model.machine.model_copy(update={"device": "cuda"})})
    forecast = Predictor(model, work).forecast(Setting(ParallelDims(1, 2, 1), 1, "gpipe"), (4,))
    assert forecast.step_s == pytest.approx(128 * (1.0 + slow.gather_target_s), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(1, 6), cp=st.integers(1, 4), count=st.sampled_from([6, 8, 12]), one=st.booleans())
def test_every_table_grows_with_layers(pp: int, cp: int, count: int, one: bool) -> None:
    predictor = Predictor(planted_model(), planted.workload(12, 256))
    schedule = "1f1b" if one and pp > 1 else "gpipe"
    tables = predictor.tables(Setting(ParallelDims(pp, 1, cp), count, schedule))
    for group in (tables.forward_s, tables.backward_s, tables.tail_s, tables.peak_bytes, tables.need_bytes):
        for values in group:
            assert np.all(np.diff(np.asarray(values, dtype=float)) >= 0)
    slopes = [float(values[1] - values[0]) for values in tables.forward_s if len(values) > 1]
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(held=st.integers(1, 10), count=st.sampled_from([4, 8]), batch=st.sampled_from([64, 128, 256]))
def test_larger_batches_take_longer_and_more(held: int, count: int, batch: int) -> None:
    model = planted_model()
    setting = Setting(ParallelDims(2, 1, 1), count, "1f1b")
    small = Predictor(model, planted.workload(12, batch)).forecast(setting, (held, 12 - held))
    large = Predictor(model, planted.workload(12, 2 * batch)).forecast(setting, (held, 12 - held))
    assert large.step_s > small.step_s
    assert large.peak_bytes > small.peak_bytes
