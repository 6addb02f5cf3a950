"""The options that several commands of the command line share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Values of --device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ScheduleName(StrEnum):
    """Values of --schedule."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"


class RecomputeName(StrEnum):
    """Values of --recompute."""

    none = "none"
    full = "full"


class ContextName(StrEnum):
    """Values of --context."""

    ring = "ring"
    allgather = "allgather"


DatasetOption = Annotated[str | None, typer.Option("--dataset", metavar="NAME", help="The graph, or a path to one.")]
RecipeOption = Annotated[str | None, typer.Option("--recipe", metavar="NAME|FILE", help="A recipe, or a TOML file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a recipe key; repeatable.")
]
RootOption = Annotated[
    Path | None,
    typer.Option("--root", help="Where raw data lies or goes.  [default: $MGRAPH_DATA, ~/.cache/mgraph/data]"),
]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Where prepared graphs go.  [default: $MGRAPH_CACHE, ~/.cache/mgraph/graphs]"),
]
DeviceOption = Annotated[Device | None, typer.Option("--device", help="auto, cpu (gloo) or cuda (NCCL).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object on stdout.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Accept a download.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Accept a changed artifact or another dataset or device.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="Workers, one device each.")]

# Of profile, train and validate on several hosts.
NnodesOption = Annotated[int, typer.Option("--nnodes", min=1, metavar="N", help="Hosts; the same call runs on each.")]
NodeRankOption = Annotated[
    int | None, typer.Option("--node-rank", min=0, metavar="I", help="Which of them this is; host 0 writes.")
]
EndpointOption = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Host 0's address, and a free port there.")
]

# Of search alone: what it pins, shows and writes.
MemOption = Annotated[str | None, typer.Option("--mem", metavar="SIZE", help="Memory per device, such as 24GB.")]
PpOption = Annotated[int | None, typer.Option("--pp", min=1, help="Pin the pipeline degree.")]
CpOption = Annotated[int | None, typer.Option("--cp", min=1, help="Pin the context degree.")]
DpOption = Annotated[int | None, typer.Option("--dp", min=1, help="Pin the data degree.")]
MicrobatchesOption = Annotated[
    int | None, typer.Option("--microbatches", min=1, metavar="K", help="Pin the micro-batches per step.")
]
ScheduleOption = Annotated[ScheduleName | None, typer.Option("--schedule", help="Pin the schedule.")]
RecomputeOption = Annotated[
    RecomputeName | None, typer.Option("--recompute", help="Pin whether layers run again in the backward.")
]
ContextOption = Annotated[
    ContextName | None, typer.Option("--context", help="Pin how rows travel between context ranks.")
]
LayersOption = Annotated[str | None, typer.Option("--layers", metavar="3,5", help="Pin the layers of each stage.")]
ExplainOption = Annotated[
    str | None, typer.Option("--explain", metavar="pp=4,cp=1,dp=1", help="Say why a candidate lost; write nothing.")
]
CompareOption = Annotated[
    Path | None, typer.Option("--compare", metavar="PLAN", help="Set another plan beside the best; write nothing.")
]
ReportOption = Annotated[Path | None, typer.Option("--report", metavar="HTML", help="Also write a page to look at.")]
