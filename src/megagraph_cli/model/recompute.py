"""Activation checkpointing: a layer keeps its input alone and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megagraph_cli.backward import backward_from

LayerCall = Callable[[Tensor, Any, Tensor], Tensor]


class _Recomputed(torch.autograd.Function):
    """torch's own checkpoint does more (generators' states, which masks that are functions of their place do not
    need) and imports torch's compiler, which takes each worker seconds at its start."""

    @staticmethod
    def forward(ctx: Any, layer: LayerCall, bias: Any, x: Tensor, token_bias: Tensor) -> Tensor:
        kind = x.device.type
        ctx.layer, ctx.bias = layer, bias
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(x, token_bias)
        return layer(x, bias, token_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            each.detach().requires_grad_(needed)
            for each, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        kind, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            out = ctx.layer(inputs[0], ctx.bias, inputs[1])
        backward_from(out, grads[0])
        return None, None, *(each.grad for each in inputs)


def recomputed(layer: LayerCall, x: Tensor, bias: Any, token_bias: Tensor) -> Tensor:
    """``layer(x, bias, token_bias)``, of which only the arguments live until the backward.

    The gradients of the layer's own parameters are accumulated by the backward that runs inside the backward.
    """
    out: Tensor = _Recomputed.apply(layer, bias, x, token_bias)  # type: ignore[no-untyped-call]
    return out
