"""``mgraph search --explain`` and ``--compare``: why a candidate won, lost, was pruned or left out.

Nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import first_difference
from megagraph_cli.commands.devices import Device
from megagraph_cli.commands.search import SearchRequest, pins_of, resolved
from megagraph_cli.cost.explain import PlanCost, cost_of, leanest, reasons
from megagraph_cli.cost.one_f_one_b import TOLERANCE
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import candidates_of, search_candidates
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins, as_searched, left_out_by
from megagraph_cli.errors import EXIT_INFEASIBLE, EXIT_STALE, MgraphError
from megagraph_cli.layout.placement import hosts_of

NUMBERS = {"pp": "pp", "cp": "cp", "dp": "dp", "microbatches": "num_microbatches"}
NAMES = ("schedule", "recompute", "context")
EQUAL = 4 * TOLERANCE
"""Steps that differ by less, relatively, are equal: the search's own rule and some rounding."""


@dataclass(frozen=True)
class Explanation:
    """A candidate beside the plan that the search chose (None where nothing fits the limit).

    ``verdict``: won (it is the chosen one), lost (it is slower, or as fast and needs as many bytes or more), pruned (it
    does not fit) or left out (it fits and is no slower, but a pin of the request or the bounds of the search kept it
    out). ``because`` are sentences.
    """

    verdict: str
    limit_bytes: int
    overhead_bytes: int
    margin_relative: float
    candidate: PlanCost
    chosen: PlanCost | None
    because: list[str]

    def over_bytes(self, stage: int) -> int:
        """Bytes by which a stage of the candidate, its margin and overhead included, is over the limit."""
        peak = self.candidate.stages[stage].peak_bytes
        return peak + math.ceil(self.margin_relative * peak) + self.overhead_bytes - self.limit_bytes

    def values(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict,
            "limit_bytes": self.limit_bytes,
            "because": self.because,
            "candidate": plan_values(self.candidate)
            | {"over_bytes": [self.over_bytes(stage) for stage in range(len(self.candidate.stages))]},
            "chosen": None if self.chosen is None else plan_values(self.chosen),
        }


def plan_values(cost: PlanCost) -> dict[str, Any]:
    """A plan's costs as plain JSON values, without its timeline."""
    setting = cost.setting
    return {
        "dims": asdict(setting.dims),
        "layers_per_stage": list(cost.split),
        "num_microbatches": setting.num_microbatches,
        "schedule": setting.schedule,
        "recompute": setting.recompute,
        "context": setting.context,
        "mesh_order": list(setting.mesh_order),
        "step_s": cost.step_s,
        "peak_bytes": cost.peak_bytes,
        "need_bytes": cost.need_bytes,
        "stages": [asdict(stage) for stage in cost.stages],
    }


def parse_candidate(text: str) -> dict[str, Any]:
    """Pins of ``pp=4,cp=1,dp=1``; also microbatches, schedule, recompute and context. Raises MgraphError (exit 2)."""
    pins: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in NUMBERS and value.isascii() and value.isdigit() and int(value) > 0:
            pins[NUMBERS[key]] = int(value)
        elif key in NAMES and value:
            pins[key] = value
        else:
            known = ", ".join((*NUMBERS, *NAMES))
            raise MgraphError(
                f"--explain {text}: {part!r} is no part of a plan; write pp=4,cp=1,dp=1 (it takes {known})"
            )
    return pins


def explain(request: SearchRequest, text: str) -> Explanation:
    """Why the best plan of a candidate's degrees won, lost, was pruned or left out.

    Of the request's pins the candidate keeps ``--layers`` alone; the chosen plan keeps all.
    Raises MgraphError: exit 2 where no plan can be so, 4 for a term that was never measured.
    """
    predictor, gpus, mem_bytes, _ = resolved(request)
    asked = pins_of(request)
    pins = replace(Pins(layers=asked.layers), **parse_candidate(text))
    predictor.settings(gpus, pins)  # pins that cannot be are told before anything is searched
    return explain_pins(predictor, gpus, mem_bytes, pins, asked, _best(predictor, gpus, mem_bytes, asked))


def explain_pins(
    predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins, asked: Pins, chosen: PlanCost | None
) -> Explanation:
    """The best plan under ``pins``, or where none fits the one with the fewest bytes, beside the one chosen of those
    that were ``asked`` for.
    """
    mine = _best(predictor, gpus, mem_bytes, pins)
    if mine is None:
        mine = cost_of(predictor, *leanest(predictor, predictor.settings(gpus, pins), pins.layers))
    return _explained(predictor, mem_bytes, asked, mine, chosen)


def compare(request: SearchRequest, path: Path) -> Explanation:
    """Another plan, forecast by this cost model, beside the one that the search chooses.

    Raises MgraphError: what ``Plan.load`` raises, exit 4 where the plan is for another workload, graph, device, or
    number of workers or hosts.
    """
    predictor, gpus, mem_bytes, device = resolved(request)
    other, asked = Plan.load(path, force=request.force), pins_of(request)
    if other.gpus != gpus:
        raise MgraphError(
            f"{path} is for {other.gpus} workers, not {gpus}; compare under --gpus {other.gpus}", EXIT_STALE
        )
    hosts = hosts_of(gpus, predictor.cost_model.machine.hosts)
    _check_same(other, predictor, hosts, device, path)
    mine = cost_of(predictor, as_searched(Setting.of(other), hosts), other.layers_per_stage)
    return _explained(predictor, mem_bytes, asked, mine, _best(predictor, gpus, mem_bytes, asked))


def _check_same(other: Plan, predictor: Predictor, hosts: int, device: Device, path: Path) -> None:
    """Raises MgraphError (exit 4). A plan by hand may leave its device out; one that says one host may run on more."""
    differs = first_difference(predictor.workload, other.workload)
    for key, mine, theirs, unsaid in (("device", device, other.device, None), ("hosts", hosts, other.hosts, 1)):
        if differs is None and theirs not in (unsaid, mine):
            differs = key, mine, theirs
    if differs is not None:
        key, mine, theirs = differs
        raise MgraphError(
            f"{path} was made for {key} = {theirs!r}, not {mine!r}; compare plans of one workload and machine",
            EXIT_STALE,
        )


def _best(predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins) -> PlanCost | None:
    """The best plan under some pins, or None where none fits."""
    candidates = candidates_of(predictor, gpus, pins)
    try:
        found = search_candidates(candidates, mem_bytes, predictor.overhead_bytes, 0).best
    except MgraphError as error:
        if error.exit_code != EXIT_INFEASIBLE:
            raise
        return None
    return cost_of(predictor, found.setting, found.choice.split)


def _explained(
    predictor: Predictor, mem_bytes: int, asked: Pins, mine: PlanCost, chosen: PlanCost | None
) -> Explanation:
    verdict, because = _judged(predictor, mem_bytes, asked, mine, chosen)
    relative = predictor.terms["margin"]["relative"]
    return Explanation(verdict, mem_bytes, predictor.overhead_bytes, relative, mine, chosen, because)


def _judged(
    predictor: Predictor, mem_bytes: int, asked: Pins, mine: PlanCost, chosen: PlanCost | None
) -> tuple[str, list[str]]:
    """(verdict, because)."""
    if mine.need_bytes > mem_bytes:
        return "pruned", reasons(mine, chosen or mine, mem_bytes)
    kept_out = left_out_by(predictor.workload, asked, mine.setting, mine.split)
    if chosen is None:
        return "left out", [f"it fits, but {kept_out}"]
    if (mine.setting, mine.split) == (chosen.setting, chosen.split):
        return "won", []
    slower_s = mine.step_s - chosen.step_s
    if slower_s > EQUAL * chosen.step_s:
        return "lost", reasons(mine, chosen, mem_bytes) or [f"it takes {1e3 * slower_s:.3g} ms more of a step"]
    if slower_s < -EQUAL * chosen.step_s:
        return "left out", [f"faster, but {kept_out or 'the search ran out of work before it came to this plan'}"]
    if kept_out:
        return "left out", [f"as fast, but {kept_out}"]
    more = mine.peak_bytes - chosen.peak_bytes
    later = "later in the order in which equal plans are preferred"
    return "lost", [f"as fast, but {f'needs {more} bytes more' if more > 0 else later}"]
