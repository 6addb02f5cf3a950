"""Fits of planted profiles: coefficients found again, held-out quality, determinism, missing terms."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from megagraph_cli.artifacts.profile import ComputeSample, Profile
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.measured import most_measured
from megagraph_cli.cost.regression import fit_coefficients
from megagraph_cli.cost.size import Size
from megagraph_cli.errors import MgraphError
from tests.cost import planted
from tests.cost.fitted import EXACT
from tests.cost.planted import Planted

WHOLE_BYTES = 2e-3
"""Planted bytes are rounded to whole ones: half a byte in a few hundred."""


def test_planted_time_coefficients_are_recovered() -> None:
    truth = Planted()
    terms = fit(planted.profile(truth)).terms
    forward = terms["forward_s"]
    expected = {
        "layer.call": truth.layer_call_s,
        "layer.rows": truth.layer_row_s,
        "layer.ring_hop": truth.hop_s,
        "layer.ring_rows": truth.hop_row_s,
        "layer.allgather_hop": truth.gather_s,
        "layer.allgather_rows": truth.gather_row_s,
        "layer_full.call": truth.layer_call_s,
        "layer_full.rows": truth.layer_row_s,
        "layer_full.ring_hop": truth.hop_s,
        "layer_full.ring_rows": truth.hop_row_s,
        "layer_full.allgather_hop": truth.gather_s,
        "layer_full.allgather_rows": truth.gather_row_s,
        "last_layer_full.call": truth.last_call_s,
        "last_layer_full.rows": truth.last_row_s,
        "last_layer_full.ring_hop": truth.hop_s,
        "last_layer_full.ring_rows": truth.hop_row_s,
        "stage.call": truth.stage_call_s,
        "stage.rows": truth.stage_row_s,
        "last_layer.call": truth.last_call_s,
        "last_layer.rows": truth.last_row_s,
        "last_layer.ring_hop": truth.hop_s,
        "last_layer.ring_rows": truth.hop_row_s,
        "input.call": truth.input_call_s,
        "input.rows": truth.input_row_s,
        "head.call": truth.head_call_s,
        "head.targets": truth.head_target_s,
    }
    for name, value in expected.items():
        assert forward[name] == pytest.approx(value, rel=EXACT), name
        factor = truth.backward_factor + ("_full." in name)
        assert terms["backward_s"][name] == pytest.approx(factor * value, rel=EXACT), name
    for name in forward.keys() - expected.keys():
        assert forward[name] == pytest.approx(0.0, abs=1e-12), name
    assert terms["p2p_s"] == pytest.approx({"call": truth.p2p_call_s, "bytes": truth.p2p_byte_s}, rel=EXACT)
    assert terms["all_reduce_s"]["hop"] == pytest.approx(truth.reduce_hop_s, rel=EXACT)
    assert terms["all_reduce_s"]["bytes"] == pytest.approx(truth.reduce_byte_s, rel=EXACT)
    assert terms["all_gather_s"]["hop"] == pytest.approx(truth.join_hop_s, rel=EXACT)
    assert terms["all_gather_s"]["bytes"] == pytest.approx(truth.join_byte_s, rel=EXACT)
    assert terms["construct_s"]["targets"] == pytest.approx(truth.construct_target_s, rel=EXACT)
    assert terms["optimizer_s"]["optimizer.bytes"] == pytest.approx(truth.optimizer_byte_s, rel=EXACT)


@pytest.mark.parametrize("batch_size", [8, 256, 4096])
def test_planted_seconds_of_touched_rows_are_recovered(batch_size: int) -> None:
    """Whether all of them are one piece or many."""
    truth, work = Planted(), planted.workload(batch_size=batch_size, embedding="table")
    assert work.graph is not None
    work = work.model_copy(update={"graph": work.graph.model_copy(update={"nodes": 10**6})})
    terms = fit(planted.profile(truth, work=work)).terms
    merge = {"sum": truth.merge_sum_s, "call": truth.merge_call_s, "bytes": truth.merge_byte_s}
    update = {"step": truth.update_step_s, "call": truth.update_call_s, "bytes": truth.update_byte_s}
    # Bytes are whole, seconds are not: of few rows the constants are nearly all.
    assert terms["touched_merge_s"] == pytest.approx(merge, rel=1e-3)
    assert terms["touched_update_s"] == pytest.approx(update, rel=1e-3)


def test_a_profile_without_touched_rows_serves_workloads_without_a_table_alone() -> None:
    work = planted.workload(embedding="both")
    profile = planted.profile(work=work)
    without = profile.model_copy(update={"compute": [sample for sample in profile.compute if not sample.pieces]})
    assert "pieces" not in planted.profile().model_dump_json()
    assert not {"touched_merge_s", "touched_update_s"} & fit(planted.profile()).terms.keys()
    with pytest.raises(MgraphError, match="never measured the touched rows of the embedding table") as caught:
        fit(without)
    assert caught.value.exit_code == 4
    assert "mgraph profile --dataset demo" in caught.value.message


def test_planted_bytes_are_recovered() -> None:
    truth = Planted()
    terms = fit(planted.profile(truth)).terms
    assert terms["saved_bytes"]["layer.rows"] == pytest.approx(truth.layer_row_bytes, rel=WHOLE_BYTES)
    assert terms["saved_bytes"]["stage.channels"] == pytest.approx(truth.channel_score_bytes, rel=WHOLE_BYTES)
    assert terms["saved_bytes"]["head.targets"] == pytest.approx(truth.head_target_bytes, rel=WHOLE_BYTES)
    assert terms["forward_transient_bytes"]["layer.rows"] == pytest.approx(truth.working_row_bytes, rel=WHOLE_BYTES)


def test_quality_counts_held_out_samples_only_and_is_exact_on_exact_data() -> None:
    quality = fit(planted.profile()).quality
    for table in (quality.memory, quality.time):
        assert table.num_held_out > 20
        assert table.mape is not None
        assert table.mape < 1e-3
        assert table.r2 is not None
        assert table.r2 > 0.9999


def noisy(share: float, seed: int = 0) -> Profile:
    """A planted profile whose compute samples are off by up to a share."""
    return shaken(planted.profile(), share, seed)


def shaken(exact: Profile, share: float, seed: int) -> Profile:
    rng = random.Random(seed)

    def one(sample: ComputeSample) -> ComputeSample:
        factor = 1 + share * rng.uniform(-1, 1)
        memory = {
            name: value if name == "parameters" else round(value * factor) for name, value in sample.memory.items()
        }
        update = {"forward_s": sample.forward_s * factor, "backward_s": sample.backward_s * factor, "memory": memory}
        return sample.model_copy(update=update)

    return exact.model_copy(update={"compute": [one(sample) for sample in exact.compute]})


def test_margin_covers_the_worst_held_out_under_prediction() -> None:
    model = fit(noisy(0.05))
    assert model.quality.memory.max_under is not None
    under = model.quality.memory.max_under
    # max_under is a share of the measured, the margin of the predicted: p (1 + margin) = m for the worst sample.
    assert 1 / (1 + model.terms["margin"]["relative"]) <= 1 - under + 1e-5
    assert 0 < model.terms["margin"]["relative"] < 0.15
    assert fit(noisy(0.1)).terms["margin"]["relative"] > model.terms["margin"]["relative"]


def test_a_profile_too_small_to_hold_out_says_null_and_takes_its_margin_from_the_fit() -> None:
    whole = noisy(0.05)
    few = [s for s in whole.compute if s.cp == 1 and s.microbatch_size in (0, 4, 32) and s.num_layers in (0, 1, 2)]
    small = whole.model_copy(update={"compute": few, "comm": whole.comm[:2], "host": whole.host[:4]})
    model = fit(small)
    assert model.quality.memory.mape is None
    assert model.quality.memory.num_held_out == 0
    assert model.terms["margin"]["relative"] >= 0


def test_a_fit_is_a_function_of_its_samples_and_not_of_their_order() -> None:
    profile = noisy(0.05)
    mixed = list(profile.compute)
    random.Random(1).shuffle(mixed)
    again = profile.model_copy(update={"compute": mixed})
    assert json.dumps(fit(profile).canonical()) == json.dumps(fit(profile).canonical())
    assert fit(again).terms == fit(profile).terms
    assert fit(again).quality == fit(profile).quality


def test_out_of_memory_samples_are_left_out() -> None:
    profile = planted.profile()
    bad = profile.compute[0].model_copy(update={"out_of_memory": True, "forward_s": 1e9})
    assert fit(profile.model_copy(update={"compute": [*profile.compute, bad]})).terms == fit(profile).terms


@pytest.mark.parametrize("module", ["input", "layer", "last_layer", "head", "optimizer"])
def test_a_module_that_was_never_measured_is_named(module: str) -> None:
    profile = planted.profile()
    without = [sample for sample in profile.compute if sample.module != module]
    with pytest.raises(MgraphError, match="never measured") as caught:
        fit(profile.model_copy(update={"compute": without}))
    assert caught.value.exit_code == 4
    assert "mgraph profile --dataset demo" in caught.value.message


def test_small_samples_count_as_much_as_large_ones() -> None:
    # 1 ms + 1 us x bytes, and one large sample 20 % off: relative weights keep the constant within a few percent.
    sizes = [1.0, 10.0, 100.0, 1e6]
    rows = [{"call": 1.0, "bytes": size} for size in sizes]
    values = [1e-3 + 1e-6 * size for size in sizes]
    values[-1] *= 1.2
    found = fit_coefficients(rows, values)
    assert found["call"] == pytest.approx(1e-3, rel=0.05)


def test_coefficients_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    rows = [{"a": float(x), "b": 1.0} for x in range(1, 20)]
    found = fit_coefficients(rows, [max(0.0, 5.0 - 0.2 * x + float(rng.normal())) for x in range(1, 20)])
    assert min(found.values()) >= 0


def test_measured_range_is_the_largest_of_each() -> None:
    measured = fit(planted.profile(replace(Planted(), hop_s=1e-3), gpus=3)).measured
    assert (measured.gpus, measured.layers, measured.microbatch_size) == (3, 4, 64)
    assert measured.message_bytes == 4_194_304


def test_each_way_to_run_layers_has_its_own_measured_range() -> None:
    """Of 16 layers: 15 in a row for whole sequences run the plain way, 8 over ranks, 4 for every other way."""
    deep = Planted(cache_penalty=1.0, cache_break_layers=8)
    measured = fit(planted.profile(deep, gpus=3, work=planted.workload(16))).measured
    found = {(way.recompute, way.context, way.spread): way.layers for way in measured.ways}
    assert found == {
        ("none", "ring", False): 15,
        ("none", "ring", True): 8,
        ("full", "ring", False): 4,
        ("full", "ring", True): 4,
        ("none", "allgather", True): 4,
        ("full", "allgather", True): 4,
    }
    assert {way.microbatch_size for way in measured.ways} == {64}
    for size, layers in (
        (Size(layers=15), 15),
        (Size(layers=15, cp=2), 8),
        (Size(layers=15, recompute="full"), 4),
        (Size(layers=15, cp=3, context="allgather"), 4),
    ):
        assert most_measured(measured, size) == (layers, 64)


def test_where_memory_ran_out_no_larger_stage_is_said_to_be_measured() -> None:
    """2 layers with 32 sequences on each of 2 ranks ran out: so would more layers, more sequences, all their rows."""
    profile = planted.profile()
    changed = [
        sample.model_copy(update={"out_of_memory": True})
        if (sample.module, sample.num_layers, sample.cp, sample.recompute, sample.context, sample.microbatch_size)
        == ("layer", 2, 2, "none", "ring", 32)
        else sample
        for sample in profile.compute
        if (sample.module, sample.cp) != ("layer", 2)
        or (sample.recompute, sample.context) != ("none", "ring")
        or (sample.num_layers == 1 or (sample.num_layers == 2 and sample.microbatch_size <= 32))
    ]
    measured = fit(profile.model_copy(update={"compute": changed})).measured
    stage = Size(layers=2, microbatch=32, cp=2)
    for size, fits in (
        (stage, 16),
        (replace(stage, layers=7, microbatch=40), 16),
        (replace(stage, cp=1), 16),
        (replace(stage, layers=1), 64),
        (replace(stage, microbatch=31), 64),
        (replace(stage, cp=3), 64),
        (replace(stage, recompute="full"), 64),
    ):
        assert most_measured(measured, size)[1] == fits, size


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_planted_cache_break_is_recovered_from_the_sizes_that_a_profile_takes(noise: float) -> None:
    truth = Planted(cache_penalty=1.68, cache_break_layers=8)
    profile = planted.profile(truth, gpus=2, work=planted.workload(16))
    if noise:
        profile = shaken(profile, noise, seed=3)
    terms = fit(profile).terms
    assert terms["cache"]["cache_penalty"] == pytest.approx(1.68, rel=0.02)
    assert terms["cache"]["break_layers"] == terms["cache"]["cache_break_layers"] == 8
    if not noise:
        # Rows and scores (17 a row) of whole sequences are one column; only their sum is told.
        row_s = terms["forward_s"]["layer.rows"] + planted.SEQUENCE_ROWS * terms["forward_s"]["layer.scores"]
        assert row_s == pytest.approx(truth.layer_row_s, rel=0.02)
        assert terms["backward_s"]["layer.call"] == pytest.approx(2 * truth.layer_call_s, rel=0.02)


def test_noise_alone_makes_no_cache_break() -> None:
    deep = Planted(cache_penalty=1.0, cache_break_layers=8)
    for seed in range(3):
        assert "cache" not in fit(shaken(planted.profile(deep, gpus=2, work=planted.workload(16)), 0.05, seed)).terms
    assert "cache" not in fit(planted.profile()).terms


def test_modules_measured_at_one_size_do_not_widen_the_margin() -> None:
    """Nothing tells what a module needs at the only size that it was measured at: it is never left out."""
    profile = planted.profile()
    few = [sample for sample in profile.compute if sample.module != "input" or sample.microbatch_size == 64]
    whole = fit(profile).terms["margin"]["relative"]
    assert fit(profile.model_copy(update={"compute": few})).terms["margin"]["relative"] <= whole + 0.01
