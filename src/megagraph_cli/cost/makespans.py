"""How long a pipeline step takes, for many layer splits at once (docs/cost-model.md proves what is used here).

Arrays are [N, pp]: N splits, seconds of one micro-batch's forward and backward on each stage. ``p2p_s`` is the time
that a message between two stages travels.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from megagraph_cli.cost.terms import Array


def gpipe_makespans(forward: Array, backward: Array, p2p_s: float, num_microbatches: int) -> Array:
    """[N] seconds: all passes and transfers once, and K - 1 more of the slowest way down and of the slowest way up."""
    crossings = forward.shape[1] - 1
    link_s = p2p_s if crossings else 0.0
    passes = forward.sum(axis=1) + backward.sum(axis=1) + 2 * crossings * p2p_s
    slowest = np.maximum(forward.max(axis=1), link_s) + np.maximum(backward.max(axis=1), link_s)
    return np.asarray(passes + (num_microbatches - 1) * slowest, dtype=float)


def one_f_one_b_makespans(forward: Array, backward: Array, p2p_s: float, num_microbatches: int) -> Array:
    """[N] seconds of 1F1B; K is at least pp."""
    pp = forward.shape[1]
    return longest_paths(forward, backward, p2p_s, pp, num_microbatches, np.zeros(len(forward)))


def longest_paths(
    forward: Array, backward: Array, p2p_s: float, pp: int, num_microbatches: int, rest_s: Array
) -> Array:
    """[N] seconds of the longest path through a 1F1B step of ``pp`` stages, as far as its first k stages tell.

    ``forward`` and ``backward`` are [N, k]; ``rest_s`` [N] is F + B of one micro-batch on all later stages, or less:
    the result is then a lower bound of the step, and for k = pp the step itself.
    """
    ahead = np.ascontiguousarray(forward, dtype=np.float64)
    back = np.ascontiguousarray(backward, dtype=np.float64)
    beyond = np.asarray(rest_s, dtype=np.float64) + 2 * (pp - ahead.shape[1]) * p2p_s
    return np.asarray(_longest_paths(ahead, back, float(p2p_s), pp, num_microbatches, beyond), dtype=float)


@njit(nogil=True, cache=True)
def _longest_paths(forward: Array, backward: Array, p2p_s: float, pp: int, count: int, beyond: Array) -> Array:
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
