"""Bytes that follow a rule of their own, planted and found again: moments, gathered rows, rows drawn twice, halves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from megagraph_cli.artifacts.profile import ComputeSample, Profile
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.floors import Sample, fit_moments, with_floor
from megagraph_cli.cost.size import Size
from megagraph_cli.layout import halves
from tests.cost import planted
from tests.cost.fitted import EXACT


def test_bytes_of_two_moments_are_told_apart() -> None:
    # 4 MB of weights' gradients, less 1000 bytes a row, until 3000 bytes a row are more: from 1000 rows on.
    sizes = [Size(microbatch=b, rows=10) for b in (5, 20, 50, 150, 400, 800)]
    samples = [
        Sample({"head.call": 1.0, "head.rows": size.tokens}, size, max(3e3 * size.tokens, 4e6 - 1e3 * size.tokens))
        for size in sizes
    ]
    growing, floors = fit_moments(samples)
    assert growing["head.rows"] == pytest.approx(3e3, rel=EXACT)
    assert floors == pytest.approx({"head.call": 4e6, "head.less_rows": 1e3}, rel=EXACT)
    for size, sample in zip(sizes, samples, strict=True):
        value = sum(growing[name] * regressor for name, regressor in sample.regressors.items())
        terms = {"backward_floor_bytes": floors}
        both = with_floor(terms, "backward_transient_bytes", "head", size, value)
        assert both == pytest.approx(sample.value, rel=EXACT)


def test_a_single_moment_has_no_floor() -> None:
    terms = fit(planted.profile()).terms
    assert terms["forward_floor_bytes"] == terms["backward_floor_bytes"] == {}


def gathered(profile: Profile, share: Callable[[int, int], float]) -> Profile:
    """The profile with ``share(cp, tokens)`` bytes more in the backward of gathered layers than in a ring's."""

    def changed(sample: ComputeSample) -> ComputeSample:
        if sample.module != "layer" or sample.context != "allgather":
            return sample
        peak = sample.memory["backward_peak"] + round(share(sample.cp, sample.microbatch_size * sample.rows))
        return sample.model_copy(update={"memory": sample.memory | {"backward_peak": peak}})

    return profile.model_copy(update={"compute": [changed(sample) for sample in profile.compute]})


def test_gathered_rows_grow_with_cp_also_where_one_degree_was_measured() -> None:
    """At cp = 2 alone a rank's own rows and all gathered ones are the same column: the growing one must win."""
    terms = fit(gathered(planted.profile(gpus=2), lambda cp, tokens: 400.0 * cp * tokens)).terms
    found = terms["backward_transient_bytes"]
    assert found["layer.allgather_own_rows"] == 0.0
    assert found["layer.allgather_rows"] == pytest.approx(400.0, rel=0.02)


def test_gathered_rows_and_own_ones_are_told_apart_by_two_degrees() -> None:
    terms = fit(gathered(planted.profile(gpus=4), lambda cp, tokens: (400.0 * cp + 900.0) * tokens)).terms
    found = terms["backward_transient_bytes"]
    got = found["layer.allgather_rows"], found["layer.allgather_own_rows"]
    assert got == pytest.approx((400.0, 900.0), rel=0.02)


@pytest.mark.parametrize("often", [0, 900])
def test_a_node_shown_twice_is_embedded_once(often: int) -> None:
    """Input bytes in proportion to the distinct rows that n even draws touch: of all V, and of an eighth of these.

    n counts the 16 rows of a sequence that are nodes and super nodes, not its global token.
    """
    profile = planted.profile(work=planted.workload(4, 1024))
    graph = profile.workload.graph
    assert graph is not None
    pool = 600
    small = graph.model_copy(update={"nodes": pool - graph.clusters})
    workload = profile.workload.model_copy(update={"graph": small})

    def changed(sample: ComputeSample) -> ComputeSample:
        if sample.module != "input":
            return sample
        draws = sample.microbatch_size * min(sample.rows, 16)
        distinct = 3000 * pool * (1 - math.exp(-draws / pool))
        distinct += often * pool / 8 * (1 - math.exp(-8 * draws / pool))
        return sample.model_copy(update={"memory": sample.memory | {"batch": round(distinct)}})

    compute = [changed(sample) for sample in profile.compute]
    found = fit(profile.model_copy(update={"workload": workload, "compute": compute})).terms["batch_bytes"]
    assert found["input.distinct"] == pytest.approx(3000, rel=0.01)
    assert found["input.often"] == pytest.approx(often, abs=30)
    assert found["input.rows"] == pytest.approx(0, abs=30)


def test_bytes_of_a_ring_in_halves_are_known_and_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 64 sequences of 9 rows on: dK and dV of 32 of them, 8 numbers for each of 8 heads (4, filled up)."""
    profile = planted.profile()
    held = 2 * 32 * 9 * 8 * 8 * 4

    def halved(sample: ComputeSample) -> ComputeSample:
        if (sample.module, sample.cp, sample.microbatch_size, sample.context) != ("layer", 2, 64, "ring"):
            return sample
        memory = sample.memory | {"backward_peak": sample.memory["backward_peak"] + held}
        return sample.model_copy(update={"memory": memory})

    compute = [halved(sample) for sample in profile.compute]
    assert compute != profile.compute
    plain = fit(profile)
    monkeypatch.setattr(halves, "PAIRS_TO_HALVE", 64 * 9 * 9)
    found = fit(profile.model_copy(update={"compute": compute}))
    name = "backward_transient_bytes"
    assert found.terms[name] == pytest.approx(plain.terms[name], rel=1e-9)
    assert found.terms["margin"] == pytest.approx(plain.terms["margin"], abs=1e-6)
    assert found.quality.memory.max_under == pytest.approx(plain.quality.memory.max_under, abs=1e-6)
