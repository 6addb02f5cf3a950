"""The tables that end each command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megagraph_cli.artifacts.cost_model import CostModel, Quality
from megagraph_cli.artifacts.plan import BriefPlan, Extrapolation, Plan
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.artifacts.run import Run
from megagraph_cli.artifacts.validation import ValidatedPlan, Validation
from megagraph_cli.console import Screen
from megagraph_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:  # data and train have no need to wait for the search
    from megagraph_cli.commands.explain import Explanation
    from megagraph_cli.cost.explain import PlanCost

# As narrow as can be: a terminal of 80 columns has two or four figures beside them.
_PLAN_COLUMNS = ["plan", "pp×cp\n×dp", "layers", "micro-\nbatches", "sche-\ndule", "re-\ncompute", "context"]


def show_facts(name: str, facts: Mapping[str, object], screen: Screen) -> None:
    """What ``mgraph data`` says of a graph."""
    rows = [[key, f"{value:,}" if isinstance(value, int) else str(value)] for key, value in facts.items()]
    screen.table(name, ["", ""], rows)


def show_profile(profile: Profile, out: Path, screen: Screen) -> None:
    """How much was measured, and where."""
    machine = profile.machine
    rows = [
        ["workers", f"{machine.num_devices} {machine.device} ({machine.backend})"],
        ["free memory of a worker", format_bytes(machine.memory_bytes)],
        ["overhead of a worker", format_bytes(machine.overhead_bytes)],
        ["compute measurements", str(len(profile.compute))],
        ["communication measurements", str(len(profile.comm))],
        ["host measurements", str(len(profile.host))],
    ]
    screen.table(f"{out}: {profile.workload.dataset.name}", ["", ""], rows)


def show_cost_model(cost_model: CostModel, out: Path, screen: Screen) -> None:
    """How well the fit foretells measurements that it was not given."""

    def row(name: str, quality: Quality) -> list[str]:
        r2 = "–" if quality.r2 is None else f"{quality.r2:.4f}"
        counts = [str(quality.num_fit), str(quality.num_held_out)]
        return [name, _percent(quality.mape), r2, _percent(quality.max_under), *counts]

    columns = ["held out", "MAPE", "R2", "most under", "fitted to", "held out"]
    rows = [row("memory", cost_model.quality.memory), row("time", cost_model.quality.time)]
    screen.table(str(out), columns, rows)


def show_plan(plan: Plan, cost: PlanCost, out: Path, top: int, screen: Screen) -> None:
    """The plan, its stages' time and memory by term, and the first ``top`` runners-up."""
    counts = plan.search
    best = "best" if counts is None or counts.max_gap == 0 else "best found"
    searched = "" if counts is None else f", {best} of {counts.num_feasible} feasible of {counts.num_candidates} plans"
    screen.note(f"{out}: {plan.gpus} workers{searched}")
    columns = [*_PLAN_COLUMNS, "step time", "peak\nmemory"]
    rows = [_plan_row("chosen", plan)] + [
        _plan_row(f"#{number}", brief) for number, brief in enumerate(plan.runners_up[:top], start=2)
    ]
    screen.table("plans", columns, rows)
    show_stages(cost, screen)


def show_stages(cost: PlanCost, screen: Screen) -> None:
    """Where each stage's seconds of a step and its bytes go; stages as columns, at most eight of them."""
    shown = _some_stages(len(cost.stages))
    columns = ["", *(f"stage {number}" for number in shown)]
    stages = [cost.stages[number] for number in shown]
    terms = list(dict.fromkeys(term for stage in stages for term in stage.time_s))
    rows = [["number of layers", *(str(stage.layers) for stage in stages)]]
    rows += [[term, *(_seconds(stage.time_s.get(term)) for stage in stages)] for term in terms]
    screen.table(f"time of a step of {format_seconds(cost.step_s)}", columns, rows)
    kept = list(dict.fromkeys(term for stage in stages for term in stage.memory_bytes))
    rows = [[term, *(_bytes(stage.memory_bytes.get(term)) for stage in stages)] for term in kept]
    rows.append(["together", *(format_bytes(stage.peak_bytes) for stage in stages)])
    screen.table("memory at the peak", columns, rows)


def _some_stages(count: int) -> list[int]:
    """All stages, or of many the first and the last ones."""
    return list(range(count)) if count <= 8 else [*range(4), *range(count - 4, count)]


def show_explanation(found: Explanation, screen: Screen) -> None:
    """Why a candidate won, lost, was pruned or left out, stage by stage."""
    candidate, chosen = found.candidate, found.chosen
    screen.note(f"{_cost_said(candidate)}: {found.verdict}")
    for sentence in found.because:
        screen.note(f"  {sentence}")
    if found.verdict == "pruned":
        rows = [
            [f"stage {number}", format_bytes(stage.peak_bytes), f"{found.over_bytes(number):+d}"]
            for number, stage in enumerate(candidate.stages)
        ]
        screen.table(
            f"limit {format_bytes(found.limit_bytes)}", ["", "peak", "bytes over, margin and overhead included"], rows
        )
    if chosen is not None and found.verdict != "won":
        rows = [
            [name, format_seconds(each.step_s), format_bytes(each.peak_bytes), format_bytes(each.need_bytes)]
            for name, each in ((_cost_said(candidate), candidate), (f"chosen: {_cost_said(chosen)}", chosen))
        ]
        screen.table("", ["plan", "step time", "peak memory", "with margin and overhead"], rows)
    show_stages(candidate, screen)


def _cost_said(cost: PlanCost) -> str:
    setting = cost.setting
    return (
        f"{setting.dims} layers={','.join(map(str, cost.split))} microbatches={setting.num_microbatches} "
        f"{setting.schedule} recompute={setting.recompute} {setting.context}"
    )


def warn_extrapolated(plan: Plan, screen: Screen) -> None:
    """One warning when the forecast goes beyond what the profile measured."""
    if plan.extrapolated:
        said = ", ".join(map(_extrapolation_said, plan.extrapolated))
        screen.warn(f"the forecast is extrapolated beyond what was measured: {said}")


def _extrapolation_said(found: Extrapolation) -> str:
    beyond = found.asked > found.measured_max
    bound = f"measured to {found.measured_max:g}" if beyond else "less than was measured"
    return f"{found.quantity} {found.asked:g} ({bound})"


def unproven(plan: Plan) -> str | None:
    """One sentence where the search ran out of work before every answer was proven, else None."""
    if plan.search is None or plan.search.max_gap == 0:
        return None
    # Rounded up: it is a bound.
    percent = math.ceil(1000 * plan.search.max_gap) / 10
    return f"the search ended before it had proven its plan the fastest: it is at most {percent:g} % from the optimum"


def warn_unproven(plan: Plan, screen: Screen) -> None:
    """One warning when a faster plan may have been missed."""
    sentence = unproven(plan)
    if sentence is not None:
        screen.warn(sentence)


def show_validation(found: Validation, out: Path, screen: Screen) -> None:
    """Predicted beside measured, fastest measured first, and how well they agree."""
    rows = []
    failed = {plan.number for plan in found.failed}
    numbers = [number for number in range(len(found.plans) + len(failed)) if number not in failed]
    for number, plan in sorted(zip(numbers, found.plans, strict=True), key=lambda pair: pair[1].measured.step_s):
        guess, truth = plan.predicted, plan.measured
        rows.append(
            [
                "pick" if number == 0 else f"#{number}",
                *_way_cells(plan),
                format_seconds(guess.step_s),
                format_seconds(truth.step_s),
                format_bytes(guess.peak_bytes),
                format_bytes(truth.peak_bytes),
            ]
        )
    columns = [*_PLAN_COLUMNS, "step\npredicted", "measured", "peak\npredicted", "measured"]
    screen.table(str(out), columns, rows)
    spearman = "–" if found.time.spearman is None else f"{found.time.spearman:.3f}"
    r2 = "–" if found.memory.r2 is None else f"{found.memory.r2:.4f}"
    time = (
        f"time MAPE {_percent(found.time.mape)}, Spearman {spearman}, regret of the pick {_percent(found.time.regret)}"
    )
    screen.note(time)
    screen.note(f"memory MAPE {_percent(found.memory.mape)}, R2 {r2}, most under {_percent(found.memory.max_under)}")


def show_run(run: Run, run_dir: Path, metric: str, screen: Screen) -> None:
    """The test score, which is a ``metric``, and the forecast beside what was measured."""
    predicted, measured = run.predicted, run.measured
    step_s = predicted.step_s if predicted else None
    peak_bytes = predicted.peak_bytes if predicted else None
    rows = [
        ["step time", _seconds(step_s), _seconds(measured.step_s), _ratio(step_s, measured.step_s)],
        [
            "peak memory of a worker",
            _bytes(peak_bytes),
            _bytes(measured.peak_bytes),
            _ratio(peak_bytes, measured.peak_bytes),
        ],
    ]
    best = "" if run.best_epoch is None else f" (epoch {run.best_epoch}, the best by validation)"
    screen.note(f"test {metric} {_percent(run.test_score)}{best}")
    screen.table(str(run_dir), ["", "predicted", "measured", "predicted ÷ measured"], rows)


def _way_cells(plan: Plan | BriefPlan | ValidatedPlan) -> list[str]:
    """What ``_PLAN_COLUMNS`` but the first have; the context says nothing where there is one context rank."""
    dims = plan.dims
    return [
        f"{dims.pp}×{dims.cp}×{dims.dp}",
        ",".join(map(str, plan.layers_per_stage)),
        str(plan.num_microbatches),
        plan.schedule,
        plan.recompute,
        plan.context if dims.cp > 1 else "–",
    ]


def _plan_row(name: str, plan: Plan | BriefPlan) -> list[str]:
    forecast = plan.predicted
    return [
        name,
        *_way_cells(plan),
        _seconds(forecast.step_s if forecast else None),
        _bytes(forecast.peak_bytes if forecast else None),
    ]


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def _bytes(size_bytes: float | None) -> str:
    return "–" if size_bytes is None else format_bytes(size_bytes)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def _ratio(predicted: float | None, measured: float | None) -> str:
    return "–" if not predicted or not measured else f"{predicted / measured:.2f}"
