"""cost_model.json: coefficients fitted to a profile, and how well they foretell what was held out."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.profile import Machine
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


class MeasuredRange(Part):
    """The most of each quantity that the profile measured; beyond it a forecast is extrapolated."""

    gpus: int = Field(ge=1)
    layers: int = Field(ge=1)
    microbatch_size: int = Field(ge=1)
    message_bytes: int = Field(ge=0)


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
