"""``mgraph fit``: a profile in, a cost model out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagraph_cli import recipes
from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.cost.fitting import fit


def run(profile_path: Path, out: Path, *, force: bool, learn_from: Sequence[Path] = ()) -> CostModel:
    """Fit a profile, let the cost model learn from validations, and write it to ``out``.

    Raises MgraphError: what ``Profile.load`` and ``Validation.load`` raise, and exit 4 where the profile lacks a
    term or a validation is of another workload or device.
    """
    profile = Profile.load(profile_path, force=force)
    fitted = fit(profile, recipes.sets_for(profile.workload.recipe()))
    cost_model = fitted.model_copy(update={"inputs": [reference_to(profile_path)]})
    if learn_from:
        from megagraph_cli.commands.learning import corrected

        cost_model = corrected(cost_model, learn_from, force=force)
    return cost_model.save(out)
