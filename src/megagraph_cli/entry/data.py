"""``mgraph data``: its flags."""

from __future__ import annotations

from typing import Annotated

import typer

from megagraph_cli import recipes
from megagraph_cli.console import Screen, print_json
from megagraph_cli.errors import MgraphError
from megagraph_cli.folders import folders_of
from megagraph_cli.options import (
    CacheOption,
    DatasetOption,
    DebugOption,
    DeviceOption,
    JsonOption,
    RecipeOption,
    RootOption,
    SetOption,
    YesOption,
)


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
    folders = folders_of(root, cache, yes)
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
