"""The best layer split under 1F1B: branch and bound over ranges of layers per stage.

A node of the search is a box: every stage's layers lie in [low, high]. Its bound is the larger of two longest paths
with every stage at its low end (docs/cost-model.md proves both): the step itself, and the longest chain through the
last stage plus the layers not placed yet, since such a chain passes every stage and the layers' total is known.
Where that is not enough, linear programs over the longest paths met so far (``cuts``) bound the boxes that are left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from megagraph_cli.cost.cuts import Box, Cuts
from megagraph_cli.cost.partition import Caps, Choice, Split, caps_within, first_split, fits
from megagraph_cli.cost.predict import StageTables
from megagraph_cli.cost.simulate import longest_paths
from megagraph_cli.cost.terms import Array

BOXES_BEFORE_CUTS = 24
"""Boxes bounded by simulation alone, which is quick and mostly enough, before linear programs take over."""
MOST_PROGRAMS = 300
"""Linear programs that one setting may take in all before its answers are given with the gap that is left."""
MOVED_STAGES = 3
TOLERANCE = 1e-9
"""Times closer than this, relatively, are equal: far above rounding (1e-14 over a step), far below any measurement."""


class OneFOneB:
    """Best splits of one 1F1B setting; bounds that do not depend on the memory limit are worked out once.

    ``max_gap`` is the most, as a fraction, by which an answer given so far may be beaten: 0 unless the linear
    programs' budget ran out, which takes tens of stages with times that hardly differ.
    """

    def __init__(self, tables: StageTables) -> None:
        assert tables.setting.schedule == "1f1b"
        self.tables = tables
        self.total_s = self._times_of(first_split([tables.width] * tables.pp, tables.num_layers))
        self.stage_bounds = [self._stage_bound(stage) for stage in range(tables.pp)]
        self._known: dict[Split, tuple[float, float]] = {}
        self._cuts: Cuts | None = None
        self.max_gap = 0.0

    def _times_of(self, split: Sequence[int]) -> float:
        tables = self.tables
        return math.fsum(
            float(table[held - 1])
            for both in (tables.forward_s, tables.backward_s)
            for table, held in zip(both, split, strict=True)
        )

    def _stage_bound(self, stage: int) -> Array:
        """Least step time when ``stage`` alone holds n layers: a round trip of all, and its other work."""
        tables = self.tables
        count = tables.setting.num_microbatches
        ahead = tables.setting.in_flight(stage)
        forward, backward = tables.forward_s[stage], tables.backward_s[stage]
        early = (count - ahead) * forward + (count - 1) * backward
        late = (count - 1) * forward + (count - ahead) * backward
        return np.asarray(self.total_s + np.maximum(early, late) + tables.tail_s[stage], dtype=float)

    def _caps_for(self, step_s: float, caps: Caps) -> list[int]:
        """Caps narrowed to what a step time below ``step_s`` allows each stage."""
        limit = step_s * (1 - TOLERANCE)
        return [
            min(cap, int(np.searchsorted(bound, limit, side="left")))
            for cap, bound in zip(caps, self.stage_bounds, strict=True)
        ]

    def quick_bound(self, need_bytes: int) -> float:
        """A lower bound of the step time within ``need_bytes`` without simulation; infinite where nothing fits."""
        tables = self.tables
        caps = caps_within(tables, need_bytes)
        if not fits(caps, tables.num_layers):
            return math.inf
        values = np.unique(np.concatenate(self.stage_bounds))
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if fits(self._caps_for(float(values[middle]) * (1 + 3 * TOLERANCE), caps), tables.num_layers):
                high = middle
            else:
                low = middle + 1
        return max(float(values[low]), tables.host_s)

    def step_and_chain(self, split: Split) -> tuple[float, float]:
        """(step time, longest chain through the last stage) with these layers, reduction and optimizer included."""
        if split not in self._known:
            tables = self.tables
            forward = [float(table[held - 1]) for table, held in zip(tables.forward_s, split, strict=True)]
            backward = [float(table[held - 1]) for table, held in zip(tables.backward_s, split, strict=True)]
            tail = max(float(table[held - 1]) for table, held in zip(tables.tail_s, split, strict=True))
            ends, chain = longest_paths(forward, backward, tables.setting.num_microbatches, "1f1b")
            self._known[split] = (max(ends) + tail, chain + tail)
        return self._known[split]

    def bound(self, box: Box) -> float:
        """A lower bound of the step time of every split in the box."""
        step_s, chain_s = self.step_and_chain(box.low)
        return max(step_s, chain_s + self.total_s - self._times_of(box.low), self.tables.host_s)

    def step_s(self, split: Split) -> float:
        return max(self.step_and_chain(split)[0], self.tables.host_s)

    def solve(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        """The fastest split within ``need_bytes``, or None where none is faster than ``cutoff_s``."""
        tables = self.tables
        caps = caps_within(tables, need_bytes)
        root = Box((1,) * tables.pp, tuple(caps)).tightened(tables.num_layers)
        best: Split | None = None
        best_s = cutoff_s
        heap = [(0.0, root)] if root is not None else []
        boxes = 0
        while heap:
            bound_s, box = heapq.heappop(heap)
            if bound_s >= best_s * (1 - TOLERANCE):
                break
            if self._cuts is not None and self._cuts.num_programs > MOST_PROGRAMS:
                self.max_gap = max(self.max_gap, 1 - bound_s / best_s)
                break
            boxes += 1
            samples, parts = self._samples(box), self._branches(box)
            if boxes > BOXES_BEFORE_CUTS:
                bound_s, samples, parts = self._cut(box, best_s)
            for split in samples:
                step_s = self.step_s(split)
                if step_s < best_s * (1 - TOLERANCE):
                    best, best_s = self._improved(split, step_s, caps)
            for part in parts:
                self._push(heap, part, bound_s, best_s)
        if best is None:
            return None
        peak = max(int(table[held - 1]) for table, held in zip(tables.peak_bytes, best, strict=True))
        return Choice(best_s, peak, best)

    def _improved(self, split: Split, step_s: float, caps: Caps) -> tuple[Split, float]:
        """The split after moving single layers from stages that the step waits for to others, while that helps."""
        better = True
        while better:
            better = False
            for moved in self._moves(split, caps):
                moved_s = self.step_s(moved)
                if moved_s < step_s * (1 - TOLERANCE):
                    split, step_s, better = moved, moved_s, True
                    break
        return split, step_s

    def _moves(self, split: Split, caps: Caps) -> list[Split]:
        tables = self.tables
        busy = [float(f[n - 1] + b[n - 1]) for f, b, n in zip(tables.forward_s, tables.backward_s, split, strict=True)]
        order = sorted(range(tables.pp), key=lambda stage: (busy[stage], stage))
        givers = [stage for stage in reversed(order) if split[stage] > 1][:MOVED_STAGES]
        takers = [stage for stage in order if split[stage] < caps[stage]][:MOVED_STAGES]
        return [
            tuple(held - (stage == giver) + (stage == taker) for stage, held in enumerate(split))
            for giver in givers
            for taker in takers
            if giver != taker
        ]

    def _samples(self, box: Box) -> list[Split]:
        """Splits in the box worth a try: as much as possible in the late stages, and in the early ones."""
        count = self.tables.num_layers - sum(box.low)
        late, early = list(box.low), list(box.low)
        for filled, order in ((late, range(len(late) - 1, -1, -1)), (early, range(len(early)))):
            left = count
            for stage in order:
                added = min(left, box.high[stage] - box.low[stage])
                filled[stage] += added
                left -= added
        return [tuple(late), tuple(early)]

    def _branches(self, box: Box) -> list[Box]:
        """The box cut in two where its time is least known."""
        tables = self.tables

        def doubt(stage: int) -> tuple[float, int]:
            low, high = box.low[stage] - 1, box.high[stage] - 1
            costs = (tables.forward_s[stage], tables.backward_s[stage], tables.tail_s[stage])
            return sum(float(cost[high] - cost[low]) for cost in costs), high - low

        stage = max(range(tables.pp), key=doubt)
        low, high = box.low[stage], box.high[stage]
        if low == high:
            return []
        return box.cut_at(stage, (low + high) // 2)

    def _cut(self, box: Box, best_s: float) -> tuple[float, list[Split], list[Box]]:
        """A bound by linear programs, a split near their optimum, and the box cut in two if it may hold better."""
        if self._cuts is None:
            self._cuts = Cuts(self.tables, self.stage_bounds)
        relaxed = self._cuts.relax(box, best_s * (1 - TOLERANCE))
        if relaxed.bound_s >= best_s * (1 - TOLERANCE):
            return relaxed.bound_s, [], []
        return relaxed.bound_s, [relaxed.rounded(box)], relaxed.branches(box)

    def _push(self, heap: list[tuple[float, Box]], box: Box, parent_s: float, best_s: float) -> None:
        high = tuple(self._caps_for(best_s, box.high)) if best_s < math.inf else box.high
        tight = Box(box.low, high).tightened(self.tables.num_layers)
        if tight is None:
            return
        bound_s = max(parent_s, self.bound(tight))
        if bound_s < best_s * (1 - TOLERANCE):
            heapq.heappush(heap, (bound_s, tight))
