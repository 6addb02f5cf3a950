"""``mgraph fit``: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megagraph_cli import recipes
from megagraph_cli.console import Screen, print_json
from megagraph_cli.options import (
    CacheOption,
    DatasetOption,
    DebugOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    RecipeOption,
    RootOption,
    SetOption,
    YesOption,
)

FEW_PLANS = 8


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
    screen = Screen.stderr()
    count = cost_model.quality.time.num_held_out
    if learn_from and count < FEW_PLANS:
        screen.warn(
            f"{count} are few plans to learn from, and say little of how far off a forecast is; "
            "run more of them with mgraph validate --plans"
        )
    if as_json:
        print_json(cost_model.model_dump(mode="json", by_alias=True) | {"out": str(out)})
    else:
        tables.show_cost_model(cost_model, out, screen)
