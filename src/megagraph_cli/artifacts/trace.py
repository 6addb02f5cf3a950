"""Timelines in Chrome's trace format: the simulated step of a plan and the measured one of a run, in the same lanes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megagraph_cli.artifacts.base import WITH_OUT, write_text

Lane = Literal["device", "link", "host"]
LANES: tuple[Lane, ...] = ("device", "link", "host")
_MICRO = 1e6


@dataclass(frozen=True)
class Span:
    """Something that lasts: ``process`` is a stage (simulated) or a rank (measured)."""

    process: int
    lane: Lane
    name: str
    start_s: float
    end_s: float


def trace_values(spans: Iterable[Span], processes: Mapping[int, str]) -> dict[str, Any]:
    """The JSON object that chrome://tracing and Perfetto open; times in microseconds from the earliest span."""
    ordered = sorted(spans, key=lambda span: (span.process, LANES.index(span.lane), span.start_s, span.end_s))
    begin = min((span.start_s for span in ordered), default=0.0)
    events: list[dict[str, Any]] = []
    for process, name in sorted(processes.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(LANES)
        ]
    events += [
        {
            "name": span.name,
            "cat": span.lane,
            "ph": "X",
            "pid": span.process,
            "tid": LANES.index(span.lane),
            "ts": round((span.start_s - begin) * _MICRO, 3),
            "dur": round((span.end_s - span.start_s) * _MICRO, 3),
        }
        for span in ordered
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, spans: Iterable[Span], processes: Mapping[int, str]) -> None:
    """Write a trace whole or not at all. Raises MgraphError (exit 2) where the folder refuses."""
    write_text(path, json.dumps(trace_values(spans, processes)) + "\n", WITH_OUT)
