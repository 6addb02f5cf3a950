"""Hybrid data parallelism (HDP): gradients in one flat buffer, summed once per step over the ``loss`` group.

Every reduction is a SUM: the loss is already divided by the global number of targets. Parameters that every stage
holds a copy of (the global tokens' channels) are summed over the pipeline too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.parallel.mesh import Mesh


class GradientBuffer:
    """Gradients of a stage's parameters as views of one flat buffer, shared parameters last."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shared: Collection[str], mesh: Mesh) -> None:
        ordered = sorted(parameters, key=lambda name: name in shared)
        first = parameters[ordered[0]]
        sizes = [parameters[name].numel() for name in ordered]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        own = sum(size for name, size in zip(ordered, sizes, strict=True) if name not in shared)
        self.own, self.shared = self.flat[:own], self.flat[own:]
        self._mesh = mesh
        for name, view in zip(ordered, torch.split(self.flat, sizes), strict=True):
            parameters[name].grad = view.view_as(parameters[name])

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self) -> None:
        """Sum over the ranks that hold parts of the same gradients."""
        if self._mesh.dims.dp * self._mesh.dims.cp > 1:
            dist.all_reduce(self.flat, group=self._mesh.loss)
        if self._mesh.dims.pp > 1 and self.shared.numel():
            dist.all_reduce(self.shared, group=self._mesh.pp)

    def square_sum(self) -> Tensor:
        """This rank's part of the squared norm of the whole model's gradient, each parameter counted once.

        After ``reduce`` all replicas agree, so only the rank at dp = cp = 0 of a stage counts, and the shared
        parameters count on the first stage.
        """
        place = self._mesh.place
        if place.dp or place.cp:
            return torch.zeros((), dtype=torch.float64, device=self.flat.device)
        counted = self.flat if place.pp == 0 else self.own
        norm: Tensor = torch.linalg.vector_norm(counted, dtype=torch.float64)
        return norm.square()

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scale the gradients so that the whole model's norm is at most ``limit``; no host sync."""
        self.flat.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(self.flat.dtype))
