"""``mgraph search``: a cost model in, the fastest plan that fits out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megagraph_cli import recipes
from megagraph_cli.artifacts.base import reference_to, write_text
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.plan import (
    DEFAULT_ORDER,
    BriefForecast,
    BriefPlan,
    Dims,
    Extrapolation,
    Plan,
    SearchCounts,
)
from megagraph_cli.artifacts.trace import write_trace
from megagraph_cli.artifacts.workload import MAX_BATCH_SIZE, Workload
from megagraph_cli.commands.devices import Device, check_writable, device_of_artifact
from megagraph_cli.commands.timeline import process_names, spans_of
from megagraph_cli.cost.explain import PlanCost, cost_of
from megagraph_cli.cost.measured import least_microbatch, most_measured
from megagraph_cli.cost.predict import Predictor, boundary_bytes
from megagraph_cli.cost.search import Found, SearchResult, search
from megagraph_cli.cost.setting import role_of
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import MgraphError
from megagraph_cli.layout.placement import hosts_of

OVERRIDES = {
    "model.num_layers": ("model", "num_layers", 10_000),
    "batch.batch_size": ("batch", "batch_size", MAX_BATCH_SIZE),
}


@dataclass(frozen=True)
class SearchRequest:
    """What ``mgraph search`` was asked: None means the cost model's own, or leaves a dimension open."""

    cost_model_path: Path
    gpus: int | None = None
    mem_bytes: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    context: str | None = None
    layers: list[int] | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    top: int = 5
    force: bool = False


@dataclass(frozen=True)
class Searched:
    """A finished search: the plan it would write, and what it was made from."""

    plan: Plan
    predictor: Predictor
    result: SearchResult

    @property
    def cost(self) -> PlanCost:
        """The chosen plan by stage and term."""
        return cost_of(self.predictor, self.result.best.setting, self.result.best.choice.split)


def run(request: SearchRequest, out: Path) -> Plan:
    """Search and write the plan to ``out``.

    Raises MgraphError: exit 2 for impossible pins or overrides, 3 where nothing fits, 4 for another device or a term
    that was never measured, and what ``CostModel.load`` raises.
    """
    return find(request).plan.save(out)


def write(request: SearchRequest, out: Path, *, report: Path | None, trace: Path | None) -> Searched:
    """Search, write the plan to ``out`` and, where asked, a page to look at and the simulated step.

    Raises what ``run`` does; a place that cannot be written is told first (exit 2).
    """
    for path, flag in ((out, "--out"), (report, "--report"), (trace, "--trace")):
        if path is not None:
            check_writable(path, flag)
    searched = find(request)
    if report is not None:
        from megagraph_cli.commands.report import page

        write_text(report, page(request, searched))
    if trace is not None:
        cost = searched.cost
        write_trace(trace, spans_of(cost), process_names(cost))
    return replace(searched, plan=searched.plan.save(out))


def find(request: SearchRequest) -> Searched:
    """The search alone; writes nothing. Raises what ``run`` does."""
    predictor, gpus, mem_bytes, device = resolved(request)
    result = search(predictor, gpus, mem_bytes, pins_of(request), request.top)
    plan = plan_of(predictor, result, gpus, mem_bytes)
    made = {"inputs": [reference_to(request.cost_model_path)], "device": device}
    return Searched(plan.model_copy(update=made), predictor, result)


def resolved(request: SearchRequest) -> tuple[Predictor, int, int, Device]:
    """(predictor, workers, bytes of each device, device) of a request."""
    cost_model = CostModel.load(request.cost_model_path, force=request.force)
    device = device_of_artifact(request.device, cost_model.machine.device, request.cost_model_path, force=request.force)
    workload = overridden(cost_model.workload, request.overrides)
    predictor = Predictor(cost_model, workload, recipes.sets_for(cost_model.workload.recipe()))
    gpus = cost_model.machine.num_devices if request.gpus is None else request.gpus
    mem_bytes = cost_model.machine.memory_bytes if request.mem_bytes is None else request.mem_bytes
    return predictor, gpus, mem_bytes, device


def pins_of(request: SearchRequest) -> Pins:
    """What a request fixes."""
    return Pins(
        pp=request.pp,
        cp=request.cp,
        dp=request.dp,
        num_microbatches=request.microbatches,
        schedule=request.schedule,
        recompute=request.recompute,
        context=request.context,
        layers=None if request.layers is None else tuple(request.layers),
    )


def overridden(workload: Workload, overrides: dict[str, str]) -> Workload:
    """The workload with other layers or batch size; any other key was measured into the cost model (exit 2)."""
    for key, text in overrides.items():
        if key not in OVERRIDES:
            raise MgraphError(
                f"--set {key} changes what was measured; profile again with it (search takes {' and '.join(OVERRIDES)})"
            )
        section, name, most = OVERRIDES[key]
        value = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= value <= most:
            raise MgraphError(f"--set {key}={text} is no whole number from 1 to {most}; give one")
        changed = getattr(workload, section).model_copy(update={name: value})
        workload = workload.model_copy(update={section: changed})
    return workload


def plan_of(predictor: Predictor, result: SearchResult, gpus: int, mem_bytes: int) -> Plan:
    """The plan artifact of a search's result: the order, and apart from it the forecast."""
    best, machine = result.best, predictor.cost_model.machine
    brief = _brief(best)
    return Plan(
        gpus=gpus,
        hosts=hosts_of(gpus, machine.hosts),
        device=machine.device,
        memory_limit_bytes=mem_bytes,
        workload=predictor.workload,
        dims=brief.dims,
        layers_per_stage=brief.layers_per_stage,
        num_microbatches=brief.num_microbatches,
        schedule="1f1b" if brief.schedule == "1f1b" else "gpipe",
        recompute=brief.recompute,
        context=brief.context,
        mesh_order=brief.mesh_order,
        threads=predictor.cost_model.threads,
        predicted=predictor.forecast(best.setting, best.choice.split),
        search=SearchCounts(
            num_candidates=result.num_candidates, num_feasible=result.num_feasible, max_gap=result.max_gap
        ),
        extrapolated=_extrapolated(predictor, best, gpus),
        pareto=[_brief(found) for found in result.pareto],
        runners_up=[_brief(found) for found in result.runners_up],
    )


def _brief(found: Found) -> BriefPlan:
    setting = found.setting
    return BriefPlan(
        dims=Dims.of(setting.dims),
        layers_per_stage=list(found.choice.split),
        num_microbatches=setting.num_microbatches,
        schedule=setting.schedule,
        recompute="full" if setting.recompute == "full" else "none",
        context="allgather" if setting.context == "allgather" else "ring",
        mesh_order=sorted(DEFAULT_ORDER, key=setting.mesh_order.index),
        predicted=BriefForecast(step_s=found.choice.step_s, peak_bytes=found.choice.peak_bytes),
    )


def _extrapolated(predictor: Predictor, best: Found, gpus: int) -> list[Extrapolation]:
    """What the chosen plan asks beyond what was measured for the way in which it runs its layers.

    That is more than the largest, and of micro-batches less than the smallest, too.
    """
    measured, split = predictor.cost_model.measured, best.choice.split
    # The model's last layer is another module.
    in_a_row = max([*split[:-1], split[-1] - 1])
    size = predictor.size(best.setting, in_a_row)
    layers, microbatch = most_measured(measured, size)
    least = least_microbatch(measured, size)
    message = _largest_message(predictor, best)
    touched_bytes = predictor.touched(best.setting, role_of(0, best.setting.dims.pp)).updated_bytes
    asked = [
        ("gpus", measured.gpus, gpus, gpus > measured.gpus),
        ("layers", layers, max(split), in_a_row > layers),
        ("microbatch_size", microbatch, size.microbatch, not least <= size.microbatch <= microbatch),
        ("message_bytes", measured.message_bytes, message, message > measured.message_bytes),
        ("touched_bytes", measured.touched_bytes, touched_bytes, touched_bytes > measured.touched_bytes),
    ]
    return [
        Extrapolation(quantity=quantity, measured_max=float(most), asked=float(value))
        for quantity, most, value, beyond in asked
        if beyond
    ]


def _largest_message(predictor: Predictor, best: Found) -> int:
    """Bytes of a step's largest message: a boundary activation, or what is summed or gathered over dp x cp."""
    setting, dims = best.setting, best.setting.dims
    messages = [0]
    if dims.pp > 1:
        messages.append(boundary_bytes(predictor.workload, predictor.size(setting)))
    if dims.dp * dims.cp > 1:
        for stage, layers in enumerate(best.choice.split):
            role = role_of(stage, dims.pp)
            messages.append(math.ceil(predictor.reduced_bytes(role, np.array([float(layers)]))[0]))
            messages.append(predictor.touched(setting, role).gathered_bytes)
    return max(messages)
