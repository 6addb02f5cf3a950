"""``mgraph validate``: its flags."""

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
    ForceOption,
    GpusOption,
    JsonOption,
    NnodesOption,
    NodeRankOption,
    RecipeOption,
    RootOption,
    SetOption,
    YesOption,
)
from megagraph_cli.units import parse_bytes


def validate(
    gpus: GpusOption = None,
    plans: Annotated[int, typer.Option("--plans", min=1, help="Plans to run.")] = 48,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each; the first three are not timed.")] = 8,
    mem: Annotated[str | None, typer.Option("--mem", metavar="SIZE", help="Memory per device, such as 24GB.")] = None,
    cost_model: Annotated[Path, typer.Option("--cost-model", help="The cost model to judge.")] = Path(
        "cost_model.json"
    ),
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = None,
    rdzv_endpoint: EndpointOption = None,
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
    folders = folders_of(root, cache, yes)
    from megagraph_cli.artifacts.cost_model import CostModel
    from megagraph_cli.commands import tables
    from megagraph_cli.commands import validate as command

    hosts = Hosts.of(nnodes, node_rank, rdzv_endpoint)
    if (dataset or recipe) and hosts.first and not force:
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
        hosts=hosts,
    )
    screen = Screen.stderr()
    found = command.run(request, out, screen)
    where = hosts.at_first(out)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True) | {"out": str(where)})
    else:
        tables.show_validation(found, where, screen)
