"""``mgraph train``: its flags."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megagraph_cli.console import Screen, print_json, print_line
from megagraph_cli.folders import folders_of
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.options import (
    CacheOption,
    DatasetOption,
    DebugOption,
    DeviceOption,
    EndpointOption,
    ForceOption,
    JsonOption,
    NnodesOption,
    NodeRankOption,
    RecipeOption,
    RootOption,
    SetOption,
    YesOption,
)


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
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            metavar="R",
            help="Go on from the last checkpoint after up to R failures.",
        ),
    ] = 0,
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = None,
    rdzv_endpoint: EndpointOption = None,
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
    folders = folders_of(root, cache, yes)
    from megagraph_cli.commands import rundir, tables
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
        max_restarts=max_restarts,
        hosts=Hosts.of(nnodes, node_rank, rdzv_endpoint),
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
        tables.show_run(run, where, rundir.metric(where), screen)
