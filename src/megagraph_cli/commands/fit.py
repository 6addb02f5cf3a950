"""``mgraph fit``: a profile in, a cost model out."""

from __future__ import annotations

from pathlib import Path

from megagraph_cli import recipes
from megagraph_cli.artifacts.base import reference_to
from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.cost.fitting import fit


def run(profile_path: Path, out: Path, *, force: bool) -> CostModel:
    """Fit a profile and write the cost model to ``out``.

    Raises MgraphError: what ``Profile.load`` raises, and exit 4 where the profile lacks a term.
    """
    profile = Profile.load(profile_path, force=force)
    fitted = fit(profile, recipes.sets_for(profile.workload.recipe()))
    cost_model = fitted.model_copy(update={"inputs": [reference_to(profile_path)]})
    return cost_model.save(out)
