"""``mgraph validate``: run many plans for a few steps each and set what was predicted beside what was measured."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.plan import Dims, Plan
from megagraph_cli.artifacts.validation import (
    FailedPlan,
    MeasuredPlan,
    MemoryAgreement,
    PredictedPlan,
    TimeAgreement,
    ValidatedPlan,
    Validation,
)
from megagraph_cli.commands.devices import (
    ALONE,
    Device,
    check_workers,
    check_writable,
    choose_device,
    device_of_artifact,
    worker_threads,
)
from megagraph_cli.commands.measuring import Measured, Measuring
from megagraph_cli.commands.orders import check_graph
from megagraph_cli.commands.scratch import scratch
from megagraph_cli.commands.search import OVERRIDES, SearchRequest, plan_of, resolved
from megagraph_cli.commands.workloads import Folders, graph_info, prepare
from megagraph_cli.console import Screen
from megagraph_cli.cost.judge import mape, max_under, r_squared, short, spearman
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.sample import plans_to_run
from megagraph_cli.cost.search import search
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import MgraphError
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.hosts.crew import Crew, joined

WORKER = "megagraph_cli.runtime.validate"
SCRATCH = "mgraph-validate-"
PLANS, STEPS = 48, 8
LEAST_STEPS = 4
"""The first three steps are not timed."""
ROUNDS, BEST_AGAIN = 5, 3


@dataclass(frozen=True)
class ValidateRequest:
    """What to run. ``gpus`` and ``mem_bytes`` None: those of the profile; ``sets`` as search takes them."""

    cost_model_path: Path
    folders: Folders
    gpus: int | None = None
    mem_bytes: int | None = None
    plans: int = PLANS
    steps: int = STEPS
    rounds: int = ROUNDS
    overrides: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    force: bool = False
    hosts: Hosts = ALONE
    worker: str = WORKER


def run(request: ValidateRequest, out: Path, screen: Screen) -> Validation:
    """Choose plans, run them, write ``out`` and return what it holds.

    Plans that fail are left out, with a warning. Raises MgraphError: bad usage (2), nothing fits (3), another dataset
    or device than the cost model's (4), workers that failed before any plan was measured, or on several hosts (5), a
    signal (130).
    """
    if request.hosts.first:
        check_writable(out)
    if request.steps < LEAST_STEPS:
        raise MgraphError(f"--steps {request.steps}: the first three are not timed; give at least {LEAST_STEPS}")
    with joined(request.hosts, "validate") as crew:
        crew.agree_on_flags([request.steps, request.rounds, request.plans])
        task = _task(request) if crew.hosts.first else None
        plans, device = _told(task, crew)
        workload = plans[0].workload
        here = check_workers(device, plans[0].gpus, crew.hosts)
        graph, split = prepare(workload.dataset, request.folders, screen)
        check_graph(workload, graph, request.cost_model_path, force=request.force)
        threads = worker_threads(plans[0], here, request.cost_model_path, screen)
        fewest = min(crew.exchange("threads", threads))
        with scratch(SCRATCH) as folder:
            job = {
                "plans": _write_plans(plans, folder),
                "graph": graph_info(graph, split).model_dump(mode="json"),
                "graph_path": str(graph.path),
                "device": device,
                "steps": request.steps,
                "rounds": request.rounds,
                "best_again": BEST_AGAIN,
                "work_dir": str(folder / "work"),
                "hosts": crew.hosts.count,
                "threads": threads,
                "launcher_pid": os.getpid(),
            }
            found = Measuring(request.worker, job, plans, here, folder, screen, crew).all()
        _warn_of_failures(found, len(plans), screen)
        return _result(request, task, found, fewest, out, crew)


@dataclass(frozen=True)
class Task:
    """What host 0 made of a request: the forecasts come from ``predictor``."""

    predictor: Predictor
    plans: list[Plan]
    device: Device


def _task(request: ValidateRequest) -> Task:
    predictor, _, plans = chosen(request)
    made_for = predictor.cost_model.machine.device
    asked = device_of_artifact(request.device, made_for, request.cost_model_path, force=request.force)
    return Task(predictor, plans, choose_device(asked))


def _told(task: Task | None, crew: Crew) -> tuple[list[Plan], Device]:
    """Plans and device as host 0 chose them: a cost model is needed there alone."""
    told = None
    if task is not None and crew.hosts.count > 1:
        told = [[plan.model_dump(mode="json", by_alias=True) for plan in task.plans], task.device]
    (told, *_) = crew.exchange("plans", told)
    if task is not None:
        return task.plans, task.device
    return [Plan.model_validate(values) for values in told[0]], told[1]


def _result(
    request: ValidateRequest, task: Task | None, measured: Measured, threads: int, out: Path, crew: Crew
) -> Validation:
    """The validation, written by host 0 and known to all."""
    if task is None:
        return Validation.model_validate(crew.exchange("validation", None)[0])
    found = validation_of(task.predictor, task.plans, measured, request.steps)
    ran_on = found.machine.model_copy(update={"device": task.device, "hosts": crew.hosts.count})
    made = {"inputs": [reference_to(request.cost_model_path)], "machine": ran_on, "threads": threads}
    saved = found.model_copy(update=made).save(out)
    if measured.ended is not None and crew.hosts.count > 1:
        raise measured.ended  # the other hosts have ended with it
    crew.exchange("validation", saved.model_dump(mode="json", by_alias=True))
    return saved


def _warn_of_failures(found: Measured, chosen: int, screen: Screen) -> None:
    """That the validation is not of all plans: each one's reason was told when it failed."""
    measured = len({line["plan"] for line in found.lines})
    not_run = chosen - measured - len(found.failed)
    if found.failed or found.ended:
        rest = f" and {not_run} not run" if not_run else ""
        screen.warn(f"the validation is of {measured} of {chosen} plans: {len(found.failed)} failed{rest}")


def chosen(request: ValidateRequest) -> tuple[Predictor, int, list[Plan]]:
    """(predictor, workers, plans to run: the search's pick first)."""
    asked = SearchRequest(
        request.cost_model_path,
        gpus=request.gpus,
        mem_bytes=request.mem_bytes,
        overrides=request.overrides,
        force=request.force,
    )
    predictor, gpus, mem_bytes, _ = resolved(asked)
    result = search(predictor, gpus, mem_bytes, Pins(), request.plans)
    made = []
    for setting, split in plans_to_run(predictor, result, gpus, mem_bytes, request.plans):
        plan = plan_of(predictor, result, gpus, mem_bytes)
        made.append(_as_planned(plan, predictor, setting, split))
    return predictor, gpus, made


def _as_planned(plan: Plan, predictor: Predictor, setting: Setting, split: Sequence[int]) -> Plan:
    """The same order but for what a plan to be run has of its own; it carries its own forecast."""
    order: dict[str, Any] = {
        "dims": Dims.of(setting.dims),
        "layers_per_stage": list(split),
        "num_microbatches": setting.num_microbatches,
        "schedule": setting.schedule,
        "recompute": setting.recompute,
        "context": setting.context,
        "mesh_order": list(setting.mesh_order),
        "predicted": predictor.forecast(setting, split),
        "search": None,
        "pareto": [],
        "runners_up": [],
        "extrapolated": [],
    }
    return plan.model_copy(update=order)


def _write_plans(plans: Sequence[Plan], folder: Path) -> list[str]:
    (folder / "work").mkdir()
    paths = [folder / f"plan-{number}.json" for number in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return [str(path) for path in paths]


def validation_of(predictor: Predictor, plans: Sequence[Plan], found: Measured, steps: int) -> Validation:
    """The artifact of plans and their measurements; a plan that was measured again has the median of those rounds."""
    by_number: dict[int, ValidatedPlan] = {}
    for number, plan in enumerate(plans):
        mine = [line for line in found.lines if line["plan"] == number]
        if not mine:
            continue
        timed = [line["step_s"] for line in mine if line["round"]] or [mine[0]["step_s"]]
        peak_bytes = max(line["peak_bytes"] for line in mine)
        measured = MeasuredPlan(step_s=statistics.median(timed), peak_bytes=peak_bytes)
        by_number[number] = ValidatedPlan(**_chosen(predictor, plan), measured=measured)
    again = {line["plan"]: by_number[line["plan"]].measured.step_s for line in found.lines if line["round"]}
    compared = 0 in again and (len(again) > 1 or len(by_number) == 1)
    validated = list(by_number.values())
    steps_s = [(each.measured.step_s, each.predicted.step_s) for each in validated]
    peaks = [(float(each.measured.peak_bytes), float(each.predicted.peak_bytes)) for each in validated]
    (true_s, guess_s), (true_bytes, guess_bytes) = zip(*steps_s, strict=True), zip(*peaks, strict=True)
    r2, rank = r_squared(true_bytes, guess_bytes), spearman(true_s, guess_s)
    return Validation(
        workload=predictor.workload,
        machine=predictor.cost_model.machine,
        steps=steps,
        plans=validated,
        failed=[
            FailedPlan(**_chosen(predictor, plans[number]), number=number, message=error.message)
            for number, error in sorted(found.failed.items())
        ],
        memory=MemoryAgreement(
            mape=short(mape(true_bytes, guess_bytes)),
            r2=None if r2 is None else short(r2),
            max_under=short(max_under(true_bytes, guess_bytes)),
        ),
        time=TimeAgreement(
            mape=short(mape(true_s, guess_s)),
            spearman=None if rank is None else short(rank),
            regret=short(max(0.0, again[0] / min(again.values()) - 1)) if compared else None,
        ),
    )


def _chosen(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    """The fields of a ChosenPlan."""
    forecast, fitted = plan.predicted, predictor.cost_model.workload
    assert forecast is not None
    overrides = {
        key: int(getattr(getattr(plan.workload, section), name))
        for key, (section, name, _) in OVERRIDES.items()
        if getattr(getattr(plan.workload, section), name) != getattr(getattr(fitted, section), name)
    }
    order = "gpus dims layers_per_stage num_microbatches schedule recompute context mesh_order"
    return {
        **{name: getattr(plan, name) for name in order.split()},
        "overrides": overrides,
        "predicted": PredictedPlan(
            step_s=forecast.step_s, peak_bytes=forecast.peak_bytes, margin_bytes=forecast.margin_bytes
        ),
    }
