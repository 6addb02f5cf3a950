"""An out-of-memory error in words: what torch said is read, and the advice fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.errors import EXIT_WORKER
from megagraph_cli.layout.dims import Place
from megagraph_cli.runtime import memory
from megagraph_cli.runtime.memory import asked_bytes, explain_out_of_memory, fitting_mib
from megagraph_cli.runtime.setup import Worker
from megagraph_cli.units import MIB
from tests.artifacts import examples


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.58 GiB", 5 * 2**29),
        ("CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.78 GiB total capacity)", 2**29),
        ("tried to allocate 96 bytes", 96),
        ("something else went wrong", 0),
    ],
)
def test_what_was_asked_is_read_from_torchs_message(message: str, expected: int) -> None:
    assert asked_bytes(message) == expected


def plan_predicting(peak_bytes: int) -> Plan:
    plan = examples.plan()
    assert plan.predicted is not None
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"peak_bytes": peak_bytes})})


def test_the_limit_shrinks_by_what_the_forecast_was_short_and_never_exceeds_what_there_is() -> None:
    plan = plan_predicting(500 * MIB)
    assert fitting_mib(plan, 1000 * MIB, 1000 * MIB) == 500
    assert fitting_mib(plan, 1000 * MIB, 400 * MIB) == 1000
    assert fitting_mib(plan, 1000 * MIB + 1, 400 * MIB) == 1000
    without = plan.model_copy(update={"predicted": None})
    assert fitting_mib(without, 7 * MIB - 1, 10**12) == 6
    for needed_mib in range(400, 2000, 7):
        limit = fitting_mib(plan, 1000 * MIB, needed_mib * MIB)
        assert limit * max(1.0, needed_mib / 500) <= 1000.0
    assert fitting_mib(plan, 1, 10**15) == 1


def test_the_sentence_names_rank_place_bytes_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = (900 * MIB, 1000 * MIB, 24 * MIB, 950 * MIB)
    monkeypatch.setattr(memory, "_device_figures", lambda _device: figures)
    worker = Worker(3, 1, 4, torch.device("cpu"), Path(), Place(1, 0, 1))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 MiB.")
    explained = explain_out_of_memory(error, worker, plan_predicting(800 * MIB))
    assert explained.exit_code == EXIT_WORKER
    # 1024 MiB usable, 1000 MiB needed where 800 were predicted: 1024 / 1.25 = 819.2
    for part in ("rank 3 (pp=1 dp=0 cp=1)", "104.86 MB", "943.72 MB", "996.15 MB", "838.86 MB", "--mem 819MiB"):
        assert part in explained.message, part
    assert explained.details == {
        "asked_bytes": 100 * MIB,
        "measured_bytes": 950 * MIB,
        "predicted_bytes": 800 * MIB,
    }
