"""Every plan of four workers trains the same model, to the last digit that arithmetic allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import ALL, Case, orders
from tests.parity.judge import DEADLINE_S, STEP_TOLERANCE, Alone, all_complaints, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("dtype", list(STEP_TOLERANCE))
def test_every_plan_trains_the_same_model(dtype: str, graph_path: Path, dataset: str, alone: Alone) -> None:
    if dtype == "float32" and not ALL:
        pytest.skip("minutes that show little beside float64: make parity runs it")
    cases = [Case(order, dtype) for order in orders(4)]
    found = all_complaints(cases, run(4, graph_path, dataset, cases), alone)
    assert not found, "\n".join(found)
