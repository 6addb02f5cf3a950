"""The pre-norm transformer layer: y = LN(h); h += W_o attention(y); h += W_2 GELU(W_1 LN(h)).

Legend: B sequences, R rows of this rank, H heads, D hidden, E head dim, M bias channels, G global tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.model.attention import Attend, BiasWeights
from megagraph_cli.model.bias import AttentionBias
from megagraph_cli.model.drop import ATTENTION, RESIDUAL_1, RESIDUAL_2, Drop
from megagraph_cli.model.dropout import drop_add


@dataclass(frozen=True)
class LayerShape:
    """Sizes and dropout rates that all layers of a model share."""

    hidden_dim: int
    ffn_dim: int
    num_heads: int
    bias_powers: int
    dropout: float
    attention_dropout: float


Listener = Callable[[Tensor, Tensor, Tensor, AttentionBias, BiasWeights], None]
"""Told what the target row attends with: (q, k, v, bias, weights), as ``Attend.target`` gets them."""


class BiasedAttention(nn.Module):
    """Multi-head attention with W_bias (M x H) and b_bias (H) of its own; ``attend`` decides where keys live.

    A projection's D channels are [E, H], heads innermost: the compiled kernel reads them where they lie.
    """

    def __init__(self, shape: LayerShape, attend: Attend, index: int) -> None:
        super().__init__()
        d = shape.hidden_dim
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.bias_weight = nn.Parameter(torch.empty(shape.bias_powers, shape.num_heads))
        self.bias_offset = nn.Parameter(torch.empty(shape.num_heads))
        self.num_heads = shape.num_heads
        self.head_dim = d // shape.num_heads
        self.dropout = shape.attention_dropout
        self.attend = attend
        self.index = index
        self.listener: Listener | None = None

    def forward(self, y_BRD: Tensor, bias: AttentionBias, token_GM: Tensor) -> Tensor:
        q, k, v = torch.split(self.qkv(y_BRD), self.qkv.in_features, dim=-1)
        heads = self.attend(self._heads(q), self._heads(k), self._heads(v), bias, *self._learned(bias, token_GM))
        return self._merge(heads)

    def target(self, y_BRD: Tensor, bias: AttentionBias, token_GM: Tensor) -> Tensor:
        """Attention of the first row alone [B, 1, D]: queries for one row, keys and values for all."""
        d = self.qkv.in_features
        weight, offset = self.qkv.weight, self.qkv.bias
        q = functional.linear(y_BRD[:, :1], weight[:d], offset[:d])
        k, v = torch.split(functional.linear(y_BRD, weight[d:], offset[d:]), d, dim=-1)
        learned, drop = self._learned(bias, token_GM)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self.listener is not None:
            self.listener(q, k, v, bias, learned)
        return self._merge(self.attend.target(q, k, v, bias, learned, drop))

    def _learned(self, bias: AttentionBias, token_GM: Tensor) -> tuple[BiasWeights, Drop | None]:
        weights = BiasWeights(self.bias_weight, self.bias_offset, token_GM @ self.bias_weight)
        return weights, bias.drop(self.dropout, self.index, ATTENTION) if self.training else None

    def _heads(self, x_BRD: Tensor) -> Tensor:
        batch, rows, _ = x_BRD.shape
        return x_BRD.view(batch, rows, self.head_dim, self.num_heads).permute(3, 0, 1, 2)

    def _merge(self, heads_HBRE: Tensor) -> Tensor:
        merged: Tensor = self.out(heads_HBRE.permute(1, 2, 3, 0).flatten(2))
        return merged


class Layer(nn.Module):
    """One transformer layer; ``target`` computes it for the target row alone (the last layer needs no other)."""

    def __init__(self, shape: LayerShape, attend: Attend, index: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden_dim)
        self.attention = BiasedAttention(shape, attend, index)
        self.norm2 = nn.LayerNorm(shape.hidden_dim)
        self.up = nn.Linear(shape.hidden_dim, shape.ffn_dim)
        self.down = nn.Linear(shape.ffn_dim, shape.hidden_dim)
        self.dropout = shape.dropout

    def forward(self, x_BRD: Tensor, bias: AttentionBias, token_GM: Tensor) -> Tensor:
        x_BRD = self._add(x_BRD, self.attention(self.norm1(x_BRD), bias, token_GM), bias, RESIDUAL_1)
        return self._add(x_BRD, self._feed_forward(x_BRD), bias, RESIDUAL_2)

    def target(self, x_BRD: Tensor, bias: AttentionBias, token_GM: Tensor) -> Tensor:
        """[B, R, D] -> [B, 1, D]: the first row of this rank."""
        row = self._add(x_BRD[:, :1], self.attention.target(self.norm1(x_BRD), bias, token_GM), bias, RESIDUAL_1)
        return self._add(row, self._feed_forward(row), bias, RESIDUAL_2)

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return out

    def _add(self, x: Tensor, branch: Tensor, bias: AttentionBias, place: int) -> Tensor:
        """x + dropout(branch)."""
        drop = bias.drop(self.dropout, self.attention.index, place) if self.training else None
        return drop_add(branch, x, drop)
