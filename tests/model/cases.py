"""Random attention inputs on whole sequences, and the shares of them that one context rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import BiasWeights
from megagraph_cli.model.bias import AttentionBias, TokenRows


@dataclass(frozen=True)
class Case:
    """q, k, v [H, B, S, E]; symmetric channels [M, B, S, S]; padded keys [B, S]; the layer's bias weights."""

    layout: RowLayout
    q: Tensor
    k: Tensor
    v: Tensor
    features: Tensor
    padded: Tensor
    weights: BiasWeights
    grad: Tensor


def make_case(
    layout: RowLayout, *, batch: int = 2, heads: int = 2, head_dim: int = 3, powers: int = 3, seed: int = 0
) -> Case:
    """A float64 case; the first row is never padded, some others are; channels touching a global token are zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = layout.sequence_rows

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features = normal(powers, batch, rows, rows)
    features = features + features.transpose(-1, -2)
    begin = layout.num_sampled + layout.num_super
    features[..., begin:] = 0
    features[..., begin:, :] = 0
    padded = torch.rand(batch, rows, generator=generator) < 0.2
    padded[:, 0] = False
    padded[:, begin:] = False
    weights = BiasWeights(normal(powers, heads), normal(heads), normal(layout.num_global, heads))
    return Case(
        layout,
        normal(heads, batch, rows, head_dim),
        normal(heads, batch, rows, head_dim),
        normal(heads, batch, rows, head_dim),
        features,
        padded,
        weights,
        normal(heads, batch, rows, head_dim),
    )


def share(x_HBSE: Tensor, layout: RowLayout, cp_rank: int) -> Tensor:
    """Rows of one rank, padded with zeros to R."""
    full = functional.pad(x_HBSE, (0, 0, 0, layout.padded_rows - layout.sequence_rows))
    rows = layout.rows_of(cp_rank)
    return full[:, :, rows.start : rows.stop].contiguous()


def bias_of(case: Case, layout: RowLayout, cp_rank: int) -> AttentionBias:
    """The AttentionBias of one rank, cut from the whole channels."""
    extra = layout.padded_rows - layout.sequence_rows
    whole = functional.pad(case.features, (0, extra, 0, extra))
    rows = layout.rows_of(cp_rank)
    mine = whole[:, :, rows.start : rows.stop]
    padded = functional.pad(case.padded, (0, extra), value=True)
    batch = case.padded.shape[0]
    return AttentionBias(
        features=torch.stack(mine.split(layout.rows_per_rank, dim=-1)),
        padded_keys=padded.view(batch, layout.cp, layout.rows_per_rank).transpose(0, 1).contiguous(),
        tokens=tuple(TokenRows.of(layout, owner) for owner in range(layout.cp)),
        cp_rank=cp_rank,
        empty=frozenset(owner for owner in range(layout.cp) if layout.rows_of(owner).start >= layout.sequence_rows),
    )
