"""Dropout of hidden states, fused with the residual sum: masks from keys (drop.py), compiled on a CPU.

Legend: B sequences, R rows of this rank, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagraph_cli.model.drop import Drop, keep_mask

try:
    from megagraph_cli.model.compiled import drop_rows
except ImportError:  # numba runs on fewer platforms than torch
    drop_rows = None  # type: ignore[assignment]


class _DropAdd(torch.autograd.Function):
    """residual + dropout(x); nothing is saved, the backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, drop: Drop) -> Tensor:
        ctx.drop, ctx.x_dtype = drop, x.dtype
        return _dropped(x, drop, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        grad_x = _dropped(grad, ctx.drop, None).to(ctx.x_dtype) if needed[0] else None
        return grad_x, grad if needed[1] else None, None


def _dropped(x_BRD: Tensor, drop: Drop, residual: Tensor | None) -> Tensor:
    """residual + mask * x, in float32 at least: bfloat16 would round 1 / (1 - p), and in one pass alone."""
    dtype = x_BRD.dtype if residual is None else torch.promote_types(x_BRD.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x_BRD, residual = x_BRD.to(wide), None if residual is None else residual.to(wide)
    if x_BRD.device.type == "cpu" and drop_rows is not None and x_BRD.shape[-1] % 8 == 0:
        return drop_rows(x_BRD, drop, residual).to(dtype)
    batch, rows, size = x_BRD.shape
    mask = keep_mask(drop, (1, batch, rows, size), first_row=drop.first_row, first_column=0, like=x_BRD)[0]
    out = mask.mul_(x_BRD) if residual is None else torch.addcmul(residual, mask, x_BRD)
    return out.to(dtype)


def drop_add(x_BRD: Tensor, residual: Tensor | None, drop: Drop | None) -> Tensor:
    """residual + dropout(x): [B, R, D]. Without ``drop`` a plain sum."""
    if drop is None:
        return x_BRD if residual is None else residual + x_BRD
    out: Tensor = _DropAdd.apply(x_BRD, residual, drop)  # type: ignore[no-untyped-call]
    return out
