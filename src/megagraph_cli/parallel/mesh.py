"""One DeviceMesh for all axes, and its groups named by purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megagraph_cli.layout.dims import ParallelDims, Place


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands, and its process groups.

    ``pp`` and ``cp`` are the groups along those axes; ``loss`` = dp x cp is the group that sums gradients.
    Each axis has one communicator, used in the same order by all of its ranks.
    """

    dims: ParallelDims
    place: Place
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    loss: dist.ProcessGroup

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.dims.pp - 1


def build_mesh(dims: ParallelDims, mesh_order: Sequence[str], device_type: str) -> Mesh:
    """The mesh of a plan over the whole world, outermost axis first. Every rank must call it."""
    assert dist.get_world_size() == dims.size, f"{dist.get_world_size()} workers for {dims}"
    whole = init_device_mesh(device_type, dims.shape(mesh_order), mesh_dim_names=tuple(mesh_order))
    loss = _loss_group(dims, mesh_order)
    return Mesh(
        dims=dims,
        place=dims.place(dist.get_rank(), mesh_order),
        pp=whole.get_group("pp"),
        cp=whole.get_group("cp"),
        loss=loss,
    )


def _loss_group(dims: ParallelDims, mesh_order: Sequence[str]) -> dist.ProcessGroup:
    """Ranks of one stage, whatever the mesh order: DeviceMesh flattens neighbouring axes only."""
    ranks = sorted(range(dims.size), key=lambda rank: (dims.place(rank, mesh_order).pp, rank))
    stages = [list(group) for _, group in groupby(ranks, key=lambda rank: dims.place(rank, mesh_order).pp)]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(stages)  # type: ignore[no-untyped-call]
    return group
