"""Collectives whose names differ between the versions of torch that are supported."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""torch 2.13 renamed it; the old name still works there but warns."""


def all_gather(everyones: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """``own`` [n, ...] of all g ranks of the group, in their order, into ``everyones`` [g n, ...]."""
    work: dist.Work | None = getattr(dist, GATHER)(everyones, own, group=group, async_op=async_op)
    return work
