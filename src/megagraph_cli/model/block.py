"""One block of biased attention: what a kernel reads and gives, whatever computes it.

Legend: B sequences, R query rows of this rank, C key columns of one owner, H heads, E head dim, M bias channels,
G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megagraph_cli.model.bias import AttentionBias, TokenRows
from megagraph_cli.model.drop import Drop


class BiasWeights(NamedTuple):
    """Learned part of one layer's bias: ``channel`` [M, H] (W_bias), ``offset`` [H] (b_bias), ``token`` [G, H]."""

    channel: Tensor
    offset: Tensor
    token: Tensor


@dataclass(frozen=True)
class Block:
    """One block of the score matrix: channels [M, B, R, C], padded keys [B, C], the tokens' rows and columns.

    ``first_row`` and ``first_column`` are the block's place in the padded sequence.
    """

    features: Tensor
    padded_keys: Tensor
    row_tokens: TokenRows
    column_tokens: TokenRows
    drop: Drop | None
    first_row: int = 0
    first_column: int = 0

    def sequences(self, start: int, stop: int) -> Block:
        """The block of these sequences alone, as views."""
        drop = self.drop
        return replace(
            self,
            features=self.features[:, start:stop],
            padded_keys=self.padded_keys[start:stop],
            drop=drop and drop._replace(first_sequence=drop.first_sequence + start),
        )


class BlockGrads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    channel: Tensor
    offset: Tensor
    token: Tensor


def block_of(bias: AttentionBias, owner: int, drop: Drop | None) -> Block:
    """The block of this rank's rows against ``owner``'s columns."""
    rows, columns = bias.features.shape[3:]
    return Block(
        features=bias.features[owner],
        padded_keys=bias.padded_keys[owner],
        row_tokens=bias.tokens[bias.cp_rank],
        column_tokens=bias.tokens[owner],
        drop=drop,
        first_row=bias.cp_rank * rows,
        first_column=owner * columns,
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
        first_column=bias.cp_rank * bias.features.shape[4],
    )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_products(grad_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta [H, B, R] = rowsum(grad_out * out), in the statistics' dtype."""
    return (grad_out.to(dtype) * out.to(dtype)).sum(dim=-1)


def cast_grads(grads: BlockGrads, like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of their tensors."""
    return [grad.to(tensor.dtype) for grad, tensor in zip(grads, like, strict=True)]
