"""The tables that end each command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megagraph_cli.artifacts.cost_model import CostModel, Quality
from megagraph_cli.artifacts.plan import BriefPlan, Plan
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.artifacts.run import Run
from megagraph_cli.console import Screen
from megagraph_cli.units import format_bytes, format_seconds


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


def show_plan(plan: Plan, out: Path, top: int, screen: Screen) -> None:
    """The plan, its stages' forecast, and the first ``top`` runners-up."""
    counts, forecast = plan.search, plan.predicted
    searched = "" if counts is None else f", best of {counts.num_feasible} feasible of {counts.num_candidates} plans"
    screen.note(f"{out}: {plan.gpus} workers{searched}")
    columns = ["plan", "layers", "micro-batches", "schedule", "step time", "peak memory"]
    rows = [_plan_row("chosen", plan)] + [
        _plan_row(f"#{number}", brief) for number, brief in enumerate(plan.runners_up[:top], start=2)
    ]
    screen.table("plans", columns, rows)
    if forecast is not None:
        stages = [
            [str(index), str(layers), format_seconds(stage.time_s), format_bytes(sum(stage.memory_bytes.values()))]
            for index, (layers, stage) in enumerate(zip(plan.layers_per_stage, forecast.stages, strict=True))
        ]
        screen.table("stages", ["stage", "layers", "busy per step", "memory"], stages)


def warn_extrapolated(plan: Plan, screen: Screen) -> None:
    """One warning when the forecast goes beyond what the profile measured."""
    if plan.extrapolated:
        said = ", ".join(
            f"{each.quantity} {each.asked:g} (measured to {each.measured_max:g})" for each in plan.extrapolated
        )
        screen.warn(f"the forecast is extrapolated beyond what was measured: {said}")


def show_run(run: Run, run_dir: Path, screen: Screen) -> None:
    """The test score, and the forecast beside what was measured."""
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
    screen.note(f"test score {_percent(run.test_score)}{best}")
    screen.table(str(run_dir), ["", "predicted", "measured", "predicted ÷ measured"], rows)


def _plan_row(name: str, plan: Plan | BriefPlan) -> list[str]:
    forecast = plan.predicted
    return [
        f"{name}: pp={plan.dims.pp} cp={plan.dims.cp} dp={plan.dims.dp}",
        ",".join(str(layers) for layers in plan.layers_per_stage),
        str(plan.num_microbatches),
        plan.schedule,
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
