"""The simulated step of a plan as a trace: one process per stage; device, link and host as its lanes."""

from __future__ import annotations

from megagraph_cli.artifacts.trace import Lane, Span
from megagraph_cli.cost.explain import PlanCost, StageCost
from megagraph_cli.units import format_bytes

AFTER: tuple[tuple[str, Lane], ...] = (
    ("reduction", "link"),
    ("touched", "device"),
    ("norm", "link"),
    ("optimizer", "device"),
    ("construction", "host"),
)
"""What follows the pipeline on every stage, in this order."""


def spans_of(cost: PlanCost) -> list[Span]:
    """Every message, forward and backward of the pipeline, then what ends the step.

    A message stands in the link lane of the stage that receives it for as long as it travels, whatever the device does.
    """
    spans = []
    for event in cost.events:
        name = f"{event.kind} {event.microbatch}"
        if event.travel_s:
            leaves_s = event.arrival_s - event.travel_s
            spans.append(Span(event.stage, "link", f"receive for {name}", leaves_s, event.arrival_s))
        spans.append(Span(event.stage, "device", name, event.start_s, event.end_s))
    for number, stage in enumerate(cost.stages):
        spans += _tail(number, stage, cost.pipeline_s)
    return spans


def _tail(number: int, stage: StageCost, start_s: float) -> list[Span]:
    spans = []
    for name, lane in AFTER:
        length_s = stage.time_s.get(name, 0.0)
        if length_s:
            spans.append(Span(number, lane, name, start_s, start_s + length_s))
            start_s += length_s
    return spans


def process_names(cost: PlanCost) -> dict[int, str]:
    """A line of the viewer for each stage."""
    return {
        number: f"stage {number}: {stage.layers} layers, {format_bytes(stage.peak_bytes)}"
        for number, stage in enumerate(cost.stages)
    }
