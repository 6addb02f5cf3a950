"""The search beside an enumeration that shares no code with it, on random instances."""

from __future__ import annotations

import random

import pytest

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import SearchResult, candidates_of, search, search_candidates
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_INFEASIBLE, MgraphError
from megagraph_cli.units import MIB, ceil_mib
from tests.cost.instances import random_cost_model
from tests.cost.oracle import Answer, Oracle

RELATIVE = 1e-9
"""Both sides sum at most some hundred float64 terms; 1e-9 is far above that and the search's own tolerance."""
ROUNDED_BYTES = 64
"""Terms are rounded up to bytes, some of them before they count once for each micro-batch in flight: no limit lies
that near to a need."""
SHORT, LONG, HOSTS = "short", "long", "hosts"
"""Kinds of instances: LONG have 24 layers on up to 4 stages or 12 on up to 8, HOSTS are spread over 2 or 4 hosts."""
OVER_HOSTS = ((6, 4, 6, 2), (7, 4, 8, 2), (6, 4, 8, 4), (4, 6, 12, 2), (5, 8, 8, 2), (5, 8, 8, 4))
"""(layers, workers, batch, hosts); of 6 workers on two hosts an axis of 3 lies across unevenly."""
SHARES = (0.0, 0.02, 0.1, 0.3, 1.0)
"""Memory limits by the share of plans that fit: the leanest alone, few, all."""


def instance(seed: int, kind: str = SHORT) -> tuple[CostModel, int, random.Random]:
    """A random cost model, workers, and the generator for what else the instance needs."""
    rng = random.Random(seed)
    if kind == LONG:
        layers, gpus, batch = rng.choice([(24, 4, 4), (12, 8, 8)])
        return random_cost_model(rng, layers, batch), gpus, rng
    if kind == HOSTS:
        layers, gpus, batch, hosts = rng.choice(OVER_HOSTS)
        return random_cost_model(rng, layers, batch, hosts), gpus, rng
    layers, gpus = rng.choice([(12, 4), (9, 4), (7, 3), (8, 8), (11, 4), (5, 2), (6, 4), (8, 4)])
    batch = rng.choice([8, 12] if gpus == 8 else [6, 7, 8, 12])
    return random_cost_model(rng, layers, batch), gpus, rng


def searched(model: CostModel, gpus: int, mem_bytes: int, pins: Pins | None = None) -> SearchResult:
    return search(Predictor(model, model.workload), gpus, mem_bytes, pins or Pins(), 3)


def front_of(plans: list[Answer]) -> list[tuple[float, int]]:
    """Non-dominated (step, peak) of enumerated plans, fastest first; times within rounding are one."""
    front: list[tuple[float, int]] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.peak)):
        if front and plan.peak >= front[-1][1]:
            continue
        if front and plan.step_s <= front[-1][0] * (1 + 2 * RELATIVE):
            front[-1] = (front[-1][0], plan.peak)
        else:
            front.append((plan.step_s, plan.peak))
    return front


def compare(seed: int, kind: str = SHORT) -> None:
    """Optimum, peak, counts and the whole front of one instance under a random limit."""
    model, gpus, rng = instance(seed, kind)
    plans = list(Oracle(model.canonical()).plans(gpus))
    needs = sorted(plan.need for plan in plans)
    limit = needs[int((len(needs) - 1) * rng.choice(SHARES))] + ROUNDED_BYTES
    within = [plan for plan in plans if plan.need <= limit]
    found = searched(model, gpus, limit)
    best = min(plan.step_s for plan in within)
    assert found.best.choice.step_s == pytest.approx(best, rel=2 * RELATIVE), seed
    fewest = min(plan.peak for plan in within if plan.step_s <= best * (1 + RELATIVE))
    assert abs(found.best.choice.peak_bytes - fewest) <= ROUNDED_BYTES, seed
    assert (found.num_candidates, found.num_feasible) == (len(plans), len(within)), seed
    front = front_of(within)
    peaks = [peak for _, peak in front]
    assert [item.choice.peak_bytes for item in found.pareto] == pytest.approx(peaks, rel=0, abs=ROUNDED_BYTES), seed
    steps = [step_s for step_s, _ in front]
    assert [item.choice.step_s for item in found.pareto] == pytest.approx(steps, rel=3 * RELATIVE), seed
    assert found.max_gap == 0.0, seed


def check_named_limit(seed: int) -> None:
    """The limit that an infeasible search names is the smallest that fits: to the byte, and in MiB as it is said."""
    model, gpus, _ = instance(seed)
    predictor = Predictor(model, model.workload)
    candidates = candidates_of(predictor, gpus, Pins())

    def under(limit: int) -> SearchResult:
        return search_candidates(candidates, limit, predictor.overhead_bytes, 0)

    with pytest.raises(MgraphError) as caught:
        under(MIB)
    assert caught.value.exit_code == EXIT_INFEASIBLE
    minimum = caught.value.details["minimum_bytes"]
    assert isinstance(minimum, int)
    named = ceil_mib(minimum)
    assert f"--mem {named}MiB" in caught.value.message, seed
    for limit, below in ((named * MIB, (named - 1) * MIB), (minimum, minimum - 1)):
        assert under(limit).num_feasible >= 1, seed
        with pytest.raises(MgraphError):
            under(below)
