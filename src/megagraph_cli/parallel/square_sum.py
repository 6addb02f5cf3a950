"""Squared norms in float64 of gradients of any size, without a copy of that size."""

from __future__ import annotations

import torch
from torch import Tensor

from megagraph_cli.layout.pieces import PIECE, PIECES


def square_sum(values: Tensor) -> Tensor:
    """Sum of squares of a contiguous tensor: float64 []."""
    flat = values.view(-1)
    # A sum in float64 copies what it sums on a CPU: piece by piece the copies stay small.
    pieces = torch.split(flat, max(PIECE, -(-flat.numel() // PIECES)))
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square_().sum()
