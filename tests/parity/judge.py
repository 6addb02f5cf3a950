"""How far a plan may differ from one worker, and the run of some plans that is judged by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.parity.cases import ALL, Case
from tests.parity.runner import Outcome, run_cases
from tests.ranks import run_ranks

RAW = Path(os.environ.get("MGRAPH_DATA", "no-data"))
DATASET = "citeseer" if (RAW / "citeseer").is_dir() else "demo"
"""Citeseer where its files are at hand, else the built-in graph: the tests' names say which."""

# float64: rounding of 1e-16 grows over 20 steps of lr 0.01; float32 starts at 6e-8.
STEP_TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
GRADIENT_TOLERANCE = 1e-9
ZERO_TOLERANCE = 1e-12
DEADLINE_S = 1500 if ALL else 360
"""All are 74 plans of four workers; on a busy machine of two cores that takes a while."""


Alone = Callable[[Case], Outcome]
"""What one worker makes of a case's model."""


def run(size: int, graph_path: Path, dataset: str, cases: list[Case]) -> list[Outcome]:
    outcomes: list[Outcome] = run_ranks(size, run_cases, graph_path, dataset, cases, deadline_s=DEADLINE_S)[0]
    return outcomes


def all_complaints(cases: list[Case], outcomes: list[Outcome], alone: Alone) -> list[str]:
    """What is wrong with any of the outcomes."""
    found = []
    for case, got in zip(cases, outcomes, strict=True):
        found += complaints(case, got, alone(case))
    return found


def complaints(case: Case, got: Outcome, expected: Outcome) -> list[str]:
    """Every way in which a plan differs from one worker by more than arithmetic allows."""
    found = []
    tolerance = STEP_TOLERANCE[case.dtype]
    for name, a, b in (("loss", got.losses, expected.losses), ("norm", got.norms, expected.norms)):
        worst = float(np.max(np.abs(np.array(a) / np.array(b) - 1)))
        if not worst <= tolerance:
            found.append(f"{case}: {name} differs by {worst:.2e}")
    if case.dtype == "float64":
        found += gradient_complaints(case, got, expected)
        if not np.array_equal(got.predictions[:, 0], expected.predictions[:, 0]):
            found.append(f"{case}: other predictions")
    return found


def gradient_complaints(case: Case, got: Outcome, expected: Outcome) -> list[str]:
    if got.gradients.keys() != expected.gradients.keys():
        return [f"{case}: gradients of {sorted(got.gradients.keys() ^ expected.gradients.keys())[:3]} missing"]
    found = []
    for name, theirs in expected.gradients.items():
        difference = np.abs(got.gradients[name] - theirs)
        zero = zero_by_mathematics(name, theirs.shape)
        scale = np.abs(np.where(zero, 0, theirs)).max(initial=0.0)
        if (difference[zero] > ZERO_TOLERANCE).any() or (np.abs(theirs[zero]) > ZERO_TOLERANCE).any():
            found.append(f"{case}: {name} is not zero where it must be")
        if difference[~zero].size and not difference[~zero].max() <= GRADIENT_TOLERANCE * scale:
            found.append(f"{case}: gradient of {name} differs by {difference[~zero].max() / scale:.2e}")
    return found


def zero_by_mathematics(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Softmax does not feel a constant added to a row: the key bias and b_bias have no gradient."""
    zero = np.zeros(shape, dtype=bool)
    if name.endswith("bias_offset"):
        zero[:] = True
    if name.endswith("qkv.bias"):
        third = shape[0] // 3
        zero[third : 2 * third] = True
    return zero
