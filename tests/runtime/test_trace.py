"""The measured timeline: which steps it holds, in which lanes, and that it costs nothing where it is not asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megagraph_cli.layout.dims import Place
from megagraph_cli.runtime.trace import TRACED_STEPS, Tracer
from tests.ranks import run_ranks
from tests.runtime.small import CPU
from tests.runtime.test_step import run


def _traced(rank: int, path: str) -> int:
    tracer = Tracer(Path(path), rank, Place(rank, 0, 0), CPU)
    with tracer.span("device", "before any step"):
        pass
    for step in range(TRACED_STEPS + 2):
        tracer.begin_step()
        with tracer.span("device", f"step {step}"), tracer.span("link", "inside"):
            pass
        tracer.end_step()
    tracer.write()
    return len(tracer.spans)


@pytest.mark.ranks
def test_every_ranks_first_steps_are_written_by_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run_ranks(2, _traced, str(path)) == [2 * TRACED_STEPS] * 2
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0: pp=0 dp=0 cp=0",
        "rank 1: pp=1 dp=0 cp=0",
    ]
    for rank in range(2):
        named = {(span["cat"], span["name"]) for span in spans if span["pid"] == rank}
        assert named == {("link", "inside"), *(("device", f"step {step}") for step in range(TRACED_STEPS))}


def _spans_of_a_step(rank: int) -> list[str]:
    from tests.runtime.test_step import make

    tracer = Tracer(Path("unwritten"), rank, Place(0, 0, 0), CPU)
    train = make(num_microbatches=2)
    tracer.begin_step()
    run(train, span=tracer.span)
    tracer.end_step()
    silent = Tracer(None, rank, Place(0, 0, 0), CPU)
    silent.begin_step()
    run(train, span=silent.span)
    assert silent.spans == []
    return [f"{span.lane} {span.name}" for span in tracer.spans]


@pytest.mark.ranks
def test_a_step_leaves_a_span_for_each_piece_of_its_work() -> None:
    (names,) = run_ranks(1, _spans_of_a_step)
    passes = [f"device {kind} {number}" for number in range(2) for kind in ("forward", "backward")]
    assert names == [*passes, "link reduction", "link norm", "device optimizer"]


def test_on_cuda_a_span_waits_for_its_own_stream_alone(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that is posted ahead is on another stream and ends when a neighbour sends, perhaps after the span."""
    device, waits = torch.device("cuda", 1), []

    class Stream:
        def __init__(self, of: torch.device) -> None:
            self.of = of

        def synchronize(self) -> None:
            waits.append(self.of)

    def whole_device(*_: object) -> None:
        raise AssertionError("the span waits for the receive, too")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    tracer = Tracer(Path("unwritten"), 0, Place(0, 0, 0), device)
    with tracer.span("device", "not traced"):
        pass
    tracer.begin_step()
    with tracer.span("host", "construction"):
        pass
    assert waits == []
    with tracer.span("device", "forward 0"):
        assert waits == [device]
    with tracer.span("link", "receive for forward 0"):
        assert waits == [device] * 3
    assert waits == [device] * 4
