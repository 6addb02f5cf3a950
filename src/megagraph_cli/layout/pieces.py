"""Gradients are worked on piece by piece, so that what is made beside a piece stays small."""

from __future__ import annotations

PIECE, PIECES = 1 << 16, 64
"""Elements of a piece, at least about; pieces, at most."""
CUDA_PIECE = 1 << 22
"""On cuda: about what takes a kernel as long as its launch. With smaller pieces the device would wait for the host."""


def num_pieces(slots: int, dim: int, in_use: int, device: str) -> int:
    """Pieces in which ``slots`` rows of ``dim`` numbers are updated on a kind of device, every so manyth row in one.

    Each begins with one of the ``in_use`` first slots.
    """
    piece = CUDA_PIECE if device == "cuda" else PIECE
    return max(1, min(-(-slots * dim // piece), PIECES, in_use))
