"""A table of node embeddings and dropout: the same under every plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.runtime.build import TABLE, Order
from tests.parity.cases import SPLITS, Case, lean_orders, table_orders
from tests.parity.judge import DEADLINE_S, Alone, all_complaints, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_plan_trains_the_same_table(size: int, graph_path: Path, dataset: str, alone: Alone) -> None:
    cases = [Case(order, "float64", embedding="both") for order in table_orders(size)]
    outcomes = run(size, graph_path, dataset, cases)
    assert float(np.abs(alone(cases[0]).gradients[TABLE]).max()) > 0
    found = all_complaints(cases, outcomes, alone)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dropout_does_not_depend_on_the_plan(size: int, graph_path: Path, dataset: str, alone: Alone) -> None:
    """The same masks under every plan, in any order of work, and in layers that run again."""
    dims = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1), (1, 1, 3)], 4: []}[size]
    plain = [Order(ParallelDims(*each), AXES, SPLITS[each[0]][0], 3, "gpipe") for each in dims]
    cases = [Case(order, "float64", embedding="both", dropout=0.3) for order in [*plain, *lean_orders(size)]]
    found = all_complaints(cases, run(size, graph_path, dataset, cases), alone)
    assert not found, "\n".join(found)
