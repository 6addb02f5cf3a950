"""The cost model that is fitted to the planted profile, once for all tests of a process."""

from __future__ import annotations

from functools import cache

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.fitting import fit
from tests.cost import planted

EXACT = 1e-6
"""Planted values are exact, so only the solver's rounding over badly scaled columns is left."""


@cache
def planted_model() -> CostModel:
    return fit(planted.profile())
