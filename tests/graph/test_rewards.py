"""The reward estimate has the mean that the arms' distributions give it; weights follow the paper's rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import random_graph, raw_arms

from megagraph_cli.graph.rewards import importance, updated
from megagraph_cli.graph.sequences import build_sequences

WEIGHTS = (0.4, 0.1, 0.3, 0.2)
NUM_VIEWS = 4000


@pytest.mark.parametrize("target", [0, 7, 3, 28, 29], ids=["hub", "plain", "no features", "isolated", "isolated too"])
def test_the_reward_of_the_arm_that_drew_is_unbiased(target: int) -> None:
    """Draw by draw the estimate less what q_k / phi gives for its nodes: the mean is 0 within 3 standard errors."""
    graph = random_graph("sparse", num_nodes=30)
    arms = raw_arms(graph)[:, target]
    weights = np.array(WEIGHTS) * (arms.sum(1) > 0)
    phi = (weights / weights.sum()) @ arms
    share = np.divide(arms, phi, out=np.zeros_like(arms), where=phi > 0)
    score = np.random.default_rng(1).random(graph.num_nodes)
    differences = []
    for view in range(NUM_VIEWS):
        found = build_sequences(
            graph, np.array([target]), num_sampled=6, num_super=0, weights=np.array(WEIGHTS), rng_seed=5, epoch=0,
            view=view, threads=1,
        )  # fmt: skip
        own = importance(graph, np.array([target]), found.arms, WEIGHTS)[0]
        drawn = found.arms[0] >= 0
        nodes, by = found.nodes[0][drawn], found.arms[0][drawn]
        estimate = np.bincount(by, weights=score[nodes] * own[drawn], minlength=4)
        differences.append(estimate - (score[nodes] * share[:, nodes]).sum(1))
    mean = np.mean(differences, axis=0)
    error = np.std(differences, axis=0, ddof=1) / math.sqrt(NUM_VIEWS)
    assert (np.abs(mean) <= 3 * error + 1e-12).all(), (mean, error)
    # An arm that may have drawn what others draw too is not known to have: there is something to estimate.
    assert (error[weights > 0] > 0).all() or (weights > 0).sum() == 1


def test_nothing_counts_where_no_arm_drew() -> None:
    graph = random_graph("none", num_nodes=30)
    targets = np.array([-1, 29, 4])
    arms = np.array([[-1, -1, -1], [-1, -1, -1], [-1, 2, 0]], dtype=np.int8)
    # Without features the other three arms share all the weight: 0.8 of 1.
    np.testing.assert_allclose(importance(graph, targets, arms, WEIGHTS), [[0, 0, 0], [0, 0, 0], [0, 0.8 / 0.3, 2.0]])


def test_one_update_by_hand() -> None:
    rewards = [0.5, 0.1, 0.2, 0.4]
    log_weights, weights = updated([0.0] * 4, [0.25] * 4, rewards)
    w = np.exp(2 * (np.array(rewards) + 0.01 / 0.25))
    np.testing.assert_allclose(log_weights, np.log(w / w.max()), atol=1e-12)
    # Each is off by half a grain, the largest by what keeps the sum.
    np.testing.assert_allclose(weights, 0.8 * w / w.sum() + 0.05, atol=2 * 2.0**-16)


def test_weights_stay_multiples_that_sum_to_one_however_long_one_arm_wins() -> None:
    log_weights, weights = [0.0] * 4, [0.25] * 4
    for _ in range(500):
        log_weights, weights = updated(log_weights, weights, [3.0, 0.0, 1e-3, 0.0])
        assert sum(weights) == 1.0
        assert all((value * 2**16).is_integer() and value >= 0.05 for value in weights)
    assert weights[0] == pytest.approx(0.85, abs=1e-3)
    # An arm that lost for long comes back in time: what it lost is remembered, not cut off.
    assert log_weights[1] < -100
    for _ in range(600):
        log_weights, weights = updated(log_weights, weights, [0.0, 3.0, 0.0, 0.0])
    assert weights[1] == pytest.approx(0.85, abs=1e-3)
