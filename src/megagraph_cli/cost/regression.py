"""Coefficients from samples, and values from coefficients."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.cost.arrays import Array, Regressors
from megagraph_cli.errors import EXIT_STALE, MgraphError


class Design:
    """Samples of a quantity as a least-squares problem of relative residuals: small ones count as much as large."""

    def __init__(self, rows: Sequence[Regressors], measured: Sequence[float]) -> None:
        self.names = sorted({name for row in rows for name in row})
        self.matrix: Array = np.array([[float(row.get(name, 0.0)) for name in self.names] for row in rows])
        self.target: Array = np.array(measured, dtype=float)
        # A sample of zero has no relative residual; a thousandth of the typical one stands in for its size.
        typical = float(np.median(self.target[self.target > 0])) if np.any(self.target > 0) else 1.0
        self.weight: Array = 1.0 / np.maximum(self.target, typical * 1e-3)

    def solve(self, factors: Array | None = None) -> tuple[Array, Array]:
        """(coefficient by name, relative residual by sample) of the non-negative solution.

        ``factors`` multiply the entries of the matrix. A coefficient whose regressor is never other than zero is NaN.
        """
        matrix = self.matrix if factors is None else self.matrix * factors
        seen = np.abs(matrix).max(axis=0) > 0
        weighted = matrix[:, seen] * self.weight[:, None]
        # Columns differ by many orders of magnitude; without this the solver's tolerance would drop the small ones.
        scale = np.sqrt((weighted**2).sum(axis=0))
        solution, _ = nnls(weighted / scale, self.target * self.weight, maxiter=50 * max(1, len(self.names)))
        # The last digits are the linear algebra library's own; without them a cost model is the same on every machine.
        solution[solution < solution.max(initial=0.0) * 1e-12] = 0.0
        coefficients = np.full(len(self.names), np.nan)
        coefficients[seen] = solution / scale
        return coefficients, weighted @ (solution / scale) - self.target * self.weight


def fit_coefficients(rows: Sequence[Regressors], measured: Sequence[float]) -> dict[str, float]:
    """Non-negative least squares of relative residuals.

    Regressors that never differ from zero are left out of the result: they were not measured.
    """
    design = Design(rows, measured)
    found, _ = design.solve()
    return {
        name: float(f"{value:.12g}") for name, value in zip(design.names, found, strict=True) if not np.isnan(value)
    }


def evaluate(terms: Mapping[str, Mapping[str, float]], quantity: str, regressors: Regressors, *, remedy: str) -> Any:
    """Sum of coefficients times regressors.

    Raises MgraphError (exit 4), naming ``remedy``, where a coefficient was never measured.
    """
    coefficients = terms.get(quantity)
    if coefficients is None:
        raise never_measured(quantity, remedy)
    total: Any = 0.0
    for name in sorted(regressors):
        value = regressors[name]
        if name in coefficients:
            total = total + coefficients[name] * value
        elif np.any(np.asarray(value) != 0):
            raise never_measured(f"{quantity} {name}", remedy)
    return total


def profile_call(workload: Workload, device: str, sets: Sequence[str], hosts: int = 1) -> str:
    """The ``mgraph profile`` call for a workload, but for ``--gpus``; ``sets`` are its ``--set`` texts."""
    call = ["mgraph", "profile", "--dataset", workload.dataset.name]
    call += [word for text in sets for word in ("--set", text)]
    several = f" --nnodes {hosts} --node-rank I --rdzv-endpoint HOST:PORT" if hosts > 1 else ""
    return shlex.join([*call, "--device", device]) + several


def never_measured(what: str, remedy: str) -> MgraphError:
    """The error of a term that the profile does not hold."""
    return MgraphError(
        f"the profile never measured {what}, which this plan needs; run `{remedy}`, then fit again", EXIT_STALE
    )
