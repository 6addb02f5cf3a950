"""Every plan of one to three workers trains the same model, to the last digit that arithmetic allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import Case, orders
from tests.parity.judge import DEADLINE_S, STEP_TOLERANCE, Alone, all_complaints, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_plan_trains_the_same_model(size: int, graph_path: Path, dataset: str, alone: Alone) -> None:
    cases = [Case(order, dtype) for order in orders(size) for dtype in STEP_TOLERANCE]
    found = all_complaints(cases, run(size, graph_path, dataset, cases), alone)
    assert not found, "\n".join(found)
