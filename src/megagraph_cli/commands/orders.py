"""Checks of ``mgraph train`` before anything starts: the plan, what was changed, the device, the run to go on with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagraph_cli import recipes
from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import EVERY_KEY, Workload, first_difference
from megagraph_cli.commands import rundir
from megagraph_cli.commands.devices import (
    ALONE,
    Device,
    check_workers,
    check_writable,
    choose_device,
    device_of_artifact,
)
from megagraph_cli.commands.workloads import Folders
from megagraph_cli.errors import EXIT_STALE, MgraphError
from megagraph_cli.graph.graph import Graph
from megagraph_cli.hosts.address import Hosts

WORKER = "megagraph_cli.runtime.train"


@dataclass(frozen=True)
class TrainRequest:
    """What to train. ``plan_path`` None: the resumed run's own plan, else plan.json.

    ``sets`` are ``train.key=value`` texts; ``dataset`` and ``recipe``, where given, must agree with the plan.
    After ``max_restarts`` failures of workers another one ends it.
    """

    folders: Folders
    plan_path: Path | None = None
    device: str | None = None
    dataset: str | None = None
    recipe: str | None = None
    sets: tuple[str, ...] = ()
    epochs: int | None = None
    max_steps: int | None = None
    run_dir: Path | None = None
    resume: Path | None = None
    force: bool = False
    trace: Path | None = None
    max_restarts: int = 0
    hosts: Hosts = ALONE
    worker: str = WORKER


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request: the plan as it will be trained (from ``source``, ``changed`` or not) and on which device.

    ``overrides`` are all changes of the recipe since the plan was made, those of the resumed run included;
    ``warnings`` say what ``--force`` passed.
    """

    plan: Plan
    source: Path
    changed: bool
    device: Device
    overrides: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """What other hosts need of it, as plain JSON values: they have no plan of their own."""
        return {
            "plan": self.plan.model_dump(mode="json", by_alias=True),
            "source": str(self.source),
            "device": self.device,
            "overrides": self.overrides,
        }

    @classmethod
    def heard(cls, told: dict[str, Any]) -> CheckedRequest:
        """The request as host 0 checked it."""
        plan = Plan.model_validate(told["plan"])
        return cls(plan, Path(told["source"]), changed=True, device=told["device"], overrides=told["overrides"])


def check(request: TrainRequest) -> CheckedRequest:
    """What a request comes to. Raises MgraphError: bad usage or plan (2), plan and request disagree (4)."""
    if request.trace is not None:
        check_writable(request.trace, "--trace")
    if request.resume is not None:
        rundir.planned(request.run_dir, request.resume, "")
    source = _plan_path(request)
    plan = Plan.load(source, force=request.force)
    _check_hosts(request, plan, source)
    passed = _check_matches(request, plan, source)
    new = _overrides(request)
    earlier = rundir.overrides_of(request.resume) if request.resume is not None else {}
    workload = plan.workload
    if request.resume is not None and request.plan_path is not None:
        workload = _changed(workload, earlier)
        _check_same_workload(workload, request.resume, source)
    if request.resume is not None:
        _check_resumable(new, workload, request.resume)
    workload = _changed(workload, new)
    device = _device(request, plan, source)
    check_workers(device, plan.gpus, request.hosts)
    # A forecast needs a right digest, and so does a plan that has one: --force passed whatever else there is.
    forced = (plan.predicted is not None or plan.digest is not None) and not plan.digest_matches()
    if forced:
        passed.append(f"{source} was changed after it was written; its forecast may be another plan's")
    return CheckedRequest(
        plan=plan.model_copy(update={"workload": workload}),
        source=source,
        changed=workload != plan.workload or forced,
        device=device,
        overrides=earlier | new,
        warnings=tuple(passed),
    )


def _check_hosts(request: TrainRequest, plan: Plan, source: Path) -> None:
    """A plan for several hosts wants these; one that knows of one host may be carried out on more."""
    if plan.hosts not in (1, request.hosts.count):
        raise MgraphError(
            f"{source} is for {plan.hosts} hosts but this call has {request.hosts.count}; run it on each with "
            f"--nnodes {plan.hosts} --node-rank I --rdzv-endpoint HOST:PORT, or search again"
        )


def check_restarts(request: TrainRequest) -> None:
    """Before hosts wait for each other. Raises MgraphError (exit 2)."""
    if request.max_restarts and request.hosts.count > 1:
        raise MgraphError("--max-restarts works on one host; leave it out, and use --resume after a failure")


def _check_matches(request: TrainRequest, plan: Plan, source: Path) -> list[str]:
    """That the plan is for what the call names; what ``force`` passes is said instead: the plan decides."""
    try:
        recipes.check_matches(plan.workload, source, dataset=request.dataset, recipe=request.recipe, sets=())
    except MgraphError as error:
        if not request.force or error.exit_code != EXIT_STALE:
            raise
        differs = error.message.split(";")[0]
        return [f"{differs}; --force trains what the plan says"]
    return []


def check_graph(workload: Workload, graph: Graph, source: Path, *, force: bool) -> None:
    """That the graph is the one the plan was made for. Raises MgraphError (exit 4); ``force`` passes it."""
    if force or workload.graph is None or workload.graph.digest == graph.digest:
        return
    raise MgraphError(
        f"{source} was made for another content of {workload.dataset.name} (its digest differs from the prepared "
        "graph's); run mgraph profile again, or pass --force",
        EXIT_STALE,
    )


def _plan_path(request: TrainRequest) -> Path:
    if request.plan_path is not None:
        return request.plan_path
    return Path(rundir.PLAN) if request.resume is None else request.resume / rundir.PLAN


def _overrides(request: TrainRequest) -> dict[str, Any]:
    overrides = recipes.parse_sets(request.sets)
    for key in overrides:
        if not key.startswith("train."):
            raise MgraphError(f"--set {key}: train changes [train] keys alone; profile again with --set {key}=...")
    if request.epochs is not None:
        overrides["train.epochs"] = request.epochs
    return overrides


def _changed(workload: Workload, overrides: dict[str, Any]) -> Workload:
    recipe = recipes.apply(workload.recipe(), overrides)
    return workload.model_copy(update={"train": recipe.train})


def _check_same_workload(workload: Workload, run_dir: Path, source: Path) -> None:
    theirs = Plan.load(run_dir / rundir.PLAN, force=True).workload
    differs = first_difference(workload, theirs, EVERY_KEY)
    if differs is not None:
        key, mine, other = differs
        raise MgraphError(
            f"{source} has {key} = {mine!r} but {run_dir} trains with {other!r}; "
            "resume under a plan for the same workload",
            EXIT_STALE,
        )


def _check_resumable(overrides: dict[str, Any], workload: Workload, run_dir: Path) -> None:
    for key, value in overrides.items():
        if key != "train.epochs" and getattr(workload.train, key.removeprefix("train.")) != value:
            raise MgraphError(
                f"--set {key}={value}: {run_dir} trains with another value, and a resumed run may change train.epochs "
                "alone; start a new run",
                EXIT_STALE,
            )


def _device(request: TrainRequest, plan: Plan, source: Path) -> Device:
    if plan.device is None:  # written by hand
        return choose_device(request.device or "auto")
    return choose_device(device_of_artifact(request.device, plan.device, source, force=request.force))
