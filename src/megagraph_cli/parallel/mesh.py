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

    ``pp`` and ``cp`` are the groups along those axes; ``loss`` = dp x cp is the group that sums gradients. ``pp_down``
    and ``pp_up`` have the ranks of ``pp``, and carry what goes from one stage to the next and back: none with one
    stage, one each with two, two each with more, for links in turn (the first ``pp_down`` is ``pp``). Each group is
    one communicator, used in the same order by all of its ranks. ``peers`` are the ranks of this replica on this host,
    None where there is no other.
    """

    dims: ParallelDims
    place: Place
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    loss: dist.ProcessGroup
    pp_down: tuple[dist.ProcessGroup, ...] = ()
    pp_up: tuple[dist.ProcessGroup, ...] = ()
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
    # With a third stage one stage both receives and sends: a second group each way, see Neighbours.
    more = [_groups(places, lambda place: _others(place, "pp")) for _ in range((0, 0, 1, 3)[min(dims.pp, 3)])]
    return Mesh(
        dims=dims,
        place=places[dist.get_rank()],
        pp=mesh.get_group("pp"),
        cp=mesh.get_group("cp"),
        loss=_groups(places, lambda place: (place.pp,)),
        pp_down=(mesh.get_group("pp"), *more[1:2]) if more else (),
        pp_up=(*more[:1], *more[2:]),
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
