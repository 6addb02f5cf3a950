"""``mgraph search --report``: one self-contained page that shows a search and says why others lost."""

from __future__ import annotations

from html import escape

from megagraph_cli.artifacts.plan import BriefPlan
from megagraph_cli.commands.charts import Point, scatter, stacked_bars, timeline
from megagraph_cli.commands.explain import Explanation, explain_pins
from megagraph_cli.commands.search import Searched, SearchRequest, pins_of
from megagraph_cli.commands.tables import unproven
from megagraph_cli.commands.timeline import process_names, spans_of
from megagraph_cli.cost.explain import PlanCost
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.layout.dims import ParallelDims, factorisations
from megagraph_cli.units import format_bytes, format_seconds

MOST_OTHERS = 24
"""Degrees that the page goes into: beyond, the best of them."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 900px; padding: 0 1em }
body { color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th, td { text-align: left; padding: 4px 8px; border-bottom: 1px solid #ddd; vertical-align: top }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #444 }
.grid { stroke: #e4e4e4 } .limit { stroke: #c62828; stroke-dasharray: 5 4 } .front { fill: none; stroke: #90a4d4 }
.chosen { fill: #c62828 } circle.front { fill: #4472c4; stroke: none } .other { fill: #b0b0b0 }
.forward { fill: #4472c4 } .backward { fill: #ed7d31 } .receive { fill: #9e9e9e } .reduction, .norm { fill: #7e57c2 }
.optimizer { fill: #70ad47 } .construction { fill: #ffc000 }
"""


def page(request: SearchRequest, searched: Searched) -> str:
    """The whole page as text."""
    plan, cost = searched.plan, searched.cost
    assert plan.predicted is not None
    assert plan.search is not None
    limit_bytes = plan.memory_limit_bytes or 0
    workload = plan.workload
    title = f"mgraph: {workload.dataset.name}, {workload.model.num_layers} layers on {plan.gpus} workers"
    best = plan.pareto[0]
    reserve = plan.predicted.margin_bytes + plan.predicted.overhead_bytes
    bars = [
        (
            f"stage {number}",
            {name: float(size) for name, size in stage.memory_bytes.items() if size}
            | {"margin and overhead": float(reserve)},
        )
        for number, stage in enumerate(cost.stages)
    ]
    points = [_point(each, "front") for each in plan.pareto[1:]] + [_point(each, "other") for each in plan.runners_up]
    points.append(_point(best, "chosen"))
    doubt = unproven(plan)
    praise = "Best found" if doubt else "Best"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Chosen: <b>{escape(_said(best))}</b>, {format_seconds(plan.predicted.step_s)} a step, "
        f"{format_bytes(plan.predicted.peak_bytes)} at its peak. {praise} of {plan.search.num_feasible} plans that fit "
        f"{format_bytes(limit_bytes)} per device, of {plan.search.num_candidates} in all.</p>",
        *([f"<p>{escape(doubt[0].upper() + doubt[1:])}.</p>"] if doubt else []),
        "<h2>Step time and peak memory: every plan that no other beats in both, and the runners-up</h2>",
        scatter(points, limit_bytes),
        "<h2>Memory of each stage, by term, against the limit</h2>",
        stacked_bars(bars, float(limit_bytes)),
        "<h2>The simulated step</h2>",
        timeline(spans_of(cost), process_names(cost)),
        "<h2>Where each stage's time goes</h2>",
        _stage_table(searched),
        "<h2>Why others lost</h2>",
        _others(request, searched),
    ]
    body = "\n".join(sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _said(plan: BriefPlan) -> str:
    layers = ",".join(map(str, plan.layers_per_stage))
    return (
        f"pp={plan.dims.pp} cp={plan.dims.cp} dp={plan.dims.dp}, layers {layers}, "
        f"{plan.num_microbatches} micro-batches, {plan.schedule}, recompute {plan.recompute}, {plan.context}"
    )


def _point(plan: BriefPlan, kind: str) -> Point:
    found = plan.predicted
    label = f"{_said(plan)}: {format_seconds(found.step_s)}, {format_bytes(found.peak_bytes)}"
    return Point(found.step_s, found.peak_bytes, kind, label)


def _stage_table(searched: Searched) -> str:
    stages = searched.cost.stages
    terms = list(dict.fromkeys(term for stage in stages for term in stage.time_s))
    header = "".join(f"<th>{escape(name)}</th>" for name in ("stage", "number of layers", *terms))
    rows = []
    for number, stage in enumerate(stages):
        cells = [str(number), str(stage.layers), *(format_seconds(stage.time_s.get(term, 0.0)) for term in terms)]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"


def _others(request: SearchRequest, searched: Searched) -> str:
    """The best plan of every other choice of degrees, and what it loses by."""
    chosen, gpus = searched.cost, searched.plan.gpus
    each_dims = (_explained(request, searched, dims, chosen) for dims in factorisations(gpus))
    found = [each for each in each_dims if each is not None]
    found.sort(key=lambda each: (each.verdict == "pruned", each.candidate.step_s))
    rows = []
    for each in found[:MOST_OTHERS]:
        cells = [
            str(each.candidate.setting.dims),
            each.verdict,
            format_seconds(each.candidate.step_s),
            format_bytes(each.candidate.peak_bytes),
            "; ".join(each.because) or "as chosen",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in ("degrees", "verdict", "step", "peak", "because"))
    return f'<table id="others"><tr>{header}</tr>{"".join(rows)}</table>'


def _explained(request: SearchRequest, searched: Searched, dims: ParallelDims, chosen: PlanCost) -> Explanation | None:
    """None where the model or the batch leaves no plan of these degrees."""
    asked = pins_of(request)
    pins = Pins(pp=dims.pp, cp=dims.cp, dp=dims.dp, layers=asked.layers)
    limit_bytes = searched.plan.memory_limit_bytes or 0
    try:
        return explain_pins(searched.predictor, searched.plan.gpus, limit_bytes, pins, asked, chosen)
    except MgraphError as error:
        if error.exit_code != EXIT_USAGE:
            raise
        return None
