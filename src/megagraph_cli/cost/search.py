"""The search: least simulated step time over all settings and layer splits within a memory limit, and the front."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megagraph_cli.cost.candidates import Candidate, candidate_of
from megagraph_cli.cost.one_f_one_b import TOLERANCE
from megagraph_cli.cost.partition import Choice
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_INFEASIBLE, MgraphError
from megagraph_cli.units import MIB, ceil_mib


@dataclass(frozen=True)
class Found:
    """A plan of the search: a setting and its split, with step time and peak."""

    setting: Setting
    choice: Choice


@dataclass(frozen=True)
class SearchResult:
    """The best plan, the next best settings (each with its best split), the front, and how many plans there were.

    ``max_gap`` is the most, as a fraction, by which another plan may be faster than any of these: 0 where all are
    proven.
    """

    best: Found
    runners_up: list[Found]
    pareto: list[Found]
    num_candidates: int
    num_feasible: int
    max_gap: float


def search(predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins, top: int) -> SearchResult:
    """The exact optimum over all plans on ``gpus`` workers of which every stage fits in ``mem_bytes``.

    Raises MgraphError: exit 2 for impossible pins, exit 3 where nothing fits, with the smallest limit that does
    (``minimum_bytes``) and what else would let a plan fit, exit 4 where a term was never measured.
    """
    try:
        return search_candidates(candidates_of(predictor, gpus, pins), mem_bytes, predictor.overhead_bytes, top)
    except MgraphError as error:
        if error.exit_code != EXIT_INFEASIBLE:
            raise
        message = error.message + _way_out(predictor, gpus, mem_bytes, pins)
        raise MgraphError(message, EXIT_INFEASIBLE, **error.details) from error


def candidates_of(predictor: Predictor, gpus: int, pins: Pins) -> list[Candidate]:
    """Every setting of a search. Raises MgraphError: exit 2 for impossible pins, exit 4 for what was not measured."""
    return [candidate_of(predictor.tables(setting), pins.layers) for setting in predictor.settings(gpus, pins)]


def search_candidates(candidates: Sequence[Candidate], mem_bytes: int, overhead_bytes: int, top: int) -> SearchResult:
    """The search over given candidates; peak, margin and ``overhead_bytes`` of a stage must fit in ``mem_bytes``."""
    need_bytes = mem_bytes - overhead_bytes
    num_feasible = sum(candidate.num_within(need_bytes) for candidate in candidates)
    if not num_feasible:
        raise _infeasible(min(candidate.least_need() for candidate in candidates) + overhead_bytes, mem_bytes)
    contest = _Contest.over(candidates, need_bytes)
    ranked = contest.ranked(need_bytes, max(top, 0) + 1)
    front = _front(contest, ranked[0])
    return SearchResult(
        best=ranked[0],
        runners_up=ranked[1:],
        pareto=front,
        num_candidates=sum(candidate.num_splits() for candidate in candidates),
        num_feasible=num_feasible,
        # Read last: points of the front are answers too, and may run out of work.
        max_gap=max(candidate.max_gap for candidate in candidates),
    )


@dataclass
class _Contest:
    """Candidates in a heap by a lower bound of their step time.

    A bound worked out under one limit stays a bound under every tighter one, so the heap is never built again.
    """

    candidates: Sequence[Candidate]
    heap: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def over(cls, candidates: Sequence[Candidate], need_bytes: int) -> _Contest:
        bounds = [(candidate.quick_bound(need_bytes), index) for index, candidate in enumerate(candidates)]
        heap = [entry for entry in bounds if entry[0] < math.inf]
        heapq.heapify(heap)
        return cls(candidates, heap)

    def ranked(self, need_bytes: int, count: int) -> list[Found]:
        """The ``count`` best candidates within the limit, each with its best split; fewer where fewer fit."""
        solved: list[tuple[float, int, Choice]] = []
        beaten: list[tuple[float, int]] = []
        while self.heap:
            worst_s = solved[count - 1][0] if len(solved) >= count else math.inf
            cutoff_s = worst_s * (1 + 3 * TOLERANCE)
            if self.heap[0][0] >= cutoff_s:
                break
            stale_s, index = heapq.heappop(self.heap)
            bound_s = max(stale_s, self.candidates[index].quick_bound(need_bytes))
            if bound_s == math.inf:
                continue
            if bound_s > stale_s:
                # Others may come first now.
                heapq.heappush(self.heap, (bound_s, index))
                continue
            choice = self.candidates[index].fastest(need_bytes, cutoff_s)
            if choice is None:
                beaten.append((cutoff_s, index))
                continue
            solved.append((choice.step_s, index, choice))
            solved.sort(key=lambda entry: entry[:2])
        for entry in [*beaten, *((step_s, index) for step_s, index, _ in solved)]:
            heapq.heappush(self.heap, entry)
        return self._in_order(solved, need_bytes)[:count]

    def _in_order(self, solved: list[tuple[float, int, Choice]], need_bytes: int) -> list[Found]:
        """By step time; equal ones by fewer bytes, then in the order of the candidates, then by split."""
        ordered: list[Found] = []
        begin = 0
        while begin < len(solved):
            end = begin
            while end < len(solved) and solved[end][0] <= solved[begin][0] * (1 + 2 * TOLERANCE):
                end += 1
            tied = []
            for _, index, choice in solved[begin:end]:
                lean = self.candidates[index].leanest(choice, need_bytes)
                tied.append((lean.peak_bytes, index, lean.split, lean))
            ordered += [Found(self.candidates[index].setting, lean) for _, index, _, lean in sorted(tied)]
            begin = end
        return ordered


def _front(contest: _Contest, best: Found) -> list[Found]:
    """Every non-dominated plan, fastest first: the optimum again and again, each time under the peak before."""
    front = [best]
    by_setting = {candidate.setting: candidate for candidate in contest.candidates}
    while True:
        last = front[-1]
        found = contest.ranked(by_setting[last.setting].need_of(last.choice.split) - 1, 1)
        if not found:
            return front
        front.append(found[0])


def _way_out(predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins) -> str:
    """What but more memory lets a plan fit, to follow the sentence: fewer pins, else twice the workers; or nothing."""
    need_bytes = mem_bytes - predictor.overhead_bytes

    def fits(workers: int, fewer: Pins) -> bool:
        try:
            return any(each.num_within(need_bytes) for each in candidates_of(predictor, workers, fewer))
        except MgraphError:
            return False  # cannot be, or was never measured: a search that was told so would fail as well

    given = pins.flags()
    alone = [f"without --{flag} {said}" for flag, said in given.items() if fits(gpus, pins.without(flag))]
    if alone:
        return f", and a plan fits {' or '.join(alone)}"
    if len(given) > 1 and fits(gpus, Pins()):
        return f", and a plan fits without {' '.join(f'--{flag} {said}' for flag, said in given.items())}"
    return f", and a plan fits on --gpus {2 * gpus}" if fits(2 * gpus, pins) else ""


def _infeasible(minimum_bytes: int, mem_bytes: int) -> MgraphError:
    least = ceil_mib(minimum_bytes)
    return MgraphError(
        f"no plan fits in --mem {mem_bytes / MIB:.1f}MiB per device; the smallest limit that fits is --mem {least}MiB",
        EXIT_INFEASIBLE,
        minimum_bytes=minimum_bytes,
    )
