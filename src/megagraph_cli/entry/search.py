"""``mgraph search``: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megagraph_cli import recipes
from megagraph_cli.console import Screen, print_json
from megagraph_cli.errors import MgraphError
from megagraph_cli.folders import keep_kernels
from megagraph_cli.options import (
    CacheOption,
    CompareOption,
    ContextOption,
    CpOption,
    DatasetOption,
    DebugOption,
    Device,
    DeviceOption,
    DpOption,
    ExplainOption,
    ForceOption,
    GpusOption,
    JsonOption,
    LayersOption,
    MemOption,
    MicrobatchesOption,
    PpOption,
    RecipeOption,
    RecomputeOption,
    ReportOption,
    RootOption,
    ScheduleOption,
    SetOption,
    YesOption,
)
from megagraph_cli.units import parse_bytes

if TYPE_CHECKING:
    from megagraph_cli.commands.search import SearchRequest


def _check_asked(candidate: str | None, plan: Path | None, *, report: Path | None, trace: Path | None) -> None:
    """What answers one question and writes nothing is asked for nothing else. Raises MgraphError (exit 2)."""
    if candidate is not None and plan is not None:
        raise MgraphError("--explain and --compare answer two questions; give one of them")
    question = "--explain" if candidate is not None else "--compare" if plan is not None else None
    for flag, path in (("--report", report), ("--trace", trace)):
        if question and path is not None:
            raise MgraphError(f"{question} writes nothing, so {flag} {path} would stay unwritten; give one of them")


def _explain(
    request: SearchRequest, candidate: str | None, plan: Path | None, screen: Screen, *, as_json: bool
) -> None:
    """``search --explain`` or ``--compare``."""
    from megagraph_cli.commands import explain, tables

    found = explain.compare(request, plan) if plan is not None else explain.explain(request, candidate or "")
    if as_json:
        print_json(found.values())
    else:
        tables.show_explanation(found, screen)


def _layers(text: str) -> list[int]:
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MgraphError(f"--layers {text!r} is no list of layer counts; write for example --layers 3,5") from error
    if min(layers) < 1:
        raise MgraphError(f"--layers {text} leaves a stage without a layer; every stage needs at least one")
    return layers


def search(
    gpus: GpusOption = None,
    mem: MemOption = None,
    cost_model: Annotated[Path, typer.Option("--cost-model", help="The cost model to search with.")] = Path(
        "cost_model.json"
    ),
    out: Annotated[Path, typer.Option("-o", "--out", help="The plan to write.")] = Path("plan.json"),
    pp: PpOption = None,
    cp: CpOption = None,
    dp: DpOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = None,
    recompute: RecomputeOption = None,
    context: ContextOption = None,
    layers: LayersOption = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Runners-up to list.")] = 5,
    explain: ExplainOption = None,
    compare: CompareOption = None,
    report: ReportOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="JSON", help="Also write the simulated step, in Chrome's format.")
    ] = None,
    sets: SetOption = None,
    force: ForceOption = False,
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    root: RootOption = None,  # noqa: ARG001 (no graph is read here: scripts may pass one set of flags everywhere)
    cache: CacheOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,  # noqa: ARG001
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Find the fastest plan that fits the memory of each device."""
    from megagraph_cli.artifacts.cost_model import CostModel
    from megagraph_cli.commands import search as command
    from megagraph_cli.commands import tables

    _check_asked(explain, compare, report=report, trace=trace)
    keep_kernels(cache)
    if (dataset or recipe) and not force:
        fitted = CostModel.load(cost_model)
        recipes.check_matches(fitted.workload, cost_model, dataset=dataset, recipe=recipe, sets=())
    request = command.SearchRequest(
        cost_model_path=cost_model,
        gpus=gpus,
        mem_bytes=None if mem is None else parse_bytes(mem),
        pp=pp,
        cp=cp,
        dp=dp,
        microbatches=microbatches,
        schedule=None if schedule is None else schedule.value,
        recompute=None if recompute is None else recompute.value,
        context=None if context is None else context.value,
        layers=None if layers is None else _layers(layers),
        overrides=recipes.split_sets(sets or []),
        device=None if device in (None, Device.auto) else device.value,
        top=top,
        force=force,
    )
    screen = Screen.stderr()
    if explain is not None or compare is not None:
        _explain(request, explain, compare, screen, as_json=as_json)
        return
    searched = command.write(request, out, report=report, trace=trace)
    for path in filter(None, (report, trace)):
        screen.note(f"wrote {path}")
    plan = searched.plan
    tables.warn_extrapolated(plan, screen)
    tables.warn_unproven(plan, screen)
    if as_json:
        print_json(plan.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_plan(plan, searched.cost, out, top, screen)
