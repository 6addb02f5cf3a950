"""Predicted peak memory beside measured, for plans of several profiles on a CPU (memory does not depend on load).

``python bench/memory_model.py [--out DIR] [--plans N] [CASE ...]``: profiles, fits and runs N plans of each case (all
by default; cases differ in workers, layers, sequence length and batch size), keeps both in DIR, then judges all that
lie there with a cost model fitted afresh. No plan was used for fitting: a profile measures single modules.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from megagraph_cli import recipes
from megagraph_cli.artifacts.profile import Profile
from megagraph_cli.artifacts.validation import Validation
from megagraph_cli.commands import fit, profile, validate
from megagraph_cli.commands.profile import ProfileRequest
from megagraph_cli.commands.validate import ValidateRequest
from megagraph_cli.commands.workloads import Folders
from megagraph_cli.console import Screen
from megagraph_cli.cost import fitting
from megagraph_cli.cost.judge import mape, r_squared
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting

NO_FEATURES = "dataset.name=synthetic:nodes=20000,edges=80000,classes=5"
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    # name: (workers, changes of the demo recipe)
    "one": (1, ("model.num_layers=4", "batch.batch_size=128")),
    "one-long": (1, ("model.num_layers=6", "batch.batch_size=64", "batch.num_sampled=40")),
    "two": (2, ("model.num_layers=8", "batch.batch_size=256")),
    "two-small": (2, ("model.num_layers=3", "batch.batch_size=64", "model.hidden_dim=64", "model.ffn_dim=64")),
    "two-long": (2, ("model.num_layers=6", "batch.batch_size=64", "batch.num_sampled=60", "batch.num_super=3")),
    "two-wide": (2, ("model.num_layers=12", "batch.batch_size=96", "model.hidden_dim=64", "model.ffn_dim=128")),
    "one-table": (1, (NO_FEATURES, "model.num_layers=3", "batch.batch_size=512")),
    "two-table": (2, (NO_FEATURES, "model.num_layers=3", "batch.batch_size=1024")),
    "four": (4, ("model.num_layers=8", "batch.batch_size=256")),
    "four-long": (4, ("model.num_layers=6", "batch.batch_size=64", "batch.num_sampled=45")),
    "four-wide": (4, ("model.num_layers=10", "batch.batch_size=128", "model.hidden_dim=64", "model.ffn_dim=64")),
}


def main() -> None:
    """Run the cases that have no validation yet, then judge all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("memory-model"))
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        if not (options.out / f"{name}.json").exists():
            run(name, options.out, options.plans)
    judge(options.out)


def run(name: str, out: Path, plans: int) -> None:
    """Profile, fit and run the plans of one case."""
    workers, sets = CASES[name]
    home = Path("~/.cache/mgraph").expanduser()
    folders = Folders(
        Path(os.environ.get("MGRAPH_DATA", home / "data")), Path(os.environ.get("MGRAPH_CACHE", home / "graphs"))
    )
    screen = Screen.stderr()
    recipe = recipes.resolve("demo", None, sets)
    measured, fitted = out / f"{name}.profile", out / f"{name}.cost_model"
    profile.run(ProfileRequest(recipe, folders, "cpu", workers, quick=True), measured, screen)
    fit.run(measured, fitted, force=False)
    request = ValidateRequest(fitted, folders, plans=plans, steps=validate.LEAST_STEPS)
    validate.run(replace(request, rounds=0), out / f"{name}.json", screen)


def judge(out: Path) -> None:
    """One line for each case, then all plans together."""
    everything: list[tuple[float, float, float]] = []
    for path in sorted(out.glob("*.json")):
        cost_model = fitting.fit(Profile.load(path.with_suffix(".profile")))
        found = Validation.load(path)
        predictor = Predictor(cost_model, found.workload)
        rows = []
        for plan in found.plans:
            setting = Setting(plan.dims.parallel(), plan.num_microbatches, plan.schedule, plan.recompute, plan.context)
            forecast = predictor.forecast(setting, plan.layers_per_stage)
            rows.append((plan.measured.peak_bytes, forecast.peak_bytes, forecast.margin_bytes / forecast.peak_bytes))
        everything += rows
        tell(path.stem, rows)
    if everything:
        tell("all", everything)


def tell(name: str, rows: list[tuple[float, float, float]]) -> None:
    """(measured, predicted, margin as a share of the predicted) of plans in a line."""
    truth, guess, margins = (np.array(column) for column in zip(*rows, strict=True))
    under = int((guess * (1 + margins) < truth).sum())
    worst = max(0.0, float((truth / guess / (1 + margins)).max()) - 1)
    r2 = r_squared(truth.tolist(), guess.tolist())
    print(
        f"{name}: {len(rows)} plans, MAPE {100 * mape(truth.tolist(), guess.tolist()):.2f} %, R2 {r2 or 0:.5f}, "
        f"{under} above prediction and margin (by {100 * worst:.2f} % at most), "
        f"median margin {100 * np.median(margins):.2f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
