"""How long a pipeline step takes, in closed form for many layer splits at once (docs/cost-model.md proves both forms).

Arrays are [N, pp]: N splits, seconds of one micro-batch's forward and backward on each stage. A receive is part of its
stage's work.
"""

from __future__ import annotations

import numpy as np

from megagraph_cli.cost.terms import Array


def gpipe_makespans(forward: Array, backward: Array, num_microbatches: int) -> Array:
    """[N] seconds: all passes once, and K - 1 more of the slowest forward and of the slowest backward."""
    passes = forward.sum(axis=1) + backward.sum(axis=1)
    slowest = forward.max(axis=1) + backward.max(axis=1)
    return np.asarray(passes + (num_microbatches - 1) * slowest, dtype=float)


def one_f_one_b_makespans(forward: Array, backward: Array, num_microbatches: int) -> Array:
    """[N] seconds of 1F1B; K is at least pp."""
    paths = Paths(forward, backward, forward.shape[1], num_microbatches)
    return np.asarray(np.max([paths.down_to(stage) for stage in range(forward.shape[1])], axis=0), dtype=float)


class Paths:
    """The longest paths through a 1F1B step of ``pp`` stages, as far as its first k stages tell, for N splits of them.

    A path through the work is described by three stages: t, where the warm-up ends (F alone before), u, where the
    cool-down begins (B alone after), and i, where the steady pairs of F and B are spent. ``forward`` and ``backward``
    are [N, k].
    """

    def __init__(self, forward: Array, backward: Array, pp: int, num_microbatches: int) -> None:
        self.spare = num_microbatches - pp
        self.stages = np.arange(forward.shape[1])
        self.both = forward + backward
        self.sums = np.cumsum(self.both, axis=1)
        # What a path spends in a warm-up that ends on t, and in a cool-down that begins on u.
        self.warm = (pp - 1 - self.stages) * np.maximum.accumulate(forward, axis=1)
        self.cool = (pp - 1 - self.stages) * np.maximum.accumulate(backward, axis=1)
        # The steady pairs on a stage before both t and u, but for the way there and back from the nearer of them.
        early = (self.spare + self.stages) * self.both - self.sums
        self.early = np.maximum.accumulate(early, axis=1)

    def down_to(self, deepest: int) -> Array:
        """[N] seconds of the longest path whose t, u and i are at most ``deepest`` and one of them is."""
        steady = self._steady(deepest + 1) + self.sums[:, deepest : deepest + 1]
        ends = [
            one[:, deepest] + (other[:, : deepest + 1] + steady).max(axis=1)
            for one, other in ((self.warm, self.cool), (self.cool, self.warm))
        ]
        if deepest:
            ends.append(self._beyond(deepest))
        return np.asarray(np.max(ends, axis=0), dtype=float)

    def _steady(self, known: int) -> Array:
        """[N, known] seconds of the steady pairs, but for one on each stage, where the nearer of t and u is given.

        They are spent on the best stage from there to the deepest, or on an earlier one, with a second way down.
        """
        both = self.both[:, :known]
        onwards = np.maximum.accumulate(both[:, ::-1], axis=1)[:, ::-1]
        steady = np.asarray((self.spare + self.stages[:known]) * onwards, dtype=float)
        if known > 1:
            steady[:, 1:] = np.maximum(steady[:, 1:], self.sums[:, 1:known] + self.early[:, : known - 1])
        return steady

    def _beyond(self, i: int) -> Array:
        """Paths that go further down than t and u for their steady pairs, of which none may be fewer than zero."""
        pair = self.both[:, i : i + 1]
        warm = self.warm[:, :i] + self.stages[:i] * pair
        cool = self.cool[:, :i] + self.stages[:i] * pair
        needed = i - self.spare  # t + u at least
        if needed <= 0:
            ends = warm.max(axis=1) + cool.max(axis=1)
        else:
            from_u = np.maximum.accumulate(cool[:, ::-1], axis=1)[:, ::-1]
            least_u = np.maximum(needed - self.stages[:i], 0)
            possible = least_u < i
            ends = (warm[:, possible] + from_u[:, least_u[possible]]).max(axis=1, initial=-np.inf)
        return np.asarray(ends + self.sums[:, i] + (self.spare - i) * self.both[:, i], dtype=float)

    def through_the_end(self, total: Array) -> Array:
        """[N] seconds of the longest path that also visits the last stage, beyond the k known ones.

        ``total`` [N] are F and B of all stages, each once, or less: the result is then a lower bound.
        """
        steady = self._steady(len(self.stages))
        near = np.maximum((self.warm + steady).max(axis=1), (self.cool + steady).max(axis=1))
        return np.asarray(total + np.maximum(near, total + self.early[:, -1]), dtype=float)
