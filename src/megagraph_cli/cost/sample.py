"""Which plans to run to judge a cost model over its whole space: every degree, schedule and way, few of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from megagraph_cli.cost.candidates import candidate_of
from megagraph_cli.cost.partition import Split, balanced
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import Found, SearchResult
from megagraph_cli.cost.setting import Setting
from megagraph_cli.cost.space import Pins

COUNTS = 3
"""Numbers of micro-batches for each choice of degrees: the fewest, the most, and one between."""

Plan = tuple[Setting, Split]


def plans_to_run(predictor: Predictor, result: SearchResult, gpus: int, mem_bytes: int, count: int) -> list[Plan]:
    """The search's pick first, then its runners-up, then plans drawn in turn from every choice of degrees.

    All fit in ``mem_bytes``. A function of its input.
    """
    chosen: dict[Plan, None] = {}
    for found in (result.best, *result.runners_up[: max(0, count // 8)]):
        chosen[_plan(found)] = None
    drawn = _drawn(predictor, predictor.settings(gpus, Pins()), mem_bytes)
    for plan in drawn:
        if len(chosen) >= count:
            break
        chosen[plan] = None
    return list(chosen)[:count]


def _plan(found: Found) -> Plan:
    return found.setting, found.choice.split


def _drawn(predictor: Predictor, every: Sequence[Setting], mem_bytes: int) -> Iterator[Plan]:
    """Plans in turn from each choice of degrees; within one, every value of the other dimensions comes early."""
    rng = random.Random(0)
    queues = []
    for _, group in itertools.groupby(every, key=lambda setting: setting.dims):
        members = list(group)
        counts = _some([setting.num_microbatches for setting in members])
        plans = [
            (setting, split)
            for setting in members
            if setting.num_microbatches in counts
            for split in _splits(predictor, setting, mem_bytes)
        ]
        rng.shuffle(plans)
        queues.append(_varied(plans))
    for turn in itertools.zip_longest(*queues):
        yield from (plan for plan in turn if plan is not None)


def _some(values: Sequence[int]) -> list[int]:
    distinct = sorted(set(values))
    if len(distinct) <= COUNTS:
        return distinct
    return [distinct[0], distinct[len(distinct) // 2], distinct[-1]]


def _splits(predictor: Predictor, setting: Setting, mem_bytes: int) -> list[Split]:
    """The best split of a setting, the even one, one that loads the first stage and one that loads the last."""
    layers, pp = predictor.workload.model.num_layers, setting.dims.pp
    even = balanced(layers, pp)
    candidate = candidate_of(predictor.tables(setting), None)
    need_bytes = mem_bytes - predictor.overhead_bytes
    best = candidate.fastest(need_bytes)
    found = [] if best is None else [best.split]
    found += [even, _leaning(even, 0), _leaning(even, pp - 1)]
    return [split for split in dict.fromkeys(found) if candidate.need_of(split) <= need_bytes]


def _leaning(even: Split, stage: int) -> Split:
    """Half of the layers that every other stage can spare go to one."""
    moved = [0 if other == stage else (held - 1) // 2 for other, held in enumerate(even)]
    return tuple(
        held + sum(moved) if other == stage else held - less
        for other, (held, less) in enumerate(zip(even, moved, strict=True))
    )


def _varied(plans: list[Plan]) -> list[Plan]:
    """The same plans, each next one the most unlike those before it in what has been seen of every dimension."""
    seen: dict[object, int] = {}
    ordered: list[Plan] = []
    left = list(plans)
    while left:
        plan = min(left, key=lambda each: sum(seen.get(feature, 0) for feature in _features(each)))
        left.remove(plan)
        ordered.append(plan)
        for feature in _features(plan):
            seen[feature] = seen.get(feature, 0) + 1
    return ordered


def _features(plan: Plan) -> list[object]:
    setting, split = plan
    return [
        ("count", setting.num_microbatches),
        ("schedule", setting.schedule),
        ("recompute", setting.recompute),
        ("context", setting.context),
        ("order", setting.order),
        ("split", split),
    ]
