"""Attention with a learned topology bias: the seam, the block kernel, and the Attend that needs no other rank.

The seam between model and context parallelism is ``Attend``: (q, k, v, bias, weights, drop) -> outputs on this
rank's rows. The kernel computes one block (these query rows against one owner's keys); scores and per-head bias
exist for that block only and the backward recomputes them (as FlashAttention does), so nothing S x S is stored.

Legend: B sequences, R query rows of this rank, C key columns of one owner, H heads, E head dim, M bias channels,
G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megagraph_cli.model.bias import AttentionBias, TokenRows

MASKED = -1e30
"""Added to the scores of padded keys. Finite, so that a block of padding alone yields no NaN and weighs nothing."""


class BiasWeights(NamedTuple):
    """Learned part of one layer's bias: ``channel`` [M, H] (W_bias), ``offset`` [H] (b_bias), ``token`` [G, H]."""

    channel: Tensor
    offset: Tensor
    token: Tensor


class Drop(NamedTuple):
    """Attention dropout: probability and the key of the masks."""

    probability: float
    seed: int


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
        """Outputs [H, B, R, E] for the queries of this rank; q is already divided by sqrt(E)."""
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


@dataclass(frozen=True)
class Block:
    """One block of the score matrix: channels [M, B, R, C], padded keys [B, C], the tokens' rows and columns."""

    features: Tensor
    padded_keys: Tensor
    row_tokens: TokenRows
    column_tokens: TokenRows
    drop: Drop | None


class BlockGrads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    channel: Tensor
    offset: Tensor
    token: Tensor


def block_of(bias: AttentionBias, owner: int, drop: Drop | None) -> Block:
    """The block of this rank's rows against ``owner``'s columns; each block has dropout masks of its own."""
    return Block(
        features=bias.features[owner],
        padded_keys=bias.padded_keys[owner],
        row_tokens=bias.tokens[bias.cp_rank],
        column_tokens=bias.tokens[owner],
        drop=None if drop is None else Drop(drop.probability, drop.seed + owner),
    )


def target_block_of(bias: AttentionBias, drop: Drop | None) -> Block:
    """Row 0 against this rank's own columns.

    The channels are symmetric (powers of a symmetric matrix), so the rank finds row 0 of its columns as column 0
    of its rows and needs nothing from the rank that owns row 0.
    """
    return Block(
        features=bias.features[0][..., :1].transpose(-1, -2),
        padded_keys=bias.padded_keys[bias.cp_rank],
        row_tokens=TokenRows(0, 0, 0),
        column_tokens=bias.tokens[bias.cp_rank],
        drop=drop,
    )


class BlockKernel:
    """Forward and backward of one block in plain torch; softmax statistics in float32 (float64 for float64)."""

    def scores(self, q: Tensor, k: Tensor, block: Block, weights: BiasWeights) -> Tensor:
        """Biased, masked scores [H, B, R, C] in the statistics' dtype."""
        heads, batch, rows, _ = q.shape
        columns = k.shape[2]
        stats = _statistics_dtype(q.dtype)
        # Heads outermost: one product of [H, M] with all channels of the block, into which q k^T is then added.
        flat = block.features.reshape(block.features.shape[0], -1)
        scores = (weights.channel.to(flat.dtype).T @ flat).to(stats).add_(weights.offset.to(stats).unsqueeze(-1))
        scores = scores.view(heads, batch, rows, columns)
        if q.dtype == stats:
            scores.view(heads * batch, rows, columns).baddbmm_(q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2))
        else:
            scores += q @ k.transpose(-1, -2)
        for patch in _token_patches(block, rows, columns):
            by_head = weights.token[patch.tokens].to(stats).T.unsqueeze(1) * patch.share
            scores[:, :, patch.rows, patch.columns] += by_head.unsqueeze(-1 if patch.tokens_are_rows else -2)
        return scores.masked_fill_(block.padded_keys.view(1, batch, 1, columns), MASKED)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        """Normalised output of this block alone [H, B, R, E] and its log-sum-exp [H, B, R]."""
        # The backward runs without autocast: the scores it recomputes must be the ones computed here.
        with torch.autocast(q.device.type, enabled=False):
            return self._forward(q, k, v, block, weights)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        scores = self.scores(q, k, block, weights)
        top = scores.amax(dim=-1, keepdim=True)
        scores.sub_(top).exp_()
        total = scores.sum(dim=-1, keepdim=True)
        lse = (top + total.log()).squeeze(-1)
        if block.drop is not None:
            scores *= keep_mask(scores, block.drop)
        out = (scores.to(v.dtype) @ v).to(total.dtype) / total
        return out, lse

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
        """Gradients of one block from the final statistics.

        With P = exp(scores - lse) over the whole row and delta = rowsum(grad_out * out):
        dV = P^T dO, dS = P (dO V^T - delta), dQ = dS K, dK = dS^T Q (FlashAttention, with the bias inside S).
        """
        heads, _, rows, _ = q.shape
        prob = self.scores(q, k, block, weights).sub_(lse.unsqueeze(-1)).exp_()
        grad_prob = (grad_out @ v.transpose(-1, -2)).to(prob.dtype)
        dropped = prob
        if block.drop is not None:
            keep = keep_mask(prob, block.drop)
            dropped = prob * keep
            grad_prob *= keep
        grad_v = dropped.to(v.dtype).transpose(-1, -2) @ grad_out.to(v.dtype)
        grad_scores = grad_prob.sub_(delta.unsqueeze(-1)).mul_(prob)
        flat = block.features.reshape(block.features.shape[0], -1)
        grad_channel = flat @ grad_scores.view(heads, -1).to(flat.dtype).T
        grad_token = torch.zeros_like(weights.token, dtype=prob.dtype)
        for patch in _token_patches(block, rows, k.shape[2]):
            other = 3 if patch.tokens_are_rows else 2
            by_head = grad_scores[:, :, patch.rows, patch.columns].sum(dim=(1, other))
            grad_token[patch.tokens] += by_head.T * patch.share
        narrow = grad_scores.to(q.dtype)
        return BlockGrads(
            q=narrow @ k,
            k=narrow.transpose(-1, -2) @ q,
            v=grad_v,
            channel=grad_channel,
            offset=grad_scores.sum(dim=(1, 2, 3)),
            token=grad_token,
        )


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class TokenPatch(NamedTuple):
    """A rectangle of a block whose pairs have a global token on one side; ``share`` of the token's vector counts."""

    rows: slice
    columns: slice
    tokens: slice
    share: float
    tokens_are_rows: bool


def _token_patches(block: Block, rows: int, columns: int) -> list[TokenPatch]:
    """Rectangles of the block that touch a global token.

    A pair of one token and another row has the token's vector; a pair of two tokens has the mean of both, so it
    lies in a row rectangle and in a column rectangle with a half share each.
    """
    row, column = block.row_tokens, block.column_tokens
    patches: list[TokenPatch] = []
    if row.count:
        patches += [TokenPatch(row.rows, part, row.tokens, share, True) for part, share in _parts(column, columns)]
    if column.count:
        patches += [TokenPatch(part, column.rows, column.tokens, share, False) for part, share in _parts(row, rows)]
    return patches


def _parts(place: TokenRows, size: int) -> list[tuple[slice, float]]:
    parts = [(slice(0, place.start), 1.0), (place.rows, 0.5), (slice(place.stop, size), 1.0)]
    return [(part, share) for part, share in parts if part.stop > part.start]


def keep_mask(like: Tensor, drop: Drop) -> Tensor:
    """Dropout factors 0 or 1/(1-p) of one block, drawn again from the same key in the backward.

    Four 16-bit draws come out of each 64-bit one, so p is rounded to a multiple of 2^-16.
    """
    generator = torch.Generator(device=like.device).manual_seed(drop.seed)
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    draws = words.view(torch.int16)[: like.numel()].view(like.shape)
    dropped = round(drop.probability * 2**16)
    return (draws >= dropped - 2**15).to(like.dtype).mul_(2**16 / (2**16 - dropped))


def row_products(grad_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta [H, B, R] = rowsum(grad_out * out), in the statistics' dtype."""
    return (grad_out.to(dtype) * out.to(dtype)).sum(dim=-1)


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


def cast_grads(grads: BlockGrads, like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of their tensors."""
    return [grad.to(tensor.dtype) for grad, tensor in zip(grads, like, strict=True)]


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
