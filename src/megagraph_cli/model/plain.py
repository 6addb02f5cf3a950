"""The block kernel in plain torch: for every device, and what the compiled kernel must equal.

Legend: B sequences, R query rows of this rank, C key columns of one owner, H heads, E head dim, M bias channels,
G global tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megagraph_cli.model.bias import TokenRows
from megagraph_cli.model.block import BiasWeights, Block, BlockGrads, statistics_dtype
from megagraph_cli.model.drop import keep_mask

MASKED = -1e30
"""Added to the scores of padded keys. Finite, so that a block of padding alone yields no NaN and weighs nothing."""


class PlainKernel:
    """Forward and backward of one block in plain torch; softmax statistics in float32 (float64 for float64).

    Scores exist for so many rows at a time that there are at most ``tile_scores`` of them.
    """

    def __init__(self, tile_scores: int = 1 << 24) -> None:
        self.tile_scores = tile_scores

    def scores(self, q: Tensor, k: Tensor, block: Block, weights: BiasWeights) -> Tensor:
        """Biased, masked scores [H, B, R, C] in the statistics' dtype."""
        _, batch, rows, _ = q.shape
        columns = k.shape[2]
        stats = statistics_dtype(q.dtype)
        scores = (q @ k.transpose(-1, -2)).to(stats).mul_(q.shape[-1] ** -0.5)
        scores += (block.features.movedim(0, -1) @ weights.channel.to(block.features.dtype)).movedim(-1, 0)
        scores += weights.offset.to(stats).view(-1, 1, 1, 1)
        for patch in _token_patches(block, rows, columns):
            by_head = weights.token[patch.tokens].to(stats).T.unsqueeze(1) * patch.share
            scores[:, :, patch.rows, patch.columns] += by_head.unsqueeze(-1 if patch.tokens_are_rows else -2)
        return scores.masked_fill_(block.padded_keys.view(1, batch, 1, columns), MASKED)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        """Normalised output of this block alone [H, B, R, E] and its log-sum-exp [H, B, R]."""
        # The backward runs without autocast: the scores it recomputes must be the ones computed here.
        with torch.autocast(q.device.type, enabled=False):
            tiles = list(self._tiles(block, q, k.shape[2]))
            if len(tiles) == 1:
                return self._forward(q, k, v, block, weights)
            parts = [self._forward(q[:, :, rows], k, v, tile, weights) for rows, tile in tiles]
            out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
            return out, lse

    def _tiles(self, block: Block, q: Tensor, columns: int) -> Iterator[tuple[slice, Block]]:
        """Consecutive rows of the block whose scores stay within ``tile_scores``."""
        heads, batch, rows, _ = q.shape
        step = max(1, self.tile_scores // (heads * batch * columns))
        if step >= rows:
            yield slice(0, rows), block
            return
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            yield part, rows_of_block(block, part)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        scores = self.scores(q, k, block, weights)
        top = scores.amax(dim=-1, keepdim=True)
        scores.sub_(top).exp_()
        total = scores.sum(dim=-1, keepdim=True)
        lse = (top + total.log()).squeeze(-1)
        if block.drop is not None:
            scores *= _keep(scores, block)
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
        whole: list[Tensor] | None = None
        by_row: list[Tensor] = []
        for rows, tile in self._tiles(block, q, k.shape[2]):
            q_part, grad_part = q[:, :, rows], grad_out[:, :, rows]
            grads = self._backward(grad_part, delta[:, :, rows], lse[:, :, rows], q_part, k, v, tile, weights)
            by_row.append(grads.q)
            rest = list(grads[1:])
            whole = rest if whole is None else [a.add_(b) for a, b in zip(whole, rest, strict=True)]
        assert whole is not None
        return BlockGrads(by_row[0] if len(by_row) == 1 else torch.cat(by_row, dim=2), *whole)

    def _backward(
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
        rows = q.shape[2]
        prob = self.scores(q, k, block, weights).sub_(lse.unsqueeze(-1)).exp_()
        grad_prob = (grad_out @ v.transpose(-1, -2)).to(prob.dtype)
        dropped = prob
        if block.drop is not None:
            keep = _keep(prob, block)
            dropped = prob * keep
            grad_prob *= keep
        grad_v = dropped.to(v.dtype).transpose(-1, -2) @ grad_out.to(v.dtype)
        grad_scores = grad_prob.sub_(delta.unsqueeze(-1)).mul_(prob)
        by_pair = block.features.movedim(0, -1).flatten(0, 2)
        grad_channel = by_pair.T @ grad_scores.flatten(1).to(by_pair.dtype).T
        grad_token = torch.zeros_like(weights.token, dtype=prob.dtype)
        for patch in _token_patches(block, rows, k.shape[2]):
            other = 3 if patch.tokens_are_rows else 2
            by_head = grad_scores[:, :, patch.rows, patch.columns].sum(dim=(1, other))
            grad_token[patch.tokens] += by_head.T * patch.share
        narrow = grad_scores.to(q.dtype)
        return BlockGrads(
            q=narrow @ k * q.shape[-1] ** -0.5,
            k=narrow.transpose(-1, -2) @ q * q.shape[-1] ** -0.5,
            v=grad_v,
            channel=grad_channel,
            offset=grad_scores.sum(dim=(1, 2, 3)),
            token=grad_token,
        )


def rows_of_block(block: Block, part: slice) -> Block:
    """The block of some of its rows."""
    tokens = block.row_tokens
    start, stop = (min(max(place, part.start), part.stop) for place in (tokens.start, tokens.stop))
    return replace(
        block,
        features=block.features[:, :, part],
        row_tokens=TokenRows(start - part.start, stop - part.start, tokens.first + start - tokens.start),
        first_row=block.first_row + part.start,
    )


def _keep(scores: Tensor, block: Block) -> Tensor:
    assert block.drop is not None
    heads, batch, rows, columns = scores.shape
    return keep_mask(
        block.drop,
        (heads, batch, rows, columns),
        first_row=block.first_row,
        first_column=block.first_column,
        like=scores,
    )


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
