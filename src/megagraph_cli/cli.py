"""The command line: options become one call each. Reads the environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megagraph_cli import __version__, recipes
from megagraph_cli.console import Screen, print_json, print_line
from megagraph_cli.edge import run_and_exit
from megagraph_cli.errors import MgraphError
from megagraph_cli.kernelcache import kernel_folder
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
    from megagraph_cli.commands.workloads import Folders

# Command modules are imported inside the commands: --help, fit and search must not wait for torch or numba.

app = typer.Typer(
    name="mgraph",
    help="Train graph transformers in parallel under a plan made for your machine: "
    "data, profile, fit, search, train, in this order; validate judges the cost model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print_line(f"mgraph {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise MgraphError("no command given; use data, profile, fit, search, train or validate, or see mgraph --help")


@app.command()
def data(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A dataset, synthetic:..., or a .npz or .pt file.")
    ] = None,
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    root: RootOption = None,
    cache: CacheOption = None,
    device: DeviceOption = None,  # noqa: ARG001 (a prepared graph serves every device)
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Prepare a graph once and print its statistics, source and licence."""
    folders = _folders(root, cache, yes)
    from megagraph_cli.commands import data as command
    from megagraph_cli.commands import tables
    from megagraph_cli.commands.workloads import prepare

    if name is not None and dataset not in (None, name):
        raise MgraphError(f"NAME says {name} but --dataset says {dataset}; name one graph")
    if name is None and dataset is None and recipe is None:
        raise MgraphError("nothing says which graph; give its NAME, or --recipe")
    resolved = recipes.resolve(name or dataset, recipe, sets or [])
    screen = Screen.stderr()
    facts = command.describe(*prepare(resolved.dataset, folders, screen))
    if as_json:
        print_json(facts)
    else:
        tables.show_facts(resolved.dataset.name, facts, screen)


@app.command()
def profile(
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    gpus: GpusOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: under a minute, for CI.")] = False,
    budget: Annotated[
        float | None, typer.Option("--budget", min=10, metavar="SECONDS", help="About how long it may take.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile to write.")] = Path("profile.json"),
    root: RootOption = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Measure compute, communication and batch construction on this machine."""
    folders = _folders(root, cache, yes)
    from megagraph_cli.commands import profile as command
    from megagraph_cli.commands import tables

    resolved = recipes.resolve(dataset, recipe, sets or [])
    request = command.ProfileRequest(resolved, folders, device or Device.auto, gpus, quick, budget)
    screen = Screen.stderr()
    measured = command.run(request, out, screen)
    if as_json:
        print_json(command.summary(measured, out))
    else:
        tables.show_profile(measured, out, screen)


@app.command()
def fit(
    profile_path: Annotated[Path, typer.Argument(metavar="[PROFILE]", help="The profile to fit.")] = Path(
        "profile.json"
    ),
    out: Annotated[Path, typer.Option("-o", "--out", help="The cost model to write.")] = Path("cost_model.json"),
    learn_from: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="VALIDATION", help="Learn from plans that were run; repeatable."),
    ] = None,
    force: ForceOption = False,
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    root: RootOption = None,  # noqa: ARG001 (no graph is read here: scripts may pass one set of flags everywhere)
    cache: CacheOption = None,  # noqa: ARG001
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,  # noqa: ARG001
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Fit the cost model to a profile."""
    from megagraph_cli.artifacts.profile import Profile
    from megagraph_cli.commands import fit as command
    from megagraph_cli.commands import tables
    from megagraph_cli.commands.devices import device_of_artifact

    if (dataset or recipe or sets or device) and not force:
        found = Profile.load(profile_path)
        recipes.check_matches(found.workload, profile_path, dataset=dataset, recipe=recipe, sets=sets or ())
        device_of_artifact(device, found.machine.device, profile_path, force=False)
    cost_model = command.run(profile_path, out, force=force, learn_from=learn_from or ())
    if as_json:
        print_json(cost_model.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_cost_model(cost_model, out, Screen.stderr())


def _explain(
    request: SearchRequest, candidate: str | None, plan: Path | None, screen: Screen, *, as_json: bool
) -> None:
    """``search --explain`` or ``--compare``."""
    from megagraph_cli.commands import explain, tables

    if candidate is not None and plan is not None:
        raise MgraphError("--explain and --compare answer two questions; give one of them")
    found = explain.compare(request, plan) if plan is not None else explain.explain(request, candidate or "")
    if as_json:
        print_json(found.values())
    else:
        tables.show_explanation(found, screen)


@app.command()
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
    cache: CacheOption = None,  # noqa: ARG001
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,  # noqa: ARG001
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Find the fastest plan that fits the memory of each device."""
    from megagraph_cli.artifacts.cost_model import CostModel
    from megagraph_cli.commands import search as command
    from megagraph_cli.commands import tables

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
    plan = searched.plan
    tables.warn_extrapolated(plan, screen)
    if as_json:
        print_json(plan.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_plan(plan, searched.cost, out, top, screen)


@app.command()
def train(
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The plan to carry out.  [default: plan.json, or the resumed run's]")
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs, instead of the recipe's.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="End after so many steps in all.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run goes.  [default: runs/<recipe>-<n>]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on in DIR from its last checkpoint.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="JSON", help="Also write a few measured steps, in Chrome's format."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun command line and stop.")] = False,
    sets: SetOption = None,
    force: ForceOption = False,
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    root: RootOption = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Train under a plan, with torchrun workers."""
    folders = _folders(root, cache, yes)
    from megagraph_cli.commands import tables
    from megagraph_cli.commands import train as command

    request = command.TrainRequest(
        folders=folders,
        plan_path=plan,
        device=device,
        dataset=dataset,
        recipe=recipe,
        sets=tuple(sets or ()),
        epochs=epochs,
        max_steps=max_steps,
        run_dir=run_dir,
        resume=resume,
        force=force,
        trace=trace,
    )
    if dry_run:
        line = command.command_line(request)
        print_json({"command": line}) if as_json else print_line(shlex.join(line))
        return
    screen = Screen.stderr()
    run, where = command.run(request, screen)
    if as_json:
        print_json(run.model_dump(mode="json", by_alias=True) | {"run_dir": str(where)})
    else:
        tables.show_run(run, where, screen)


@app.command()
def validate(
    gpus: GpusOption = None,
    plans: Annotated[int, typer.Option("--plans", min=1, help="Plans to run.")] = 48,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each; the first three are not timed.")] = 8,
    mem: Annotated[str | None, typer.Option("--mem", metavar="SIZE", help="Memory per device, such as 24GB.")] = None,
    cost_model: Annotated[Path, typer.Option("--cost-model", help="The cost model to judge.")] = Path(
        "cost_model.json"
    ),
    out: Annotated[Path, typer.Option("-o", "--out", help="The validation to write.")] = Path("validation.json"),
    sets: SetOption = None,
    force: ForceOption = False,
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    root: RootOption = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Run many plans for a few steps each: what was predicted beside what is measured."""
    folders = _folders(root, cache, yes)
    from megagraph_cli.artifacts.cost_model import CostModel
    from megagraph_cli.commands import tables
    from megagraph_cli.commands import validate as command

    if (dataset or recipe) and not force:
        fitted = CostModel.load(cost_model)
        recipes.check_matches(fitted.workload, cost_model, dataset=dataset, recipe=recipe, sets=())
    request = command.ValidateRequest(
        cost_model_path=cost_model,
        folders=folders,
        gpus=gpus,
        mem_bytes=None if mem is None else parse_bytes(mem),
        plans=plans,
        steps=steps,
        overrides=recipes.split_sets(sets or []),
        device=None if device in (None, Device.auto) else device.value,
        force=force,
    )
    screen = Screen.stderr()
    found = command.run(request, out, screen)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_validation(found, out, screen)


def _folders(root: Path | None, cache: Path | None, accept_download: bool) -> Folders:
    """Folders from the flags, else the environment, else the user's cache; numba's compiled kernels go there too."""
    home = Path("~/.cache/mgraph").expanduser()
    root = root or Path(os.environ.get("MGRAPH_DATA") or home / "data")
    cache = cache or Path(os.environ.get("MGRAPH_CACHE") or home / "graphs")
    # Before numba is imported, here and in the workers, which inherit it: kernels are compiled once per host.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_folder(cache.expanduser().absolute())))
    from megagraph_cli.commands.workloads import Folders

    return Folders(root.expanduser(), cache.expanduser(), accept_download)


def _layers(text: str) -> list[int]:
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MgraphError(f"--layers {text!r} is no list of layer counts; write for example --layers 3,5") from error
    if min(layers) < 1:
        raise MgraphError(f"--layers {text} leaves a stage without a layer; every stage needs at least one")
    return layers


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    run_and_exit(app, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
