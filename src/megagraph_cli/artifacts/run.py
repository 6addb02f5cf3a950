"""run.json: what became of a training run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.plan import BriefForecast


class EpochRecord(Part):
    """One whole epoch. ``data_stall_s`` is its sum over steps on rank 0."""

    epoch: int
    train_loss: float
    val_score: float | None
    epoch_s: float
    data_stall_s: float
    sampling_weights: list[float] = Field(min_length=4, max_length=4)


class RankRecord(Part):
    """One rank. ``memory``: the bytes of its peak by category; null where nothing was measured."""

    rank: int
    pp: int
    dp: int
    cp: int
    peak_bytes: int | None
    step_s: float | None
    memory: dict[str, int] | None = None


class Measured(Part):
    """Slowest rank's median step (after three steps) and the largest rank's peak; null where nothing was measured."""

    step_s: float | None
    peak_bytes: int | None


class Failure(Part):
    """The rank that failed first, where it stands in the mesh, and why (``signal`` or ``exception``)."""

    rank: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    signal: str | None = None
    exception: str | None = None
    message: str


class Run(Artifact):
    """``restarts``: the failures after which the run went on from its last checkpoint; left out where none was."""

    SCHEMA: ClassVar[str] = "mgraph.run/1"
    MADE_BY: ClassVar[str] = "mgraph train"
    WAY_OUT: ClassVar[str] = "give a writable place with --run-dir"

    schema_version: str = Field(default=SCHEMA, alias="schema")
    status: Literal["completed", "failed", "interrupted"]
    rng_seed: int
    epochs: list[EpochRecord]
    best_epoch: int | None
    test_score: float | None
    data_stall_s: float | None
    ranks: list[RankRecord]
    predicted: BriefForecast | None
    measured: Measured
    failure: Failure | None = None
    restarts: list[Failure] = Field(default=[], exclude_if=lambda restarts: not restarts)
