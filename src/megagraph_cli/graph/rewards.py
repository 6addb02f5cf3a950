"""What each arm is worth, from the nodes it drew, and the sampling weights that follow (paper: Sampling).

The reward of arm k is the mean over targets of sum_j score_j q_k(j) / phi(j), phi = sum_k p_k q_k over the arms that
are not empty for the target. Given that j was drawn, arm k drew it with probability p_k q_k(j) / phi(j): so
score_j / p_k where arm k drew j and 0 elsewhere has that sum as its mean, and no q is needed. q are the arms as they
are drawn from, the target among their nodes: it is thrown away with its arm, so the ratio is that of the whole rows.

Legend: T targets, N' nodes of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.sampler import ARMS, described

STEP = 2.0
BONUS = 0.01
LEAST = 0.05
"""The paper's constants: w <- w exp(STEP (r + BONUS / p)), p = (1 - 4 LEAST) w / sum(w) + LEAST."""
_GRAIN = 2.0**-16


def importance(
    graph: Graph, targets: NDArray[np.int64], arms: NDArray[np.int8], weights: Sequence[float]
) -> NDArray[np.float64]:
    """1 / p of the arm that drew each node, float64 [T, N']; 0 where none did.

    ``targets`` int64 [T] (-1 = padding), ``arms`` int8 [T, N'] as the sampler recorded them, ``weights`` p [4]; the
    weights of a target are those of its arms that are not empty, scaled to sum to 1.
    """
    p = np.asarray(weights, dtype=np.float64)
    known = np.maximum(targets, 0)
    linked = graph.indptr[known + 1] > graph.indptr[known]
    total = p[:3].sum() * linked + p[3] * described(graph, known)
    inverse = np.append(np.divide(1.0, p, out=np.zeros(len(ARMS)), where=p > 0), 0.0)  # arm -1 reads the last place
    return np.asarray(total[:, None] * inverse[arms])


def updated(
    log_weights: Sequence[float], weights: Sequence[float], rewards: Sequence[float]
) -> tuple[list[float], list[float]]:
    """(log w, p) after one update from rewards r [4]; log w is 0 at most, p are multiples of 2^-16 that sum to 1.

    Rounded, p does not depend on the order in which a plan sums the rewards.
    """
    r, p = np.asarray(rewards, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    log_w = np.asarray(log_weights, dtype=np.float64) + STEP * (r + BONUS / p)
    log_w -= log_w.max()
    share = np.exp(log_w) / np.exp(log_w).sum()
    rounded = np.round(((1.0 - len(ARMS) * LEAST) * share + LEAST) / _GRAIN) * _GRAIN
    rounded[np.argmax(rounded)] += 1.0 - rounded.sum()
    return log_w.tolist(), rounded.tolist()
