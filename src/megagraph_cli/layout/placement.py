"""Where the axes of a mesh lie on several hosts: which of them cross from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from megagraph_cli.layout.dims import AXES, ParallelDims

MESH_ORDERS: tuple[tuple[str, ...], ...] = tuple(permutations(AXES))
"""All orders of the axes, outermost first; number 0 is the default one."""


@dataclass(frozen=True)
class Placement:
    """``crossing`` axes have neighbours on different hosts. ``peers``: the fewest ranks of a replica on one host."""

    crossing: frozenset[str]
    peers: int


def hosts_of(gpus: int, hosts: int) -> int:
    """Over how many of a machine's hosts a plan spreads: all of them, or one where these cannot share it equally.

    That one must have so many devices: ``cost.space.settings`` refuses others.
    """
    return hosts if gpus % hosts == 0 else 1


@lru_cache(maxsize=4096)
def placement(dims: ParallelDims, mesh_order: Sequence[str], hosts: int) -> Placement:
    """Ranks are numbered host by host, equally many on each, and laid row-major over ``mesh_order``."""
    if hosts == 1:
        return Placement(frozenset(), dims.pp * dims.cp)
    on_host = (np.arange(dims.size) // (dims.size // hosts)).reshape(dims.shape(mesh_order))
    crossing = frozenset(axis for index, axis in enumerate(mesh_order) if np.any(np.diff(on_host, axis=index)))
    replicas = np.moveaxis(on_host, list(mesh_order).index("dp"), 0).reshape(dims.dp, -1)
    counts = [np.unique(replica, return_counts=True)[1].min() for replica in replicas]
    return Placement(crossing, int(min(counts)))
