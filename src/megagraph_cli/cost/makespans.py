"""How long a pipeline step takes, for many layer splits at once (docs/cost-model.md proves what is used here).

Arrays are [N, pp]: N splits, seconds of one micro-batch's forward and backward on each stage. ``p2p_s`` is the time
that a message between two stages travels.
"""

from __future__ import annotations

import numpy as np

from megagraph_cli.cost.arrays import Array


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
    from megagraph_cli.cost.levels import longest_by_levels  # imports numba, which only deep pipelines need

    ahead = np.ascontiguousarray(forward, dtype=np.float64)
    back = np.ascontiguousarray(backward, dtype=np.float64)
    beyond = np.asarray(rest_s, dtype=np.float64) + 2 * (pp - ahead.shape[1]) * p2p_s
    return np.asarray(longest_by_levels(ahead, back, float(p2p_s), pp, num_microbatches, beyond), dtype=float)
