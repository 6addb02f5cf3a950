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
    """The JSON object that chrome://tracing and Perfetto open; times in microseconds from the earliest span.

    A link carries messages both ways at once and viewers drop what overlaps, so such a lane has a second track.
    """
    ordered = sorted(spans, key=lambda span: (span.process, LANES.index(span.lane), span.start_s, span.end_s))
    begin = min((span.start_s for span in ordered), default=0.0)
    tracks: dict[tuple[int, int], float] = {(process, tid): begin for process in processes for tid in range(len(LANES))}
    work = []
    for span in ordered:
        tid = LANES.index(span.lane)
        while tracks.get((span.process, tid), begin) > span.start_s:
            tid += len(LANES)
        tracks[span.process, tid] = span.end_s
        work.append(
            {
                "name": span.name,
                "cat": span.lane,
                "ph": "X",
                "pid": span.process,
                "tid": tid,
                "ts": round((span.start_s - begin) * _MICRO, 3),
                "dur": round((span.end_s - span.start_s) * _MICRO, 3),
            }
        )
    names: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
        for process, name in sorted(processes.items())
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": tid, "args": {"name": LANES[tid % len(LANES)]}}
        for process, tid in sorted(tracks)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + work}


def write_trace(path: Path, spans: Iterable[Span], processes: Mapping[int, str]) -> None:
    """Write a trace whole or not at all. Raises MgraphError (exit 2) where the folder refuses."""
    write_text(path, json.dumps(trace_values(spans, processes)) + "\n", WITH_OUT)
