"""How long a pipeline step takes, in closed form for many layer splits at once (docs/cost-model.md proves both forms).

Arrays are [N, pp]: N splits, seconds of one micro-batch's forward and backward on each stage. A receive is
part of its stage's work.
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
    pp = forward.shape[1]
    return Paths(forward, backward, pp, num_microbatches).longest()


class Paths:
    """The longest paths through a 1F1B step that stay on its first ``k`` stages, for N splits of them.

    A path through the work is described by three stages: t, where the warm-up ends (F alone before), u, where the
    cool-down begins (B alone after), and i, where the steady pairs of F and B are spent. ``forward`` and ``backward``
    are [N, k] of a pipeline of ``pp`` stages.
    """

    def __init__(self, forward: Array, backward: Array, pp: int, num_microbatches: int) -> None:
        self.spare = num_microbatches - pp
        stages = np.arange(forward.shape[1])
        self.stages = stages
        self.both = forward + backward
        self.sums = np.cumsum(self.both, axis=1)
        # What a path spends in a warm-up that ends on t, and in a cool-down that begins on u.
        self.warm = (pp - 1 - stages) * np.maximum.accumulate(forward, axis=1)
        self.cool = (pp - 1 - stages) * np.maximum.accumulate(backward, axis=1)
        self.early = (self.spare + stages) * self.both - self.sums
        """What the steady pairs on a stage i before both t and u cost, but for the way down to the nearer of them."""
        self.best_early = np.maximum.accumulate(self.early, axis=1)

    def longest(self) -> Array:
        """[N] seconds of the longest path with t, u and i among the k stages."""
        best = self._within()
        if self.stages.size > 1:
            best = np.maximum(best, self._beyond())
        return best

    def _within(self) -> Array:
        """Paths whose steady stage is not beyond both t and u."""
        best = np.full(len(self.both), -np.inf)
        for near in self.stages:
            deepest = np.maximum.accumulate(self.both[:, near:], axis=1)
            steady = self.sums[:, near:] + (self.spare + near) * deepest
            if near:
                returning = self.sums[:, near:] + (self.sums[:, near] + self.best_early[:, near - 1])[:, None]
                steady = np.maximum(steady, returning)
            for one, other in ((self.warm, self.cool), (self.cool, self.warm)):
                best = np.maximum(best, one[:, near] + (other[:, near:] + steady).max(axis=1))
        return best

    def _beyond(self) -> Array:
        """Paths that go further down than t and u for their steady pairs, of which none may be fewer than zero."""
        best = np.full(len(self.both), -np.inf)
        for i in self.stages[1:]:
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
            best = np.maximum(best, ends + self.sums[:, i] + (self.spare - i) * self.both[:, i])
        return best

    def through_the_end(self, total: Array) -> Array:
        """[N] seconds of the longest path that also visits the last stage, beyond the k known ones.

        ``total`` [N] are F and B of all stages, each once, or less: the result is then a lower bound.
        """
        returning = total + self.best_early[:, -1]
        best = returning
        for one in (self.warm, self.cool):
            for near in self.stages:
                steady = (self.spare + near) * self.both[:, near:].max(axis=1)
                if near:
                    steady = np.maximum(steady, self.sums[:, near] + self.best_early[:, near - 1])
                best = np.maximum(best, one[:, near] + steady)
        return np.asarray(total + best, dtype=float)
