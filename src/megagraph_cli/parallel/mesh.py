"""One DeviceMesh for all axes, and its groups named by purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megagraph_cli.layout.dims import AXES, ParallelDims, Place
from megagraph_cli.parallel.replica import ReplicaPeers, replica_peers

COLLECTIVE_DEADLINE = timedelta(minutes=10)
"""No collective, send or receive waits longer for its other end."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands, and its process groups.

    ``pp`` and ``cp`` are the groups along those axes; ``loss`` = dp x cp is the group that sums gradients. ``pp_up``
    has the ranks of ``pp``, and carries what goes from the last stage to the first. Each group is one communicator,
    used in the same order by all of its ranks. ``peers`` are the ranks of this replica on this host, None where there
    is no other.
    """

    dims: ParallelDims
    place: Place
    pp: dist.ProcessGroup
    pp_up: dist.ProcessGroup
    cp: dist.ProcessGroup
    loss: dist.ProcessGroup
    peers: ReplicaPeers | None = None

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.dims.pp - 1


def build_mesh(dims: ParallelDims, mesh_order: Sequence[str], device_type: str, hosts: int = 1) -> Mesh:
    """The mesh of a plan over the whole world, outermost axis first. Every rank must call it.

    The groups are made here rather than by DeviceMesh, which gives them no deadline and flattens dp x cp only where
    these are neighbours in the mesh order.
    """
    assert dist.get_world_size() == dims.size, f"{dist.get_world_size()} workers for {dims}"
    places = [dims.place(rank, mesh_order) for rank in range(dims.size)]
    along = {axis: _groups(places, lambda place, axis=axis: _others(place, axis)) for axis in AXES}  # type: ignore[misc]
    mesh = DeviceMesh.from_group(
        [along[axis] for axis in mesh_order],
        device_type,
        mesh=torch.arange(dims.size).view(dims.shape(mesh_order)),
        mesh_dim_names=tuple(mesh_order),
    )
    return Mesh(
        dims=dims,
        place=places[dist.get_rank()],
        pp=mesh.get_group("pp"),
        pp_up=_groups(places, lambda place: _others(place, "pp")) if dims.pp > 1 else mesh.get_group("pp"),
        cp=mesh.get_group("cp"),
        loss=_groups(places, lambda place: (place.pp,)),
        peers=replica_peers(dims, mesh_order, hosts, COLLECTIVE_DEADLINE),
    )


def _others(place: Place, axis: str) -> tuple[int, ...]:
    """What ranks along one axis have in common: their coordinates on the others."""
    return tuple(getattr(place, other) for other in AXES if other != axis)


def _groups(places: Sequence[Place], key: Callable[[Place], tuple[int, ...]]) -> dist.ProcessGroup:
    """This rank's group among those of ranks with equal ``key``."""
    ranks = sorted(range(len(places)), key=lambda rank: (key(places[rank]), rank))
    parts = [list(part) for _, part in groupby(ranks, key=lambda rank: key(places[rank]))]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(parts, timeout=COLLECTIVE_DEADLINE)  # type: ignore[no-untyped-call]
    return group
