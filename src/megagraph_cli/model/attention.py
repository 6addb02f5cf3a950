"""Attention with a learned topology bias: the seam, and the Attend that needs no other rank.

The seam between model and context parallelism is ``Attend``: (q, k, v, bias, weights, drop) -> outputs on this
rank's rows. A kernel computes one block (these query rows against one owner's keys); scores and per-head bias
exist for that block only and the backward recomputes them (as FlashAttention does), so nothing S x S is stored.

Legend: B sequences, R query rows of this rank, C key columns of one owner, H heads, E head dim, M bias channels,
G global tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megagraph_cli.model.bias import AttentionBias
from megagraph_cli.model.block import (
    BiasWeights,
    Block,
    BlockGrads,
    block_of,
    cast_grads,
    row_products,
    target_block_of,
)
from megagraph_cli.model.drop import Drop
from megagraph_cli.model.plain import MASKED, PlainKernel

try:
    from megagraph_cli.model.compiled import CompiledKernel
except ImportError:  # numba runs on fewer platforms than torch
    CompiledKernel = None  # type: ignore[assignment, misc]

__all__ = [
    "MASKED",
    "Attend",
    "BiasWeights",
    "Block",
    "BlockGrads",
    "BlockKernel",
    "Drop",
    "LocalAttend",
    "block_of",
    "kernel_for",
    "target_block_of",
]


class Attend(Protocol):
    """Biased attention of this rank's rows over all rows of the sequence, wherever they live."""

    def __call__(
        self,
        q_HBRE: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        """Outputs [H, B, R, E] for the queries of this rank: softmax(q k^T / sqrt(E) + bias) v."""
        ...

    def target(
        self,
        q_HB1E: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        """Output [H, B, 1, E] of row 0 alone; ranks that do not own row 0 pass any q of that shape."""
        ...


class BlockKernel:
    """One block of biased attention, by the fastest kernel for where its tensors are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        """Normalised output of this block alone [H, B, R, E] and its log-sum-exp [H, B, R]."""
        return kernel_for(q).forward(q, k, v, block, weights)

    def backward(
        self,
        grad_out: Tensor,
        delta: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: Block,
        weights: BiasWeights,
    ) -> BlockGrads:
        """Gradients of one block from the final statistics of whole rows."""
        return kernel_for(q).backward(grad_out, delta, lse, q, k, v, block, weights)


def kernel_for(tensor: Tensor) -> PlainKernel | CompiledKernel:
    """The kernel that computes where ``tensor`` is: compiled on a CPU, plain torch elsewhere."""
    if tensor.device.type == "cpu" and CompiledKernel is not None:
        return CompiledKernel()
    return PlainKernel()


class _LocalAttention(torch.autograd.Function):
    """One block whose rows and columns both live here: the whole sequence (cp = 1)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, channel: Tensor, offset: Tensor, token: Tensor, block: Block
    ) -> Tensor:
        weights = BiasWeights(channel, offset, token)
        out, lse = BlockKernel().forward(q, k, v, block, weights)
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, out, lse, channel, offset, token)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, channel, offset, token = ctx.saved_tensors
        delta = row_products(grad_out, out, lse.dtype)
        grads = BlockKernel().backward(grad_out, delta, lse, q, k, v, ctx.block, BiasWeights(channel, offset, token))
        return (*cast_grads(grads, (q, k, v, channel, offset, token)), None)


class LocalAttend:
    """Attention where every row of a sequence lives on this rank; the backward recomputes the scores."""

    def __call__(
        self,
        q_HBRE: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        out: Tensor = _LocalAttention.apply(q_HBRE, k_HBRE, v_HBRE, *weights, block_of(bias, 0, drop))  # type: ignore[no-untyped-call]
        return out

    def target(
        self,
        q_HB1E: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        out: Tensor = _LocalAttention.apply(q_HB1E, k_HBRE, v_HBRE, *weights, target_block_of(bias, drop))  # type: ignore[no-untyped-call]
        return out
