"""A backward that begins with a gradient from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Given(torch.autograd.Function):
    """A scalar whose gradient with respect to ``out`` is ``gradient``."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return ctx.gradient, None


def backward_from(out: Tensor, gradient: Tensor | None) -> None:
    """Accumulate the gradients of all leaves below ``out``, whose own is ``gradient`` (None: out is a scalar, 1).

    ``torch.autograd.backward`` with a gradient imports a computer algebra system to compare two shapes, which takes
    each worker seconds at its start.
    """
    seed = out
    if gradient is not None:
        with torch.enable_grad():  # inside another backward it is off
            seed = _Given.apply(out, gradient)  # type: ignore[no-untyped-call]
    seed.backward()  # type: ignore[no-untyped-call]
