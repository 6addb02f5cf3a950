"""The command line: options become one call each. The only place that exits, and reads the environment."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from megagraph_cli import __version__, recipes
from megagraph_cli.console import Screen, print_error, print_json, print_line
from megagraph_cli.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNEXPECTED, EXIT_USAGE, MgraphError
from megagraph_cli.options import (
    CacheOption,
    DatasetOption,
    DebugOption,
    Device,
    DeviceOption,
    ForceOption,
    GpusOption,
    JsonOption,
    RecipeOption,
    RootOption,
    ScheduleName,
    SetOption,
    YesOption,
)
from megagraph_cli.units import parse_bytes

if TYPE_CHECKING:
    from megagraph_cli.artifacts.workload import Workload
    from megagraph_cli.commands.devices import Device as DeviceName
    from megagraph_cli.commands.workloads import Folders

# Command modules are imported inside the commands: --help, fit and search must not wait for torch or numba.

app = typer.Typer(
    name="mgraph",
    help="Train graph transformers in parallel under a plan made for your machine: "
    "data, profile, fit, search, train, in this order.",
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
        raise MgraphError("no command given; use data, profile, fit, search or train, or see mgraph --help")


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset, synthetic:..., or a .npz or .pt file.")],
    recipe: RecipeOption = None,
    sets: SetOption = None,
    root: RootOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Prepare a graph once and print its statistics, source and licence."""
    folders = _folders(root, cache, yes)
    from megagraph_cli.commands import data as command
    from megagraph_cli.commands import tables
    from megagraph_cli.commands.workloads import prepare

    resolved = recipes.resolve(name, recipe, sets or [])
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
    request = command.ProfileRequest(resolved, folders, device or Device.auto, gpus, quick)
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
    """Fit the cost model to a profile."""
    from megagraph_cli.artifacts.profile import Profile
    from megagraph_cli.commands import fit as command
    from megagraph_cli.commands import tables

    if (dataset or recipe or device) and not force:
        found = Profile.load(profile_path)
        _check_told(found.workload, found.machine.device, profile_path, dataset, recipe, device)
    cost_model = command.run(profile_path, out, force=force)
    if as_json:
        print_json(cost_model.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_cost_model(cost_model, out, Screen.stderr())


@app.command()
def search(
    gpus: GpusOption = None,
    mem: Annotated[str | None, typer.Option("--mem", metavar="SIZE", help="Memory per device, such as 24GB.")] = None,
    cost_model: Annotated[Path, typer.Option("--cost-model", help="The cost model to search with.")] = Path(
        "cost_model.json"
    ),
    out: Annotated[Path, typer.Option("-o", "--out", help="The plan to write.")] = Path("plan.json"),
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pin the pipeline degree.")] = None,
    cp: Annotated[int | None, typer.Option("--cp", min=1, help="Pin the context degree.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Pin the data degree.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, metavar="K", help="Pin the micro-batches per step.")
    ] = None,
    schedule: Annotated[ScheduleName | None, typer.Option("--schedule", help="Pin the schedule.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", metavar="3,5", help="Pin the layers of each stage.")] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Runners-up to list.")] = 5,
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
        found = CostModel.load(cost_model)
        _check_told(found.workload, found.machine.device, cost_model, dataset, recipe, None)
    request = command.SearchRequest(
        cost_model_path=cost_model,
        gpus=gpus,
        mem_bytes=None if mem is None else parse_bytes(mem),
        pp=pp,
        cp=cp,
        dp=dp,
        microbatches=microbatches,
        schedule=None if schedule is None else schedule.value,
        layers=None if layers is None else _layers(layers),
        overrides=recipes.split_sets(sets or []),
        device=None if device in (None, Device.auto) else device.value,
        top=top,
        force=force,
    )
    plan = command.run(request, out)
    screen = Screen.stderr()
    tables.warn_extrapolated(plan, screen)
    if as_json:
        print_json(plan.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_plan(plan, out, top, screen)


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


def _folders(root: Path | None, cache: Path | None, accept_download: bool) -> Folders:
    """Folders from the flags, else the environment, else the user's cache; numba's compiled kernels go there too."""
    home = Path("~/.cache/mgraph").expanduser()
    root = root or Path(os.environ.get("MGRAPH_DATA") or home / "data")
    cache = cache or Path(os.environ.get("MGRAPH_CACHE") or home / "graphs")
    # Before numba is imported, here and in the workers, which inherit it: kernels are compiled once per host.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache.expanduser().absolute() / "numba"))
    from megagraph_cli.commands.workloads import Folders

    return Folders(root.expanduser(), cache.expanduser(), accept_download)


def _check_told(
    workload: Workload, made_for: DeviceName, path: Path, dataset: str | None, recipe: str | None, device: str | None
) -> None:
    from megagraph_cli.commands.devices import device_of_artifact

    recipes.check_matches(workload, path, dataset=dataset, recipe=recipe, sets=())
    device_of_artifact(device, made_for, path, force=False)


def _layers(text: str) -> list[int]:
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MgraphError(f"--layers {text!r} is no list of layer counts; write for example --layers 3,5") from error
    if min(layers) < 1:
        raise MgraphError(f"--layers {text} leaves a stage without a layer; every stage needs at least one")
    return layers


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code (contracts: 0, 1, 2, 3, 4, 5, 130)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_guarded(arguments, as_json="--json" in arguments, debug="--debug" in arguments))


def _guarded(arguments: list[str], *, as_json: bool, debug: bool) -> int:
    if not debug:  # one sentence on stderr, not a library's remarks
        warnings.simplefilter("ignore")
    try:
        return _run(arguments)
    except MgraphError as error:
        failure = error
    except (KeyboardInterrupt, typer.Abort):
        failure = MgraphError("interrupted; run the command again", EXIT_INTERRUPTED)
    except Exception as error:
        failure = _as_failure(error)
        if debug:
            traceback.print_exc()
    if debug and failure.exit_code != EXIT_UNEXPECTED:
        traceback.print_exception(failure)
    print_error(failure.message)
    if as_json:
        print_json({"error": {"code": failure.exit_code, "message": failure.message, **failure.details}})
    return failure.exit_code


def _run(arguments: list[str]) -> int:
    if sys.platform == "win32":
        raise MgraphError("mgraph runs on Linux and macOS, not on Windows; use WSL or a container")
    signal.signal(signal.SIGTERM, _interrupt)
    result = typer.main.get_command(app).main(args=arguments, prog_name="mgraph", standalone_mode=False)
    if result == EXIT_INTERRUPTED:  # typer turned a KeyboardInterrupt into its own exit
        raise KeyboardInterrupt
    return result if isinstance(result, int) else EXIT_OK


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def _as_failure(error: Exception) -> MgraphError:
    """The sentence for an error that is not ours: typer's usage errors (exit 2), else an unexpected one (exit 1)."""
    format_message: Any = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own copy of click keeps its classes private
        said = " ".join(str(format_message()).replace("Value error, ", "").split()).rstrip(".")
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "mgraph"
        return MgraphError(f"{said[:1].lower()}{said[1:]}; see {command} --help", EXIT_USAGE)
    said = " ".join(str(error).split()) or "no message"
    return MgraphError(
        f"unexpected {type(error).__name__}: {said}; run it again with --debug to see the traceback", EXIT_UNEXPECTED
    )


if __name__ == "__main__":
    main()
