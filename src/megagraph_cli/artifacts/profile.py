"""profile.json: raw measurements of one machine for one workload; nothing in it is fitted."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.workload import Workload

Recompute = Literal["none", "full"]
"""``full``: a layer keeps its input alone and runs again in the backward."""
Link = Literal["host", "network"]
"""What connects the ranks of a group: nothing outside their host, or the network between hosts."""
Context = Literal["ring", "allgather"]
"""How keys and values travel over cp > 1 ranks; with cp = 1 nothing travels and the name is ``ring``."""


SUMMED_RANKS = 2
"""Ranks whose rows are added up in a sample of touched rows: the fewest that add any up."""


class Machine(Part):
    """The machine that was measured. ``memory_bytes`` is the least free memory of a device that the profile saw.

    ``num_devices`` are those of all ``hosts`` together, equally many on each.
    """

    hosts: int = Field(ge=1)
    device: Literal["cpu", "cuda"]
    num_devices: int = Field(ge=1)
    memory_bytes: int = Field(gt=0)
    overhead_bytes: int = Field(ge=0)
    backend: str
    torch: str


class ComputeSample(Part):
    """One module measured at one size.

    ``recompute`` and ``context`` matter to ``layer`` and ``last_layer`` alone, and ``context`` to ``layer`` with
    cp > 1: the target row of a last layer is attended to in one way, so its ``ring`` samples stand for both.
    ``num_layers`` middle layers in a row (0 for input and head; a ``last_layer`` sample has 1), each
    micro-batch with its bias channels built once. Times are medians of ``samples_s`` [forward, backward] pairs.
    ``link``, left out where it is ``host``: what connects the context ranks.
    ``memory``: ``parameters`` (of the module), ``saved`` (held from forward to backward of a micro-batch),
    ``forward_peak`` and ``backward_peak`` (most bytes above what was live when that pass began), ``batch``
    (a micro-batch's tensors from the loader).
    ``pieces``, left out where it is 0: an ``optimizer`` sample of no layers, but of ``rows`` touched rows of an
    embedding table that are worked on in so many pieces. ``forward_s``: those of ``SUMMED_RANKS`` ranks added up,
    without what travels; ``backward_s``: their norm, clipping and update; ``parameters`` are the bytes of the rows.
    ``out_of_memory``: a rank ran out; then there are no samples, times are 0 and ``parameters`` are all that is known.
    """

    module: Literal["input", "layer", "last_layer", "head", "optimizer"]
    num_layers: int = Field(ge=0)
    cp: int = Field(ge=1)
    rows: int = Field(ge=1)
    sequence_rows: int = Field(ge=1)
    microbatch_size: int = Field(ge=0)
    recompute: Recompute = "none"
    context: Context = "ring"
    link: Link = Field(default="host", exclude_if=lambda link: link == "host")
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    memory: dict[str, int]
    samples_s: list[list[float]]
    out_of_memory: bool = False
    pieces: int = Field(default=0, ge=0, exclude_if=lambda pieces: not pieces)


class CommSample(Part):
    """One communication measured: ``p2p`` (one message to a neighbour), ``all_reduce`` or ``all_gather`` over a group.

    ``message_bytes`` is what every rank has in the end; of what is gathered it gave its own share. Over the network as
    many groups at once as a plan whose outermost axis crosses hosts would have.
    """

    op: Literal["p2p", "all_reduce", "all_gather"]
    axis: Literal["pp", "dp", "cp"]
    group_size: int = Field(ge=2)
    link: Link
    message_bytes: int = Field(gt=0)
    time_s: float = Field(ge=0)
    samples_s: list[float]


class HostSample(Part):
    """Host-side work measured: ``construct`` (sequences from targets) or ``gather`` (their features)."""

    op: Literal["construct", "gather"]
    targets: int = Field(ge=1)
    sequence_rows: int = Field(ge=1)
    threads: int = Field(ge=1)
    time_s: float = Field(ge=0)
    samples_s: list[float]


class Profile(Artifact):
    """Everything that ``mgraph profile`` measured."""

    SCHEMA: ClassVar[str] = "mgraph.profile/1"
    MADE_BY: ClassVar[str] = "mgraph profile"

    schema_version: str = Field(default=SCHEMA, alias="schema")
    workload: Workload
    machine: Machine
    compute: list[ComputeSample]
    comm: list[CommSample]
    host: list[HostSample]
