"""cost_model.json: coefficients fitted to a profile, and how well they foretell what was held out."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.profile import Context, Machine, Recompute
from megagraph_cli.artifacts.workload import Workload


class Quality(Part):
    """Held-out quality of one quantity; ``mape`` and ``max_under`` are fractions, null where nothing was held out."""

    mape: float | None
    r2: float | None
    max_under: float | None
    num_fit: int = Field(ge=0)
    num_held_out: int = Field(ge=0)


class QualityTable(Part):
    memory: Quality
    time: Quality


Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Of a term: every fit is non-negative, and what is not foretells no time and no bytes."""


class MeasuredWay(Part):
    """The most layers in a row and sequences of a micro-batch that one way to run layers was measured at.

    ``spread``: over several context ranks. ``least_microbatch_size`` is null in a cost model that was fitted before
    it was kept.
    """

    recompute: Recompute
    context: Context
    spread: bool
    layers: int = Field(ge=1)
    microbatch_size: int = Field(ge=1)
    least_microbatch_size: int | None = Field(default=None, ge=1, exclude_if=lambda least: least is None)


class Exhausted(Part):
    """A size at which the profile ran out of memory: whatever is at least as large needs at least as much.

    ``fits``: the largest micro-batch at which the same was measured, 0 where none was. ``layers`` 0: another module
    than a run of middle layers; ``recompute`` or ``context`` null: it has the same bytes whichever way.
    """

    cp: int = Field(ge=1)
    recompute: Recompute | None
    context: Context | None
    layers: int = Field(ge=0)
    microbatch_size: int = Field(ge=1)
    fits: int = Field(ge=0)


class MeasuredRange(Part):
    """The most of each quantity that the profile measured; beyond it a forecast is extrapolated."""

    gpus: int = Field(ge=1)
    layers: int = Field(ge=1)
    microbatch_size: int = Field(ge=1)
    message_bytes: int = Field(ge=0)
    ways: list[MeasuredWay]
    touched_bytes: int = Field(default=0, ge=0, exclude_if=lambda most: not most)
    exhausted: list[Exhausted] = Field(default=[], exclude_if=lambda found: not found)


class CostModel(Artifact):
    """What ``mgraph fit`` makes of a profile and ``mgraph search`` predicts with."""

    SCHEMA: ClassVar[str] = "mgraph.cost_model/1"
    MADE_BY: ClassVar[str] = "mgraph fit"

    schema_version: str = Field(default=SCHEMA, alias="schema")
    workload: Workload
    machine: Machine
    terms: dict[str, dict[str, Coefficient]]
    quality: QualityTable
    measured: MeasuredRange

    @property
    def threads(self) -> int:
        """Compute threads that each worker had when it was measured."""
        return max(1, round(self.terms["threads"]["per_worker"]))
