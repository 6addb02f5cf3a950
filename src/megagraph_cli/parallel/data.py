"""Hybrid data parallelism (HDP): gradients in one flat buffer, summed once per step over the ``loss`` group.

Every reduction is a SUM: the loss is already divided by the global number of targets. Parameters that every stage
holds a copy of (the global tokens' channels) are summed over the pipeline too. The buffer is cut into buckets in the
order in which a backward completes them; each is on its way while the last backward goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.parallel.mesh import Mesh
from megagraph_cli.parallel.square_sum import square_sum

BUCKET_BYTES = 1 << 20
"""Below about this size a sum costs latency, not bytes."""


class GradientBuffer:
    """Gradients of a stage's parameters as views of one flat buffer: last layers first, shared parameters last.

    ``parameters`` stand in the order in which the forward uses them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shared: Collection[str], mesh: Mesh) -> None:
        backward = list(parameters)[::-1]
        ordered = [n for n in backward if n not in shared] + [n for n in backward if n in shared]
        first = parameters[ordered[0]]
        sizes = [parameters[name].numel() for name in ordered]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        own = sum(size for name, size in zip(ordered, sizes, strict=True) if name not in shared)
        self.own, self.shared = self.flat[:own], self.flat[own:]
        self._mesh = mesh
        for name, view in zip(ordered, torch.split(self.flat, sizes), strict=True):
            parameters[name].grad = view.view_as(parameters[name])
        self._reduced = mesh.dims.dp * mesh.dims.cp > 1
        self._lengths = bucket_lengths([size * first.element_size() for size in sizes], BUCKET_BYTES)
        self._waiting: list[int] | None = None
        self._works: list[dist.Work] = []
        if self._reduced:
            self._slices = torch.split(self.flat, _totals(sizes, self._lengths))
            buckets = [bucket for bucket, length in enumerate(self._lengths) for _ in range(length)]
            for name, bucket in zip(ordered, buckets, strict=True):
                self._watch(parameters[name], bucket)

    def zero(self) -> None:
        self.flat.zero_()

    def expect_last(self) -> None:
        """The backward that now begins is the step's last: what it completes may leave."""
        self._waiting = list(self._lengths)

    def _watch(self, parameter: nn.Parameter, bucket: int) -> None:
        parameter.register_post_accumulate_grad_hook(lambda _: self._completed(bucket))  # type: ignore[no-untyped-call]

    def _completed(self, bucket: int) -> None:
        if self._waiting is None:
            return
        self._waiting[bucket] -= 1
        # In the buffer's order alone, so that every rank sends the same.
        while len(self._works) < len(self._waiting) and self._waiting[len(self._works)] == 0:
            self._send()

    def _send(self) -> None:
        work = dist.all_reduce(self._slices[len(self._works)], group=self._mesh.loss, async_op=True)
        assert work is not None
        self._works.append(work)

    def reduce(self) -> None:
        """Sum over the ranks that hold parts of the same gradients."""
        self._waiting = None
        if self._reduced:
            while len(self._works) < len(self._slices):
                self._send()
            for work in self._works:
                work.wait()
            self._works = []
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
        return square_sum(counted)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``; no host sync."""
        self.flat.mul_(factor.to(self.flat.dtype))


def bucket_lengths(sizes_bytes: list[int], bucket_bytes: int) -> list[int]:
    """How many consecutive sizes each bucket takes: as few as reach ``bucket_bytes``, the last what is left."""
    lengths, held = [0], 0
    for size in sizes_bytes:
        if held >= bucket_bytes:
            lengths.append(0)
            held = 0
        lengths[-1] += 1
        held += size
    return lengths


def _totals(sizes: list[int], lengths: list[int]) -> list[int]:
    taken = iter(sizes)
    return [sum(next(taken) for _ in range(length)) for length in lengths]
