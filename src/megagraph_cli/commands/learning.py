"""``mgraph fit --with``: what plans that were run say of a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagraph_cli import recipes
from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.validation import Validation
from megagraph_cli.artifacts.workload import first_difference
from megagraph_cli.cost.learn import Run, learn
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting
from megagraph_cli.errors import EXIT_STALE, MgraphError


def corrected(fitted: CostModel, validations: Sequence[Path], *, force: bool) -> CostModel:
    """A cost model that has learnt from plans that were run (``mgraph fit --with``).

    Raises MgraphError: what ``Validation.load`` raises, exit 4 where it is of another workload, graph,
    device, number of hosts or of threads per worker.
    """
    runs = []
    for path in validations:
        found = Validation.load(path, force=force)
        if not force:
            _check_same(fitted, found, path)
        predictor = Predictor(fitted, found.workload, recipes.sets_for(fitted.workload.recipe()))
        for plan in found.plans:
            setting = Setting.of(plan)
            measured = plan.measured
            runs.append(Run(predictor, setting, tuple(plan.layers_per_stage), measured.step_s, measured.peak_bytes))
    learnt = learn(fitted, runs)
    inputs = [*fitted.inputs, *(reference_to(path) for path in validations)]
    return learnt.model_copy(update={"inputs": inputs})


def _check_same(fitted: CostModel, found: Validation, path: Path) -> None:
    """That plans were run of the workload and the kind of machine that were measured; layers and batch may differ."""
    mine, theirs = fitted.workload, found.workload
    changed = {
        "model": theirs.model.model_copy(update={"num_layers": mine.model.num_layers}),
        "batch": theirs.batch.model_copy(update={"batch_size": mine.batch.batch_size}),
    }
    differs = first_difference(mine, theirs.model_copy(update=changed))
    if differs is None and found.threads not in (None, fitted.threads):
        differs = "threads", fitted.threads, found.threads
    for key in ("device", "hosts"):
        pair = getattr(fitted.machine, key), getattr(found.machine, key)
        if differs is None and pair[0] != pair[1]:
            differs = f"machine.{key}", *pair
    if differs is not None:
        key, measured, ran = differs
        way_out = "profile with as many workers a host" if key == "threads" else "validate a cost model of this profile"
        raise MgraphError(
            f"{path} ran plans with {key} = {ran!r} but the profile was taken with {measured!r}; "
            f"{way_out}, or pass --force",
            EXIT_STALE,
        )
