"""``mgraph fit --with``: what plans that were run say of a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagraph_cli import recipes
from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.validation import Validation
from megagraph_cli.artifacts.workload import Recipe
from megagraph_cli.cost.learn import Run, learn
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting
from megagraph_cli.errors import EXIT_STALE, MgraphError


def corrected(fitted: CostModel, validations: Sequence[Path], *, force: bool) -> CostModel:
    """A cost model that has learnt from plans that were run (``mgraph fit --with``).

    Raises MgraphError: what ``Validation.load`` raises, exit 4 where it is of another workload or device.
    """
    runs = []
    for path in validations:
        found = Validation.load(path, force=force)
        if not force:
            recipe = found.workload.recipe()
            same = recipe.model_copy(
                update={
                    "model": recipe.model.model_copy(update={"num_layers": fitted.workload.model.num_layers}),
                    "batch": recipe.batch.model_copy(update={"batch_size": fitted.workload.batch.batch_size}),
                }
            )
            _check_same(fitted, same, found, path)
        predictor = Predictor(fitted, found.workload, recipes.sets_for(fitted.workload.recipe()))
        for plan in found.plans:
            setting = Setting.of(plan)
            measured = plan.measured
            runs.append(Run(predictor, setting, tuple(plan.layers_per_stage), measured.step_s, measured.peak_bytes))
    learnt = learn(fitted, runs)
    inputs = [*fitted.inputs, *(reference_to(path) for path in validations)]
    return learnt.model_copy(update={"inputs": inputs})


def _check_same(fitted: CostModel, recipe: Recipe, found: Validation, path: Path) -> None:
    for section in ("dataset", "model", "batch"):
        mine, theirs = getattr(fitted.workload, section), getattr(recipe, section)
        for key in type(mine).model_fields:
            if getattr(mine, key) != getattr(theirs, key):
                raise MgraphError(
                    f"{path} ran plans with {section}.{key} = {getattr(theirs, key)!r} but the profile was taken with "
                    f"{getattr(mine, key)!r}; validate a cost model of this profile, or pass --force",
                    EXIT_STALE,
                )
    if found.machine.device != fitted.machine.device:
        raise MgraphError(
            f"{path} ran on {found.machine.device} but the profile on {fitted.machine.device}; validate on one device, "
            "or pass --force",
            EXIT_STALE,
        )
