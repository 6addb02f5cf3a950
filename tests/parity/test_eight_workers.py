"""Plans of eight workers, and the proof that parity would notice a wrong backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.runtime.build import Order
from tests.parity.cases import Case, orders
from tests.parity.judge import DEADLINE_S, STEP_TOLERANCE, Alone, all_complaints, complaints, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("size", [8])
def test_every_plan_trains_the_same_model(size: int, graph_path: Path, dataset: str, alone: Alone) -> None:
    cases = [Case(order, dtype) for order in orders(size) for dtype in STEP_TOLERANCE]
    found = all_complaints(cases, run(size, graph_path, dataset, cases), alone)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("order", orders(8)[:2], ids=lambda order: f"{sum(order.layers_per_stage)} layers")
def test_the_bias_matters_here(order: Order, alone: Alone) -> None:
    """Otherwise parity would prove nothing about it: its weights' gradients are of the size of the others'."""
    gradients = alone(Case(order, "float64")).gradients
    largest = max(float(np.abs(g).max()) for g in gradients.values())
    for name, gradient in gradients.items():
        if name.endswith("bias_weight") or name in ("token_bias", "embedding.tokens"):
            assert float(np.abs(gradient).max()) > 1e-6 * largest, name


@pytest.mark.parametrize(
    ("fault", "dims", "split"),
    [
        ("columns", ParallelDims(1, 1, 2), (3,)),
        ("tokens", ParallelDims(2, 1, 1), (1, 2)),
        ("doubled", ParallelDims(1, 2, 1), (3,)),
    ],
)
def test_a_broken_backend_is_noticed(
    fault: str,
    dims: ParallelDims,
    split: tuple[int, ...],
    graph_path: Path,
    dataset: str,
    alone: Alone,
) -> None:
    case = Case(Order(dims, AXES, split, 2, "gpipe"), "float64", fault)
    (got,) = run(2, graph_path, dataset, [case])
    found = complaints(case, got, alone(case))
    assert any("gradient of" in line for line in found), found
    assert any("loss" in line or "norm" in line for line in found), found
