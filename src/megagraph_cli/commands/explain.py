"""``mgraph search --explain`` and ``--compare``: why a candidate won, lost or was pruned. Nothing is written."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.workload import BatchSection, DatasetSection, ModelSection
from megagraph_cli.commands.search import SearchRequest, pins_of, resolved
from megagraph_cli.cost.explain import PlanCost, cost_of, leanest, reasons
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import search
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins
from megagraph_cli.errors import EXIT_INFEASIBLE, EXIT_STALE, MgraphError

NUMBERS = {"pp": "pp", "cp": "cp", "dp": "dp", "microbatches": "num_microbatches"}
NAMES = ("schedule", "recompute", "context")
_DECIDING = {
    "dataset": tuple(DatasetSection.model_fields),
    "model": tuple(ModelSection.model_fields),
    "batch": tuple(BatchSection.model_fields),
    "train": ("dtype", "matmul_precision"),
}
"""What a step's seconds and bytes depend on; the rest of ``train`` may differ between plans that are compared."""


@dataclass(frozen=True)
class Explanation:
    """A candidate beside the plan that the search chose (None where nothing fits the limit).

    ``verdict``: won (it is the chosen one), lost, or pruned (it does not fit). ``because`` are sentences.
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
    """Why the best plan of a candidate's degrees won, lost or was pruned.

    Raises MgraphError: exit 2 where no plan can be so, 4 for a term that was never measured.
    """
    predictor, gpus, mem_bytes, _ = resolved(request)
    pins = replace(Pins(layers=pins_of(request).layers), **parse_candidate(text))
    predictor.settings(gpus, pins)  # pins that cannot be are told before anything is searched
    return explain_pins(predictor, gpus, mem_bytes, pins, _best(predictor, gpus, mem_bytes, pins_of(request)))


def explain_pins(predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins, chosen: PlanCost | None) -> Explanation:
    """The best plan under some pins, or where none fits the one with the fewest bytes, beside the chosen one."""
    mine = _best(predictor, gpus, mem_bytes, pins)
    if mine is None:
        mine = cost_of(predictor, *leanest(predictor, predictor.settings(gpus, pins), pins.layers))
    return _explained(predictor, mem_bytes, mine, chosen)


def compare(request: SearchRequest, path: Path) -> Explanation:
    """Another plan, forecast by this cost model, beside the one that the search chooses.

    Raises MgraphError: what ``Plan.load`` raises, exit 4 where the plan is for another workload or number of workers.
    """
    predictor, gpus, mem_bytes, _ = resolved(request)
    other = Plan.load(path, force=request.force)
    _check_same(other, predictor, gpus, path)
    mine = cost_of(predictor, Setting.of(other), other.layers_per_stage)
    return _explained(predictor, mem_bytes, mine, _best(predictor, gpus, mem_bytes, pins_of(request)))


def _check_same(other: Plan, predictor: Predictor, gpus: int, path: Path) -> None:
    if other.gpus != gpus:
        raise MgraphError(
            f"{path} is for {other.gpus} workers, not {gpus}; compare under --gpus {other.gpus}", EXIT_STALE
        )
    for section, keys in _DECIDING.items():
        mine, theirs = getattr(predictor.workload, section), getattr(other.workload, section)
        for key in keys:
            if getattr(mine, key) != getattr(theirs, key):
                raise MgraphError(
                    f"{path} was made for {section}.{key} = {getattr(theirs, key)!r}, not {getattr(mine, key)!r}; "
                    "compare plans of one workload",
                    EXIT_STALE,
                )


def _best(predictor: Predictor, gpus: int, mem_bytes: int, pins: Pins) -> PlanCost | None:
    """The best plan under some pins, or None where none fits."""
    try:
        found = search(predictor, gpus, mem_bytes, pins, 0).best
    except MgraphError as error:
        if error.exit_code != EXIT_INFEASIBLE:
            raise
        return None
    return cost_of(predictor, found.setting, found.choice.split)


def _explained(predictor: Predictor, mem_bytes: int, mine: PlanCost, chosen: PlanCost | None) -> Explanation:
    if mine.need_bytes > mem_bytes:
        verdict = "pruned"
    elif chosen is None or (mine.setting, mine.split) == (chosen.setting, chosen.split):
        verdict = "won"
    else:
        verdict = "lost"
    because = [] if verdict == "won" else reasons(mine, chosen or mine, mem_bytes)
    relative = predictor.terms["margin"]["relative"]
    return Explanation(verdict, mem_bytes, predictor.overhead_bytes, relative, mine, chosen, because)
