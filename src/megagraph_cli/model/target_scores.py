"""How much the target attends to each of its nodes in the last layer: what adaptive sampling rewards (paper: Sampling).

Only evaluation asks for it, so it is plain torch and apart from the attention kernels, which keep no probabilities.

Legend: B sequences, R rows of this rank, H heads, E head dim, M bias channels, G global tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megagraph_cli.model.attention import MASKED, BiasWeights
from megagraph_cli.model.bias import AttentionBias


class TargetRow(Protocol):
    """Row 0 as the context ranks of a sequence share it."""

    def query(self, q_HB1E: Tensor) -> Tensor:
        """The query of row 0, on every rank."""
        ...

    def total(self, lse_HB: Tensor) -> Tensor:
        """The log-sum-exp over the columns of all ranks from that over this rank's."""
        ...


class LocalRow:
    """Every row of a sequence lives here."""

    def query(self, q_HB1E: Tensor) -> Tensor:
        return q_HB1E

    def total(self, lse_HB: Tensor) -> Tensor:
        return lse_HB


@torch.no_grad()
def target_probabilities(
    q_HB1E: Tensor, k_HBRE: Tensor, bias: AttentionBias, weights: BiasWeights, row: TargetRow
) -> Tensor:
    """Attention probabilities [H, B, R] of row 0 over this rank's rows, without dropout; all ranks sum to 1.

    The arguments are those of ``Attend.target``. float32 (float64 for float64).
    """
    stats = torch.float64 if k_HBRE.dtype == torch.float64 else torch.float32
    with torch.autocast(k_HBRE.device.type, enabled=False):
        # The channels are symmetric, so row 0 of these columns is column 0 of these rows.
        channels_MBR = bias.features[0][..., 0].to(stats)
        scores = torch.einsum("mbr,mh->hbr", channels_MBR, weights.channel.to(stats))
        scores += weights.offset.to(stats)[:, None, None]
        scores += (row.query(q_HB1E).to(stats) * k_HBRE.to(stats)).sum(-1) * k_HBRE.shape[-1] ** -0.5
        here = bias.tokens[bias.cp_rank]
        if here.count:
            scores[..., here.rows] += weights.token[here.tokens].to(stats).T[:, None, :]
        scores.masked_fill_(bias.padded_keys[bias.cp_rank], MASKED)
        return (scores - row.total(scores.logsumexp(-1))[..., None]).exp()


@torch.no_grad()
def node_scores(probabilities_HBR: Tensor, v_HBRE: Tensor) -> Tensor:
    """Scores [B, R]: the mean over heads of the attention to a row times the norm of its value."""
    lengths_HBR: Tensor = torch.linalg.vector_norm(v_HBRE, dim=-1, dtype=probabilities_HBR.dtype)
    return (probabilities_HBR * lengths_HBR).mean(0)
