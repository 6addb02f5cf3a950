"""When a ring's backward computes a rank's own block in two halves, the first of which hides the first hop."""

from __future__ import annotations

PAIRS_TO_HALVE = 32768
"""(row, column) pairs of a block, for each thread, below which two halves cost more than they hide (0.6 ms on a core)
or leave threads idle."""


def first_half(sequences: int, rows: int, threads: int) -> int:
    """Sequences of the first half; all of them where the block of so many ``rows`` is computed at once.

    ``threads``: those that compute (1 where the device does).
    """
    half = -(-sequences // 2)
    return half if sequences * rows * rows >= PAIRS_TO_HALVE * threads else sequences
