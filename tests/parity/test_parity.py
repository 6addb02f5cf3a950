"""Every plan trains the same model as one worker, to the last digit that arithmetic allows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.runtime.build import TABLE, Order
from tests.parity.cases import SPLITS, Case, lean_orders, orders, table_orders
from tests.parity.runner import Outcome, run_cases
from tests.ranks import run_ranks

# float64: rounding of 1e-16 grows over 20 steps of lr 0.01; float32 starts at 6e-8.
STEP_TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
GRADIENT_TOLERANCE = 1e-9
ZERO_TOLERANCE = 1e-12
DEADLINE_S = 1500
"""Four workers run 74 plans; on a busy machine of two cores that takes a while."""

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


RAW = Path(os.environ.get("MGRAPH_DATA", "no-data"))
DATASET = "citeseer" if (RAW / "citeseer").is_dir() else "demo"
"""Citeseer where its files are at hand, else the built-in graph: the tests' names say which."""


@pytest.fixture(scope="module", params=[DATASET])
def dataset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def graph_path(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_graph(dataset, RAW, tmp_path_factory.mktemp("cache")).path


def run(size: int, graph_path: Path, dataset: str, cases: list[Case]) -> list[Outcome]:
    outcomes: list[Outcome] = run_ranks(size, run_cases, graph_path, dataset, cases, deadline_s=DEADLINE_S)[0]
    return outcomes


@pytest.fixture(scope="module")
def reference(graph_path: Path, dataset: str) -> dict[str, Outcome]:
    """One worker, one micro-batch."""
    order = Order(ParallelDims(1, 1, 1), AXES, (5,), 1, "gpipe")
    cases = [Case(order, dtype) for dtype in STEP_TOLERANCE]
    return dict(zip(STEP_TOLERANCE, run(1, graph_path, dataset, cases), strict=True))


def complaints(case: Case, got: Outcome, expected: Outcome) -> list[str]:
    """Every way in which a plan differs from one worker by more than arithmetic allows."""
    found = []
    tolerance = STEP_TOLERANCE[case.dtype]
    for name, a, b in (("loss", got.losses, expected.losses), ("norm", got.norms, expected.norms)):
        worst = float(np.max(np.abs(np.array(a) / np.array(b) - 1)))
        if not worst <= tolerance:
            found.append(f"{case}: {name} differs by {worst:.2e}")
    if case.dtype == "float64":
        found += gradient_complaints(case, got, expected)
        if not np.array_equal(got.predictions[:, 0], expected.predictions[:, 0]):
            found.append(f"{case}: other predictions")
    return found


def gradient_complaints(case: Case, got: Outcome, expected: Outcome) -> list[str]:
    if got.gradients.keys() != expected.gradients.keys():
        return [f"{case}: gradients of {sorted(got.gradients.keys() ^ expected.gradients.keys())[:3]} missing"]
    found = []
    for name, theirs in expected.gradients.items():
        difference = np.abs(got.gradients[name] - theirs)
        zero = zero_by_mathematics(name, theirs.shape)
        scale = np.abs(np.where(zero, 0, theirs)).max(initial=0.0)
        if (difference[zero] > ZERO_TOLERANCE).any() or (np.abs(theirs[zero]) > ZERO_TOLERANCE).any():
            found.append(f"{case}: {name} is not zero where it must be")
        if difference[~zero].size and not difference[~zero].max() <= GRADIENT_TOLERANCE * scale:
            found.append(f"{case}: gradient of {name} differs by {difference[~zero].max() / scale:.2e}")
    return found


def zero_by_mathematics(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Softmax does not feel a constant added to a row: the key bias and b_bias have no gradient."""
    zero = np.zeros(shape, dtype=bool)
    if name.endswith("bias_offset"):
        zero[:] = True
    if name.endswith("qkv.bias"):
        third = shape[0] // 3
        zero[third : 2 * third] = True
    return zero


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_plan_trains_the_same_model(
    size: int, graph_path: Path, dataset: str, reference: dict[str, Outcome]
) -> None:
    cases = [Case(order, dtype) for order in orders(size) for dtype in STEP_TOLERANCE]
    outcomes = run(size, graph_path, dataset, cases)
    found = [
        line for case, got in zip(cases, outcomes, strict=True) for line in complaints(case, got, reference[case.dtype])
    ]
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def table_reference(graph_path: Path, dataset: str) -> Outcome:
    """One worker, one micro-batch, features and a table of node embeddings."""
    order = Order(ParallelDims(1, 1, 1), AXES, (5,), 1, "gpipe")
    return run(1, graph_path, dataset, [Case(order, "float64", embedding="both")])[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_plan_trains_the_same_table(size: int, graph_path: Path, dataset: str, table_reference: Outcome) -> None:
    cases = [Case(order, "float64", embedding="both") for order in table_orders(size)]
    outcomes = run(size, graph_path, dataset, cases)
    assert float(np.abs(table_reference.gradients[TABLE]).max()) > 0
    found = [line for case, got in zip(cases, outcomes, strict=True) for line in complaints(case, got, table_reference)]
    assert not found, "\n".join(found)


def dropping(order: Order) -> Case:
    return Case(order, "float64", embedding="both", dropout=0.3)


@pytest.fixture(scope="module")
def dropout_reference(graph_path: Path, dataset: str) -> Outcome:
    """One worker, one micro-batch, features and a table, dropout 0.3 in input, residuals and attention."""
    return run(1, graph_path, dataset, [dropping(Order(ParallelDims(1, 1, 1), AXES, (5,), 1, "gpipe"))])[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dropout_does_not_depend_on_the_plan(
    size: int, graph_path: Path, dataset: str, dropout_reference: Outcome
) -> None:
    """The same masks under every plan, in any order of work, and in layers that run again."""
    dims = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1), (1, 1, 3)], 4: []}[size]
    plain = [Order(ParallelDims(*each), AXES, SPLITS[each[0]][0], 3, "gpipe") for each in dims]
    cases = [dropping(order) for order in [*plain, *lean_orders(size)]]
    outcomes = run(size, graph_path, dataset, cases)
    found = [
        line for case, got in zip(cases, outcomes, strict=True) for line in complaints(case, got, dropout_reference)
    ]
    assert not found, "\n".join(found)


def test_the_bias_matters_here(reference: dict[str, Outcome]) -> None:
    """Otherwise parity would prove nothing about it: its weights' gradients are of the size of the others'."""
    gradients = reference["float64"].gradients
    largest = max(float(np.abs(g).max()) for g in gradients.values())
    for name, gradient in gradients.items():
        if name.endswith("bias_weight") or name in ("token_bias", "embedding.tokens"):
            assert float(np.abs(gradient).max()) > 1e-6 * largest, name


@pytest.mark.parametrize(
    ("fault", "dims", "split"),
    [
        ("columns", ParallelDims(1, 1, 2), (5,)),
        ("tokens", ParallelDims(2, 1, 1), (2, 3)),
        ("doubled", ParallelDims(1, 2, 1), (5,)),
    ],
)
def test_a_broken_backend_is_noticed(
    fault: str,
    dims: ParallelDims,
    split: tuple[int, ...],
    graph_path: Path,
    dataset: str,
    reference: dict[str, Outcome],
) -> None:
    case = Case(Order(dims, AXES, split, 2, "gpipe"), "float64", fault)
    (got,) = run(2, graph_path, dataset, [case])
    found = complaints(case, got, reference["float64"])
    assert any("gradient of" in line for line in found), found
    assert any("loss" in line or "norm" in line for line in found), found
