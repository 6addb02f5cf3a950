"""The compiled pass over a 1F1B step, level by level (docs/cost-model.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from megagraph_cli.cost.arrays import Array


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code, kept for later searches; where no place can be written every search compiles it, in a second."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba's: "no locator available"
        return njit(nogil=True)(function)


@_compiled
def longest_by_levels(forward: Array, backward: Array, p2p_s: float, pp: int, count: int, beyond: Array) -> Array:
    """Start of every piece of work, level by level: level h holds F_s(h - s) and B_s(h - pp + 1) of every stage s."""
    splits, known = forward.shape
    longest = np.empty(splits)
    ahead, back, passed = np.empty(known), np.empty(known), np.empty(count)
    for split in range(splits):
        f, b = forward[split], backward[split]
        for level in range(count + pp - 1):
            # From the last stage back: what a stage needs from the one before is of the level before.
            for s in range(min(known - 1, level), max(0, level - count + 1) - 1, -1):
                start = 0.0
                if s < level:
                    start = ahead[s] + f[s] if level < pp else back[s] + b[s]
                if s > 0:
                    arrival = ahead[s - 1] + f[s - 1]
                    if s < level:
                        arrival = max(arrival, ahead[s])
                    start = max(start, arrival + p2p_s)
                ahead[s] = start
                if s == known - 1:
                    passed[level - s] = start + f[s]
            if level < pp - 1:
                continue
            for s in range(known - 1, -1, -1):
                start = ahead[s] + f[s] if level < count + s else back[s] + b[s]
                if s < pp - 1:
                    if s < known - 1:
                        start = max(start, back[s + 1] + b[s + 1] + p2p_s)
                    else:
                        start = max(start, passed[level - pp + 1] + beyond[split])
                    if level >= pp:
                        start = max(start, back[s] + p2p_s)
                back[s] = start
        longest[split] = back[0] + b[0]
    return longest
