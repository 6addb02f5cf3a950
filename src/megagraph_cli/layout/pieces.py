"""Gradients are worked on piece by piece, so that what is made beside a piece stays small."""

from __future__ import annotations

PIECE, PIECES = 1 << 16, 64
"""Elements of a piece, at least about; pieces, at most."""


def num_pieces(slots: int, dim: int, in_use: int) -> int:
    """Pieces in which ``slots`` rows of ``dim`` numbers are updated, every so manyth row in one.

    Each begins with one of the ``in_use`` first slots.
    """
    return max(1, min(-(-slots * dim // PIECE), PIECES, in_use))
