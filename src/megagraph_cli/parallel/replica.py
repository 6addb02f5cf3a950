"""The ranks of one replica on one host share the host's work on their batches: each does a part, all get the whole.

The parts travel over a gloo group of their own, from the loader's thread, whatever the device: a few hundred bytes a
sequence where building it takes tens of microseconds. Its collectives have the deadline that all others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.parallel.collectives import all_gather

ON_HOST = "_mgraph_on_host"
"""Set on a tensor that only lends NumPy's memory to a collective: the memory meter passes over it, as over NumPy's."""


@dataclass(frozen=True)
class ReplicaPeers:
    """This rank among the ranks of its replica on its host."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def exchange(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes [size, n] of all peers, each of which gives n bytes; all peers call it in the same order."""
        whole = np.empty((self.size, mine.size), dtype=np.uint8)
        all_gather(_lent(whole.reshape(-1)), _lent(mine), self.group)
        return whole


def _lent(array: NDArray[np.uint8]) -> Tensor:
    tensor = torch.from_numpy(array)
    setattr(tensor, ON_HOST, True)
    return tensor


def replica_peers(
    dims: ParallelDims, mesh_order: Sequence[str], hosts: int, deadline: timedelta
) -> ReplicaPeers | None:
    """The peers of this rank, None where it has none; every rank of the world calls it.

    Ranks are numbered host by host, equally many on each of ``hosts``.
    """
    if dims.pp * dims.cp == 1:
        return None
    per_host = dims.size // hosts
    together: dict[tuple[int, int], list[int]] = {}
    for rank in range(dims.size):
        together.setdefault((dims.place(rank, mesh_order).dp, rank // per_host), []).append(rank)
    found = None
    for ranks in together.values():
        group = dist.new_group(ranks, timeout=deadline, backend="gloo")
        if dist.get_rank() in ranks and len(ranks) > 1:
            found = ReplicaPeers(group, ranks.index(dist.get_rank()), len(ranks))
    return found
