"""The best layer split under 1F1B: a table of bounds by stage and layers placed, then the splits that it leaves.

What some of the step's longest paths take (``families``) depends only on the layers of one stage and on how many stand
before it. A table over (stage, layers placed) therefore bounds every completion of a partial split as far as these
paths go; mostly the bound is met and nothing is left to search. Otherwise partial splits are extended stage by stage,
each bounded by all paths through its known stages (docs/cost-model.md proves both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.cost.arrays import Array
from megagraph_cli.cost.families import bounds_of, families
from megagraph_cli.cost.makespans import longest_paths, one_f_one_b_makespans
from megagraph_cli.cost.partition import Caps, Choice, caps_within, fits
from megagraph_cli.cost.setting import StageTables

Splits = NDArray[np.int64]
"""[N, k] layers beyond the first of each of k stages."""

TOLERANCE = 1e-9
"""Times closer than this, relatively, are equal: far above rounding (1e-14 over a step), far below any measurement."""
MOST_WORK, MOST_WORK_IN_ALL, LEAST_WORK = 50_000_000, 250_000_000, 2_000_000
"""Pieces of work, on paths of partial splits, that one answer may look at before it is given with the gap that is left
(some tenths of a second); that all answers of a setting may; that each may still once those are spent."""
BLOCK = 128
MOVED_STAGES = 3
COARSE = 9


@dataclass(frozen=True)
class _Bounds:
    """For one memory limit: ``caps`` by stage; ``rest[s][p]`` bounds the pipeline, p layers being placed."""

    caps: Caps
    rest: list[Array]


class OneFOneB:
    """Best splits of one 1F1B setting; what does not depend on the memory limit is worked out once.

    ``max_gap`` is the most, as a fraction, by which an answer given so far may be beaten: 0 unless ``MOST_WORK`` ran
    out.
    """

    def __init__(self, tables: StageTables) -> None:
        assert tables.setting.schedule == "1f1b"
        self.tables = tables
        self.max_gap = 0.0
        self._work_left = MOST_WORK_IN_ALL
        self._both = [f + b for f, b in zip(tables.forward_s, tables.backward_s, strict=True)]
        self._tail_floor = max(float(tail[0]) for tail in tables.tail_s)
        self._after = _least_sums(list(reversed(self._both)))
        self._before = _least_sums(self._both)
        self.total_s = float(self._after[tables.pp][-1])
        self.stage_bounds = [self._stage_bound(stage) for stage in range(tables.pp)]
        self._families: list[Array] | None = None
        self._solved: dict[tuple[int, ...], _Bounds] = {}

    def _ends(self, stage: int) -> tuple[Array, Array]:
        """What the stage spends on one level of a warm-up and of a cool-down: messages follow each other no faster."""
        tables = self.tables
        forward, backward = tables.forward_s[stage], tables.backward_s[stage]
        received, returned = tables.transfer_s * (stage > 0), tables.transfer_s * (stage < tables.pp - 1)
        return np.maximum(forward, received), np.maximum(backward, returned)

    def _stage_bound(self, stage: int) -> Array:
        """Least step time when ``stage`` alone holds n layers, and its other work.

        A round trip of all, then as often as there is time the stage's own work, or whole round trips.
        """
        tables, pp = self.tables, self.tables.pp
        count = tables.setting.num_microbatches
        trip_s = self.total_s + 2 * (pp - 1) * tables.transfer_s
        stays = np.maximum(self._both[stage], tables.transfer_s)
        ends = (pp - 1 - stage) * np.maximum(*self._ends(stage))
        spare = count - pp + stage
        work = np.maximum(spare * stays, spare // pp * trip_s + spare % pp * stays) + ends
        if count > pp:
            # Without a warm-up or cool-down on this stage; only a second round trip leads there again.
            work = np.maximum(work, (count - 1) // pp * trip_s + (count - 1) % pp * stays)
        return np.asarray(trip_s + work + tables.tail_s[stage], dtype=float)

    def quick_bound(self, need_bytes: int) -> float:
        """A lower bound of the step time within ``need_bytes`` from single stages; infinite where nothing fits."""
        tables = self.tables
        caps = caps_within(tables, need_bytes)
        if not fits(caps, tables.num_layers):
            return math.inf
        values = np.unique(np.concatenate(self.stage_bounds))
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            limit = float(values[middle]) * (1 + 3 * TOLERANCE)
            within = [
                min(cap, int(np.searchsorted(bound, limit, side="left")))
                for cap, bound in zip(caps, self.stage_bounds, strict=True)
            ]
            if fits(within, tables.num_layers):
                high = middle
            else:
                low = middle + 1
        return max(float(values[low]), tables.host_s)

    def solve(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        """The fastest split within ``need_bytes``, or None where none is faster than ``cutoff_s``.

        First the shortest pipeline, then the shortest among splits with a shorter reduction and optimizer, and so on
        while that can pay.
        """
        tables = self.tables
        caps = caps_within(tables, need_bytes)
        best: Splits | None = None
        best_s = cutoff_s
        while fits(caps, tables.num_layers):
            bounds = self._bounds(caps)
            shortest_s = float(bounds.rest[0][0])
            if max(shortest_s + self._tail_floor, tables.host_s) >= best_s * (1 - TOLERANCE):
                break
            split = self._first(bounds)
            pipeline_s, tail_s = float(self._makespans(split)[0]), float(self._tails(split)[0])
            step_s = max(pipeline_s + tail_s, tables.host_s)
            if step_s < best_s * (1 - TOLERANCE):
                best, best_s = split, step_s
            if pipeline_s > shortest_s * (1 + TOLERANCE):
                best, best_s = self._exhaust(bounds, best, best_s)
                break
            caps = [
                min(cap, int(np.searchsorted(tail, tail_s * (1 - TOLERANCE), side="left")))
                for cap, tail in zip(caps, tables.tail_s, strict=True)
            ]
        if best is None:
            return None
        held = tuple(int(extra) + 1 for extra in best[0])
        peak = max(int(table[layers - 1]) for table, layers in zip(tables.peak_bytes, held, strict=True))
        return Choice(float(best_s), peak, held)

    def _times(self, splits: Splits) -> tuple[Array, Array]:
        """Forward and backward seconds [N, k] of partial splits."""
        stages = range(splits.shape[1])
        forward = np.stack([self.tables.forward_s[stage][splits[:, stage]] for stage in stages], axis=1)
        backward = np.stack([self.tables.backward_s[stage][splits[:, stage]] for stage in stages], axis=1)
        return forward, backward

    def _tails(self, splits: Splits) -> Array:
        tails = [self.tables.tail_s[stage][splits[:, stage]] for stage in range(splits.shape[1])]
        return np.asarray(np.maximum(np.max(tails, axis=0), self._tail_floor), dtype=float)

    def _steps_s(self, splits: Splits) -> Array:
        """[N] step times of whole splits, reduction and optimizer included."""
        return np.maximum(self._makespans(splits) + self._tails(splits), self.tables.host_s)

    def _makespans(self, splits: Splits) -> Array:
        tables = self.tables
        return one_f_one_b_makespans(*self._times(splits), tables.transfer_s, tables.setting.num_microbatches)

    def _family(self, stage: int) -> Array:
        """[p, m] seconds: a bound of the pipeline with p extra layers before the stage and m on it."""
        tables, pp, width = self.tables, self.tables.pp, self.tables.width
        weights = families(stage, pp, tables.setting.num_microbatches)
        before, after = self._before[stage], self._after[pp - 1 - stage]
        ahead, behind, known = bounds_of(weights, self._both[stage], self._ends(stage), tables.transfer_s)
        placed, extra = np.arange(width)[:, None], np.arange(width)[None, :]
        left = np.maximum(width - 1 - placed - extra, 0)
        # Paths that are the longest nowhere on a coarse grid are left out: the bound may be lower, but is one.
        coarse = np.unique(np.linspace(0, width - 1, COARSE).astype(int))
        grid = np.ix_(coarse, coarse)
        lengths = ahead[:, None, None] * before[coarse][:, None] + behind[:, None, None] * after[left[grid]]
        lengths += known[:, coarse][:, None, :]
        possible = placed[coarse] + extra[:, coarse] < width
        rest = after[left]
        bound = np.full((width, width), -math.inf)
        for path in np.unique(lengths.argmax(axis=0)[possible]):
            length = behind[path] * rest + known[path]
            length += (ahead[path] * before)[:, None]
            np.maximum(bound, length, out=bound)
        return bound

    def _bounds(self, caps: list[int]) -> _Bounds:
        key = tuple(caps)
        if key not in self._solved:
            if self._families is None:
                self._families = [self._family(stage) for stage in range(self.tables.pp)]
            size = self.tables.width
            after = np.full(size, math.inf)
            after[-1] = 0.0
            rest = [after]
            index = np.arange(size)[:, None] + np.arange(size)[None, :]
            for stage in range(self.tables.pp - 1, -1, -1):
                beyond = np.append(rest[0], np.full(size, math.inf))[index]
                whole = np.maximum(self._families[stage], beyond)[:, : caps[stage]]
                rest.insert(0, whole.min(axis=1))
            self._solved[key] = _Bounds(caps, rest)
        return self._solved[key]

    def _first(self, bounds: _Bounds) -> Splits:
        """A split that meets the table's bound, improved by moving single layers while that helps."""
        found = [self._follow(bounds, way) for way in ("fewest", "most", "evenly")]
        splits = np.array(found, dtype=np.int64)
        split = splits[[int(np.argmin(self._steps_s(splits)))]]
        step_s = self._steps_s(split)[0]
        while True:
            moves = self._moves(split[0], bounds.caps)
            if not len(moves):
                return split
            steps = self._steps_s(moves)
            best = int(np.argmin(steps))
            if steps[best] >= step_s * (1 - TOLERANCE):
                return split
            split, step_s = moves[[best]], steps[best]

    def _follow(self, bounds: _Bounds, way: Literal["fewest", "most", "evenly"]) -> list[int]:
        """A split that keeps within the table's bound: full stages late, early, or spread out between others."""
        assert self._families is not None
        limit = bounds.rest[0][0] * (1 + TOLERANCE)
        split, placed = [], 0
        for stage, family in enumerate(self._families):
            most = min(bounds.caps[stage], self.tables.width - placed)
            extra = np.arange(most)
            good = extra[np.maximum(family[placed, :most], bounds.rest[stage + 1][placed + extra]) <= limit]
            ideal = (self.tables.width - 1) * (stage + 1) / self.tables.pp - placed
            index = {"fewest": 0, "most": -1, "evenly": int(np.abs(good - ideal).argmin())}[way]
            split.append(int(good[index]))
            placed += split[-1]
        return split

    def _moves(self, split: NDArray[np.int64], caps: Caps) -> Splits:
        """Splits with one layer moved between stages that the step waits for and others."""
        busy = [float(both[extra]) for both, extra in zip(self._both, split, strict=True)]
        order = sorted(range(self.tables.pp), key=lambda stage: (busy[stage], stage))
        givers = [stage for stage in reversed(order) if split[stage] > 0][:MOVED_STAGES]
        takers = [stage for stage in order if split[stage] + 1 < caps[stage]][:MOVED_STAGES]
        moved = []
        for giver in givers:
            for taker in takers:
                if giver != taker:
                    moved.append(split.copy())
                    moved[-1][giver] -= 1
                    moved[-1][taker] += 1
        return np.array(moved, dtype=np.int64).reshape(-1, self.tables.pp)

    def _exhaust(self, bounds: _Bounds, best: Splits | None, best_s: float) -> tuple[Splits | None, float]:
        """Extend partial splits depth first, the most promising first, until none is left that may be faster."""
        blocks = [_Block(0.0, np.zeros((1, 0), dtype=np.int64))]
        budget = max(LEAST_WORK, min(MOST_WORK, self._work_left))
        work = 0
        while blocks:
            block = blocks.pop()
            limit_s = best_s * (1 - TOLERANCE)
            if block.bound_s >= limit_s:
                continue
            if work > budget:
                left_s = min([block.bound_s, *(other.bound_s for other in blocks)])
                root_s = float(bounds.rest[0][0]) + self._tail_floor
                self.max_gap = max(self.max_gap, 1 - max(left_s, root_s) / best_s)
                break
            splits, found = self._extended(bounds, block, limit_s)
            work += self._work_of(splits)
            if splits.shape[1] == self.tables.pp:
                steps = np.maximum(found, self.tables.host_s)
                if steps.min(initial=math.inf) < limit_s:
                    best, best_s = splits[[int(np.argmin(steps))]], float(steps.min())
                continue
            order = np.argsort(-found, kind="stable")
            order = order[found[order] < limit_s]
            for part in np.array_split(order, max(1, -(-len(order) // BLOCK))):
                if len(part):
                    blocks.append(_Block(float(found[part].min()), splits[part]))
        self._work_left -= work
        return best, best_s

    def _work_of(self, splits: Splits) -> int:
        """Pieces of work that the longest paths of these splits went through."""
        return 2 * splits.size * (self.tables.setting.num_microbatches + self.tables.pp)

    def _extended(self, bounds: _Bounds, block: _Block, limit_s: float) -> tuple[Splits, Array]:
        """Every split of the block with one more stage, as far as the table leaves it a chance.

        With each a lower bound of the step of all its completions, but for the host; of a whole split its own.
        """
        assert self._families is not None
        tables, stage = self.tables, block.splits.shape[1]
        placed = block.splits.sum(axis=1)
        extra = np.arange(bounds.caps[stage])
        within = placed[:, None] + extra[None, :] < tables.width
        after = np.minimum(placed[:, None] + extra[None, :], tables.width - 1)
        bound = np.maximum(self._families[stage][placed][:, : len(extra)], bounds.rest[stage + 1][after])
        row, column = np.nonzero(within & (bound + self._tail_floor < limit_s))
        splits = np.concatenate([block.splits[row], extra[column][:, None]], axis=1)
        left = tables.width - 1 - splits.sum(axis=1)
        rest = self._after[tables.pp - stage - 1][left]
        count = tables.setting.num_microbatches
        least = longest_paths(*self._times(splits), tables.transfer_s, tables.pp, count, rest)
        return splits, np.maximum(least, bound[row, column]) + self._tails(splits)


@dataclass(frozen=True)
class _Block:
    """Partial splits with the least bound of them all."""

    bound_s: float
    splits: Splits


def _least_sums(both: list[Array]) -> list[Array]:
    """Least F + B of the first 0, 1, ... of these stages, by their extra layers in all."""
    size = len(both[0])
    sums = [np.append(0.0, np.full(size - 1, math.inf))]
    slopes = {float(values[1] - values[0]) for values in both} if size > 1 else {0.0}
    straight = max(slopes) - min(slopes) <= 1e-12 * max(map(abs, slopes)) and all(_is_straight(v) for v in both)
    back = np.arange(size)[:, None] - np.arange(size)[None, :]
    for values in both:
        if straight:
            # With one slope for all it does not matter where layers go.
            first = 0.0 if len(sums) == 1 else float(sums[-1][0])
            sums.append(first + np.asarray(values, dtype=float))
        else:
            sums.append(np.where(back >= 0, sums[-1][back] + values[None, :], math.inf).min(axis=1))
    return sums


def _is_straight(values: Array) -> bool:
    return len(values) < 3 or float(np.abs(np.diff(values, 2)).max()) <= 1e-12 * float(values[-1])
