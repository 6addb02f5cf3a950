"""What a fit of single modules misses is learnt from whole plans that were run: a few factors, and the margin.

Modules are measured alone; in a run they share caches, memory bandwidth and links with what happens beside them. Each
factor stretches one kind of time for every plan alike, starts at 1 and moves only as far as the runs pull it, so that
a handful of runs cannot bend the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.arrays import Array
from megagraph_cli.cost.judge import quality, short
from megagraph_cli.cost.partition import Split
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.seconds import CALIBRATED
from megagraph_cli.cost.setting import Setting

PULL = 0.3
"""A factor of 1 + PULL weighs as much as one run that is predicted 100 % wrong, divided by the runs' number."""
MOST_FACTOR = 4.0
FOLDS = 4


@dataclass(frozen=True)
class Run:
    """A plan that was run: ``predictor`` of its workload under the cost model that is to learn."""

    predictor: Predictor
    setting: Setting
    split: Split
    step_s: float
    peak_bytes: int


def learn(fitted: CostModel, runs: Sequence[Run]) -> CostModel:
    """The cost model with calibrated times and with a margin that covers every run.

    ``quality.time`` and ``quality.memory`` become those of runs left out, a quarter at a time.
    """
    factors = _factors(runs)
    guesses = np.zeros(len(runs))
    for fold in range(min(FOLDS, len(runs))):
        out = [index for index in range(len(runs)) if index % FOLDS == fold]
        kept = [run for index, run in enumerate(runs) if index % FOLDS != fold]
        trial = _factors(kept) if kept else np.ones(len(CALIBRATED))
        guesses[out] = [_step_s(runs[index], trial) for index in out]
    steps_s = [run.step_s for run in runs]
    peaks = [float(run.peak_bytes) for run in runs]
    predicted = [float(run.predictor.forecast(run.setting, run.split).peak_bytes) for run in runs]
    over = max((peak - guess) / guess for peak, guess in zip(peaks, predicted, strict=True))
    terms = {name: dict(values) for name, values in fitted.terms.items()}
    terms["calibration"] = {name: short(float(factor)) for name, factor in zip(CALIBRATED, factors, strict=True)}
    terms["margin"]["relative"] = max(terms["margin"]["relative"], math.ceil(max(0.0, over) * 1e6) / 1e6)
    agreement = fitted.quality.model_copy(
        update={
            "time": quality(steps_s, guesses.tolist(), len(runs)),
            "memory": quality(peaks, predicted, fitted.quality.memory.num_fit),
        }
    )
    return fitted.model_copy(update={"terms": {name: terms[name] for name in sorted(terms)}, "quality": agreement})


def _factors(runs: Sequence[Run]) -> Array:
    """The factors, in the order of ``CALIBRATED``, that bring predicted steps nearest to measured ones."""
    pull = PULL * math.sqrt(len(runs)) / 10

    def residuals(logs: Array) -> Array:
        factors = np.exp(logs)
        misses = [math.log(_step_s(run, factors) / run.step_s) for run in runs]
        return np.array([*misses, *(pull * logs)])

    most = math.log(MOST_FACTOR)
    solved = least_squares(residuals, np.zeros(len(CALIBRATED)), bounds=(-most, most), loss="soft_l1", f_scale=0.1)
    return np.asarray(np.exp(solved.x), dtype=float)


def _step_s(run: Run, factors: Array) -> float:
    terms = dict(run.predictor.cost_model.terms)
    terms["calibration"] = {name: float(factor) for name, factor in zip(CALIBRATED, factors, strict=True)}
    cost_model = run.predictor.cost_model.model_copy(update={"terms": terms})
    fresh = replace(run.predictor, cost_model=cost_model, _known={})
    return fresh.step_s(run.setting, run.split)
