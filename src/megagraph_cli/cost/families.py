"""Paths through a 1F1B step whose length depends on the layers of one stage and on how many stand before it.

A path is a walk over the stages that spends levels: each level buys F + B of one stage, and each crossing of a boundary
there and back two transfers (docs/cost-model.md). What a walk spends beyond its way down and up goes to stretches of
stages; those that begin or end with the given stage or reach over all have sums that one look-up tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.cost.arrays import Array


@dataclass(frozen=True)
class Weights:
    """How often a path contains what, for one stage.

    ``before``, ``own``, ``after``: F + B of all stages before it, its own, of all after it; ``stays``: its own or a
    transfer, whichever is longer; ``either``: the longer of what a warm-up and a cool-down spend on it; ``each``: both;
    ``crossings``: two transfers.
    """

    before: int = 0
    own: int = 0
    after: int = 0
    stays: int = 0
    either: int = 0
    each: int = 0
    crossings: int = 0

    def plus(self, other: Weights, times: int = 1) -> Weights:
        return Weights(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)))

    @property
    def values(self) -> tuple[int, ...]:
        return (self.before, self.own, self.after, self.stays, self.either, self.each, self.crossings)


@lru_cache(maxsize=4096)
def families(stage: int, pp: int, num_microbatches: int) -> Array:
    """[M, 7] the weights of paths of a 1F1B step (K at least pp) that look at ``stage``; none is below another."""
    found = np.array(sorted({weights.values for weights in _paths(stage, pp, num_microbatches)}), dtype=float)
    # One is below another where it is so in each of these: a stay is at least F + B, both at least the longer.
    ordered = found.copy()
    ordered[:, 1] += found[:, 3]
    ordered[:, 4] += found[:, 5]
    below: NDArray[np.bool_] = np.all(ordered[:, None, :] <= ordered[None, :, :], axis=2)
    np.fill_diagonal(below, False)
    return np.asarray(found[~np.any(below, axis=1)], dtype=float)


def _paths(stage: int, pp: int, num_microbatches: int) -> Iterator[Weights]:
    """Walks by where their warm-up ends and their cool-down begins: on the stage or on the last one."""
    head = Weights(before=1, own=1, crossings=stage), stage + 1
    rest = Weights(own=1, after=1, crossings=pp - 1 - stage), pp - stage
    full = Weights(before=1, own=1, after=1, crossings=pp - 1), pp
    ends = pp - 1 - stage
    spare = num_microbatches - pp + stage
    onwards, anywhere = [rest], [head, rest, full]
    down = head[0].plus(Weights(each=ends))
    # Both on the stage; the second goes on to the last stage once, the last two pass the stages before once more.
    yield from _filled(down, spare, onwards)
    yield from _filled(full[0].plus(Weights(each=ends)), spare - ends, onwards)
    yield from _filled(down.plus(head[0]), spare - head[1], anywhere)
    yield from _filled(full[0].plus(head[0]).plus(Weights(each=ends)), spare - ends - head[1], anywhere)
    # One on the stage, the other on the last one.
    through = full[0].plus(Weights(either=ends))
    yield from _filled(through, spare, onwards)
    yield from _filled(through.plus(head[0]), spare - head[1], anywhere)
    # Both on the last stage.
    yield from _filled(full[0].plus(rest[0]), num_microbatches - 1 - rest[1], onwards)
    yield from _filled(full[0].plus(full[0]), num_microbatches - 1 - full[1], anywhere)


def _filled(base: Weights, levels: int, stretches: list[tuple[Weights, int]]) -> Iterator[Weights]:
    """The path with its spare levels spent on as many of one stretch as there is room for, then of another, then stays.

    None where there are fewer levels than none.
    """
    if levels < 0:
        return
    options = [(Weights(), levels + 1), *stretches]
    for first, length in options:
        for second, size in options:
            left = levels % length
            times = base.plus(first, levels // length).plus(second, left // size)
            yield times.plus(Weights(stays=left % size))


def bounds_of(weights: Array, own: Array, ends: tuple[Array, Array], p2p_s: float) -> tuple[Array, Array, Array]:
    """A path's length = before [M] x (sum before) + after [M] x (sum after) + what is returned third, [M, n].

    ``own`` [n] is F + B of the stage with 1, 2, ... layers, ``ends`` what it spends on one level of a warm-up and of a
    cool-down.
    """
    before, times, after, stays, either, each, crossings = weights.T
    warm, cool = ends
    known = times[:, None] * own + stays[:, None] * np.maximum(own, p2p_s)
    known += either[:, None] * np.maximum(warm, cool) + each[:, None] * (warm + cool)
    return before, after, known + 2 * p2p_s * crossings[:, None]
