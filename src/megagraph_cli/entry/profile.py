"""``mgraph profile``: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megagraph_cli import recipes
from megagraph_cli.console import Screen, print_json
from megagraph_cli.folders import folders_of
from megagraph_cli.hosts.address import Hosts
from megagraph_cli.options import (
    CacheOption,
    DatasetOption,
    DebugOption,
    Device,
    DeviceOption,
    EndpointOption,
    GpusOption,
    JsonOption,
    NnodesOption,
    NodeRankOption,
    RecipeOption,
    RootOption,
    SetOption,
    YesOption,
)


def profile(
    dataset: DatasetOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    gpus: GpusOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: under a minute, for CI.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=10,
            metavar="SECONDS",
            help="How long the workers may take, their start included. Default: 180; 40 with --quick.",
        ),
    ] = None,
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = None,
    rdzv_endpoint: EndpointOption = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile to write.")] = Path("profile.json"),
    root: RootOption = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (main reads it)
) -> None:
    """Measure compute, communication and batch construction on this machine."""
    folders = folders_of(root, cache, yes)
    from megagraph_cli.commands import profile as command
    from megagraph_cli.commands import tables

    resolved = recipes.resolve(dataset, recipe, sets or [])
    hosts = Hosts.of(nnodes, node_rank, rdzv_endpoint)
    request = command.ProfileRequest(resolved, folders, device or Device.auto, gpus, quick, budget, hosts)
    screen = Screen.stderr()
    measured = command.run(request, out, screen)
    where = hosts.at_first(out)
    if as_json:
        print_json(command.summary(measured, where))
    else:
        tables.show_profile(measured, where, screen)
