"""A pipeline step event by event: stages, links and posted receives, each doing what it can at every moment.

It shares no code with ``megagraph_cli``. Unlike the simulation it also lets a stage wait until its gradients have left:
before a backward all but the newest must be with the stage before.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

Piece = tuple[str, int, int]
"""(F or B, stage, micro-batch)."""


@dataclass
class Link:
    """One direction of a boundary; it carries a message when it has one, is free and its receive is posted."""

    waiting: deque[int] = field(default_factory=deque)
    posted: bool = True
    busy: bool = False
    arrived: int = 0


def work_of(stage: int, pp: int, count: int, schedule: str) -> deque[tuple[str, int]]:
    if schedule == "gpipe":
        return deque([("F", m) for m in range(count)] + [("B", m) for m in range(count)])
    ahead = min(count, pp - stage)
    order = deque(("F", m) for m in range(ahead))
    for m in range(count):
        order.append(("B", m))
        if m + ahead < count:
            order.append(("F", m + ahead))
    return order


class Clockwork:
    """Runs a step; ``ends`` are then the moments at which each piece of work is done."""

    def __init__(
        self, forward: Sequence[float], backward: Sequence[float], transfer: float, count: int, schedule: str
    ) -> None:
        pp = len(forward)
        self.times = {"F": forward, "B": backward}
        self.transfer = transfer
        self.work = [work_of(stage, pp, count, schedule) for stage in range(pp)]
        self.busy = [False] * pp
        self.links = {("F", stage): Link() for stage in range(1, pp)} | {
            ("B", stage): Link() for stage in range(pp - 1)
        }
        self.now = 0.0
        self.ends: dict[Piece, float] = {}
        self.agenda: list[tuple[float, int, Piece | tuple[str, int]]] = []
        self.tick = itertools.count()
        self.go_on()
        while self.agenda:
            self.now, _, what = heapq.heappop(self.agenda)
            if len(what) == 3:
                self.done(what)
            else:
                link = self.links[what]
                link.busy = False
                link.arrived += 1
            self.go_on()
        assert len(self.ends) == 2 * pp * count

    def later(self, seconds: float, what: Piece | tuple[str, int]) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self.tick), what))

    def done(self, piece: Piece) -> None:
        kind, stage, microbatch = piece
        self.busy[stage] = False
        self.ends[piece] = self.now
        link = self.links.get((kind, stage + 1 if kind == "F" else stage - 1))
        if link is not None:
            link.waiting.append(microbatch)

    def go_on(self) -> None:
        """Whatever can begin now, until nothing more can."""
        while any([*(self.sends(key) for key in self.links), *(self.starts(stage) for stage in range(len(self.work)))]):
            pass

    def sends(self, key: tuple[str, int]) -> bool:
        link = self.links[key]
        if not link.waiting or link.busy or not link.posted:
            return False
        link.waiting.popleft()
        link.busy, link.posted = True, False
        self.later(self.transfer, key)
        return True

    def starts(self, stage: int) -> bool:
        if self.busy[stage] or not self.work[stage]:
            return False
        kind, microbatch = self.work[stage][0]
        link, upward = self.links.get((kind, stage)), self.links.get(("B", stage - 1))
        if kind == "B" and upward is not None and upward.arrived < microbatch - 1:
            return False
        if link is not None:
            if link.arrived <= microbatch:
                return False
            link.posted = True
        self.work[stage].popleft()
        self.busy[stage] = True
        self.later(self.times[kind][stage], (kind, stage, microbatch))
        return True
