"""How many heads a kernel works on: on a CPU those of a model, filled up to whole vectors."""

from __future__ import annotations

LANES = 8
"""Heads of one vector of the compiled kernel."""


def padded_heads(num_heads: int) -> int:
    """Heads that the compiled kernel computes."""
    return -(-num_heads // LANES) * LANES
