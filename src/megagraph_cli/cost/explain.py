"""What a plan costs, stage by stage and term by term, and why a candidate lost or was pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megagraph_cli.cost.partition import Split, caps_within, first_split, least_need
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting, role_of
from megagraph_cli.cost.simulate import Event, events
from megagraph_cli.units import format_bytes

WAITING = "waiting"
ROUNDING = 1e-9


@dataclass(frozen=True)
class StageCost:
    """One stage of a plan: seconds of a step by term (they add up to the step) and bytes by term at its peak."""

    layers: int
    time_s: dict[str, float]
    memory_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def busy_s(self) -> float:
        return sum(seconds for term, seconds in self.time_s.items() if term != WAITING)


@dataclass(frozen=True)
class PlanCost:
    """A whole plan. ``need_bytes`` is peak, margin and overhead of its worst stage; ``events`` the pipeline's work.

    ``tail_s`` follows the pipeline, which ends at ``pipeline_s``.
    """

    setting: Setting
    split: Split
    step_s: float
    pipeline_s: float
    need_bytes: int
    stages: list[StageCost]
    events: list[Event]

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds by term, averaged over stages: they add up to the step."""
        names = sorted({name for stage in self.stages for name in stage.time_s})
        return {name: float(np.mean([stage.time_s.get(name, 0.0) for stage in self.stages])) for name in names}


def cost_of(predictor: Predictor, setting: Setting, split: Sequence[int]) -> PlanCost:
    """Every second and every byte of a plan, by stage and term."""
    forecast = predictor.forecast(setting, split)
    count, pp = setting.num_microbatches, setting.dims.pp
    forward, backward, passes = [], [], []
    for stage, held in enumerate(split):
        role, layers = role_of(stage, pp), np.array([float(held)])
        ahead = predictor.pass_parts("forward_s", setting, role, layers)
        back = predictor.pass_parts("backward_s", setting, role, layers)
        forward.append(sum(float(part[0]) for part in ahead.values()))
        backward.append(sum(float(part[0]) for part in back.values()))
        passes.append({_named(part): count * float(ahead[part][0] + back[part][0]) for part in ahead})
    work = events(forward, backward, predictor.p2p_s(setting), count, setting.schedule)
    stages = []
    for stage, (held, times) in enumerate(zip(split, passes, strict=True)):
        role, layers = role_of(stage, pp), np.array([float(held)])
        if pp > 1:
            times["boundary"] = _boundary_s([event for event in work if event.stage == stage])
        times |= {name: float(part[0]) for name, part in predictor.tail_parts(setting, role, layers).items()}
        # What is left over by rounding alone is not waiting.
        left_s = forecast.step_s - sum(times.values())
        times[WAITING] = left_s if left_s > ROUNDING * forecast.step_s else 0.0
        stages.append(StageCost(held, times, forecast.stages[stage].memory_bytes))
    return PlanCost(
        setting=setting,
        split=tuple(split),
        step_s=forecast.step_s,
        pipeline_s=max(event.end_s for event in work),
        need_bytes=forecast.peak_bytes + forecast.margin_bytes + forecast.overhead_bytes,
        stages=stages,
        events=work,
    )


def _boundary_s(work: Sequence[Event]) -> float:
    """Seconds in which a stage stands still while the message that it waits for travels: the rest hides behind work."""
    free_s, waited_s = 0.0, 0.0
    for event in work:
        waited_s += max(0.0, event.start_s - max(free_s, event.arrival_s - event.travel_s)) if event.travel_s else 0.0
        free_s = event.end_s
    return waited_s


def _named(part: str) -> str:
    """What people call a part: what a stage does once per micro-batch is mostly its bias channels."""
    return {"stage": "channels", "layer": "layers", "last_layer": "last layer", "merge": "merging"}.get(part, part)


def leanest(predictor: Predictor, settings: Sequence[Setting], layers: Split | None) -> tuple[Setting, Split]:
    """Of all plans of these settings one with the fewest bytes on its worst stage."""

    def need(setting: Setting) -> int:
        tables = predictor.tables(setting)
        if layers is None:
            return least_need(tables)
        return max(int(each[held - 1]) for each, held in zip(tables.need_bytes, layers, strict=True))

    setting = min(settings, key=lambda each: (need(each), each))
    if layers is not None:
        return setting, layers
    tables = predictor.tables(setting)
    return setting, first_split(caps_within(tables, least_need(tables)), tables.num_layers)


def reasons(cost: PlanCost, best: PlanCost, limit_bytes: int) -> list[str]:
    """Sentences that say why ``cost`` is not the chosen plan, the largest reason first; empty where it is."""
    if cost.need_bytes > limit_bytes:
        over = cost.need_bytes - limit_bytes
        stage = max(range(len(cost.stages)), key=lambda each: cost.stages[each].peak_bytes)
        peak = cost.stages[stage].peak_bytes
        term, size = max(cost.stages[stage].memory_bytes.items(), key=lambda pair: pair[1])
        return [
            f"stage {stage} needs {over} bytes more than the limit of {format_bytes(limit_bytes)}; beside a "
            f"worker's overhead and the margin it holds {format_bytes(peak)} at its peak, of which "
            f"{100 * size / peak:.0f} % is {term}"
        ]
    mine, theirs = cost.times_s, best.times_s
    gaps = {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in {*mine, *theirs}}
    worse = sorted(((gap, name) for name, gap in gaps.items() if gap > 0.01 * best.step_s), reverse=True)
    return [
        f"{name} takes {1e3 * gap:.3g} ms more of a step ({1e3 * mine.get(name, 0.0):.3g} ms against "
        f"{1e3 * theirs.get(name, 0.0):.3g} ms)"
        for gap, name in worse
    ]
