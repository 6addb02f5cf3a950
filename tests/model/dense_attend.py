"""The reference that every Attend must equal: plain attention by autograd, scores stored, bias spelled out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megagraph_cli.model.attention import MASKED, BiasWeights, Block, Drop, block_of, target_block_of
from megagraph_cli.model.bias import AttentionBias, TokenRows
from megagraph_cli.model.drop import keep_mask


class DenseAttend:
    """Plain softmax(q k^T / sqrt(E) + bias) v by autograd."""

    def __call__(
        self,
        q_HBRE: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        return self._attend(q_HBRE, k_HBRE, v_HBRE, block_of(bias, 0, drop), weights)

    def target(
        self,
        q_HB1E: Tensor,
        k_HBRE: Tensor,
        v_HBRE: Tensor,
        bias: AttentionBias,
        weights: BiasWeights,
        drop: Drop | None,
    ) -> Tensor:
        return self._attend(q_HB1E, k_HBRE, v_HBRE, target_block_of(bias, drop), weights)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> Tensor:
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        logits = logits + torch.einsum("mbrc,mh->hbrc", block.features, weights.channel)
        logits = logits + weights.offset.view(-1, 1, 1, 1) + _dense_token_bias(block, weights.token, logits.shape)
        logits = logits.masked_fill(block.padded_keys[None, :, None, :], MASKED)
        probabilities = torch.softmax(logits, dim=-1)
        if block.drop is not None:
            probabilities = probabilities * _keep(probabilities, block)
        return probabilities @ v


def _keep(probabilities: Tensor, block: Block) -> Tensor:
    assert block.drop is not None
    heads, batch, rows, columns = probabilities.shape
    shape = (heads, batch, rows, columns)
    return keep_mask(block.drop, shape, first_row=block.first_row, first_column=block.first_column, like=probabilities)


def _dense_token_bias(block: Block, token_GH: Tensor, shape: torch.Size) -> Tensor:
    """Bias of the global tokens [H, 1, R, C], pair by pair: the mean of the vectors of the tokens that take part."""
    rows, columns = shape[2], shape[3]
    row_of, column_of = _token_of(block.row_tokens, rows), _token_of(block.column_tokens, columns)
    share = np.zeros((token_GH.shape[0], rows, columns))
    for r in range(rows):
        for c in range(columns):
            ends = [end for end in (row_of[r], column_of[c]) if end is not None]
            for end in ends:
                share[end, r, c] += 1 / len(ends)
    return torch.einsum("gh,grc->hrc", token_GH, torch.from_numpy(share).to(token_GH.dtype)).unsqueeze(1)


def _token_of(place: TokenRows, size: int) -> list[int | None]:
    return [place.first + i - place.start if place.start <= i < place.stop else None for i in range(size)]
