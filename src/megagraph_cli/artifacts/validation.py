"""validation.json: plans that were run for a few steps each, what was predicted of them beside what was measured."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.plan import DEFAULT_ORDER, Axis, Dims, is_default_order
from megagraph_cli.artifacts.profile import Context, Machine, Recompute
from megagraph_cli.artifacts.workload import Workload


class PredictedPlan(Part):
    step_s: float = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    margin_bytes: int = Field(ge=0)


class MeasuredPlan(Part):
    """Slowest rank's median step after three steps, largest rank's peak."""

    step_s: float = Field(gt=0)
    peak_bytes: int = Field(gt=0)


class ChosenPlan(Part):
    """A plan to run. ``overrides`` are the keys that search's ``--set`` takes, where they differ from the workload."""

    gpus: int = Field(ge=1)
    overrides: dict[str, int]
    dims: Dims
    layers_per_stage: list[int] = Field(min_length=1)
    num_microbatches: int = Field(ge=1)
    schedule: str
    recompute: Recompute
    context: Context
    mesh_order: list[Axis] = Field(default=DEFAULT_ORDER, exclude_if=is_default_order)
    predicted: PredictedPlan


class ValidatedPlan(ChosenPlan):
    """A plan that was run."""

    measured: MeasuredPlan


class FailedPlan(ChosenPlan):
    """A plan whose workers failed, and how. ``number``: its place among the plans that were chosen; 0 the pick."""

    number: int = Field(ge=0)
    message: str


class MemoryAgreement(Part):
    """Fractions; ``r2`` null where all plans measured the same. ``max_under``: worst shortfall of a prediction."""

    mape: float
    r2: float | None
    max_under: float


class TimeAgreement(Part):
    """Fractions but for ``spearman``, which is null where plans cannot be ranked.

    ``regret``: the search's pick against the best measured plan, both measured again in turn; null where workers
    failed before that or under the pick, so that nothing stands beside it.
    """

    mape: float
    spearman: float | None
    regret: float | None


class Validation(Artifact):
    """What ``mgraph validate`` found; ``mgraph fit --with`` learns from it."""

    SCHEMA: ClassVar[str] = "mgraph.validation/1"
    MADE_BY: ClassVar[str] = "mgraph validate"

    schema_version: str = Field(default=SCHEMA, alias="schema")
    workload: Workload
    machine: Machine
    steps: int = Field(ge=1)
    threads: int | None = Field(default=None, ge=1, exclude_if=lambda threads: threads is None)
    """Compute threads of each worker, the fewest of any host; None in files from before this was kept."""
    plans: list[ValidatedPlan] = Field(min_length=1)
    failed: list[FailedPlan] = Field(default=[], exclude_if=lambda found: not found)
    memory: MemoryAgreement
    time: TimeAgreement
