"""Counts what a rank hands to torch.distributed, by purpose, as ``layout/wire.py`` reckons it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megagraph_cli.parallel.collectives import GATHER
from megagraph_cli.parallel.mesh import Mesh

Counts = dict[str, Fraction]
SHARE: dict[str, Callable[[int, int], Fraction]] = {
    "all_reduce": lambda size, group: Fraction(2 * (group - 1) * size, group),
    "all_gather": lambda size, group: Fraction((group - 1) * size),
    GATHER: lambda size, group: Fraction((group - 1) * size),
    "all_to_all_single": lambda size, group: Fraction((group - 1) * size, group),
    "broadcast": lambda size, group: Fraction((group - 1) * size, group),
    "isend": lambda size, group: Fraction(size),  # noqa: ARG005
}
"""One rank's share of what its group moves, from the bytes of its own tensor and the size of the group."""
OWN = {"all_gather": 1, GATHER: 1, "all_to_all_single": 1}
"""Place of the argument that holds this rank's own tensor, where it is not the first."""


def purpose(mesh: Mesh, name: str, group: Any, tensor: Tensor) -> str:
    if group is None:
        return "summary"
    if group is mesh.cp:
        return "context"
    if name == "isend" and any(group is link for link in (*mesh.pp_down, *mesh.pp_up)):
        return "boundary"
    if group is mesh.pp:
        return "gradients"
    assert group is mesh.loss
    return "table" if name == GATHER or tensor.dtype == torch.int64 else "gradients"


@contextmanager
def counted(mesh: Mesh) -> Iterator[Counts]:
    """Bytes that this rank sends inside the block, by purpose; sum them over all ranks."""
    counts: Counts = {}

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensor, group = args[OWN.get(name, 0)], kwargs.get("group")
            if name == "isend" and len(args) > 2:
                group = args[2]
            size = dist.get_world_size(group)
            why = purpose(mesh, name, group, tensor)
            counts[why] = counts.get(why, Fraction()) + SHARE[name](tensor.nbytes, size)
            return call(*args, **kwargs)

        return wrapper

    # Point-to-point operations are handed over as functions, which torch compares with its own module's.
    wrappers = {name: counting(name) for name in SHARE}
    with mock.patch.multiple(dist, **wrappers), mock.patch.object(distributed_c10d, "isend", wrappers["isend"]):
        yield counts
