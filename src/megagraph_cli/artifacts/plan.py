"""plan.json: the order (what train does) and, apart from it, the forecast (what the search expects of it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from megagraph_cli.artifacts.base import Artifact, Part
from megagraph_cli.artifacts.profile import Context, Recompute
from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.layout.schedules import SCHEDULES


class Dims(Part):
    pp: int = Field(ge=1)
    dp: int = Field(ge=1)
    cp: int = Field(ge=1)

    def parallel(self) -> ParallelDims:
        return ParallelDims(pp=self.pp, dp=self.dp, cp=self.cp)

    @classmethod
    def of(cls, dims: ParallelDims) -> Dims:
        return cls(pp=dims.pp, dp=dims.dp, cp=dims.cp)


class StageForecast(Part):
    """One stage: busy seconds per step, and its bytes by term at its largest phase."""

    time_s: float
    memory_bytes: dict[str, int]


class Forecast(Part):
    step_s: float
    epoch_s: float
    peak_bytes: int
    overhead_bytes: int
    margin_bytes: int
    stages: list[StageForecast]


class SearchCounts(Part):
    """``max_gap``: the largest fraction by which another plan may be faster; left out where there is none."""

    num_candidates: int = Field(ge=0)
    num_feasible: int = Field(ge=0)
    max_gap: float = Field(default=0.0, ge=0, lt=1, exclude_if=lambda gap: gap == 0.0)


class Extrapolation(Part):
    """A quantity asked beyond what the profile measured; ``asked`` up to ``measured_max`` is less than the least."""

    quantity: str
    measured_max: float
    asked: float


class BriefForecast(Part):
    step_s: float
    peak_bytes: int


Axis = Literal["pp", "dp", "cp"]
DEFAULT_ORDER: list[Axis] = ["pp", "dp", "cp"]


def is_default_order(order: list[str]) -> bool:
    """Whether a plan that is not the chosen one may leave its mesh order out."""
    return order == DEFAULT_ORDER


class BriefPlan(Part):
    """A plan of the Pareto front or a runner-up."""

    dims: Dims
    layers_per_stage: list[int]
    num_microbatches: int
    schedule: str
    recompute: Recompute
    context: Context
    mesh_order: list[Axis] = Field(default=DEFAULT_ORDER, exclude_if=is_default_order)
    predicted: BriefForecast


class Plan(Artifact):
    """An order for train. Written by hand: ``schema, gpus, workload, dims, layers_per_stage, num_microbatches``."""

    SCHEMA: ClassVar[str] = "mgraph.plan/1"
    MADE_BY: ClassVar[str] = "mgraph search"

    schema_version: str = Field(default=SCHEMA, alias="schema")
    gpus: int = Field(ge=1)
    hosts: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] | None = None
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    workload: Workload
    dims: Dims
    mesh_order: list[Axis] = DEFAULT_ORDER
    layers_per_stage: list[int] = Field(min_length=1)
    num_microbatches: int = Field(ge=1)
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    recompute: Recompute = "none"
    context: Context = "ring"
    threads: int | None = Field(default=None, ge=1, exclude_if=lambda threads: threads is None)
    """Compute threads of each worker that the forecast counts on; None: each has its share of its host's cores."""
    predicted: Forecast | None = None
    search: SearchCounts | None = None
    extrapolated: list[Extrapolation] = []
    pareto: list[BriefPlan] = []
    runners_up: list[BriefPlan] = []

    @model_validator(mode="after")
    def _sums(self) -> Plan:
        pp, dp, cp = self.dims.pp, self.dims.dp, self.dims.cp
        if pp * dp * cp != self.gpus:
            raise ValueError(f"dims pp={pp} x dp={dp} x cp={cp} is {pp * dp * cp} workers but gpus says {self.gpus}")
        if sorted(self.mesh_order) != sorted(AXES):
            raise ValueError(f"mesh_order {self.mesh_order} must name pp, dp and cp once each")
        if len(self.layers_per_stage) != pp:
            raise ValueError(f"layers_per_stage has {len(self.layers_per_stage)} entries but pp is {pp}")
        if min(self.layers_per_stage) < 1:
            raise ValueError(f"layers_per_stage {self.layers_per_stage} leaves a stage without a layer")
        if sum(self.layers_per_stage) != self.workload.model.num_layers:
            raise ValueError(
                f"layers_per_stage {self.layers_per_stage} adds up to {sum(self.layers_per_stage)} layers "
                f"but the model has {self.workload.model.num_layers}"
            )
        needed = SCHEDULES[self.schedule].min_microbatches(pp)
        if pp == 1 and self.schedule != "gpipe":
            raise ValueError("with pp=1 micro-batches accumulate one after another: write schedule gpipe")
        if self.num_microbatches < needed:
            raise ValueError(f"schedule {self.schedule} needs num_microbatches >= pp = {needed}")
        rows = self.workload.batch.rows().sequence_rows
        if cp > rows:
            raise ValueError(f"dims.cp = {cp} ranks share sequences of {rows} rows, so some would hold none")
        batch_size = self.workload.batch.batch_size
        if dp * self.num_microbatches > batch_size:
            raise ValueError(f"dp={dp} x num_microbatches={self.num_microbatches} is more than batch_size={batch_size}")
        return self

    def check_digest(self, path: Path, *, force: bool) -> None:
        """A plan with a forecast must carry a right digest; one written by hand has neither."""
        if self.predicted is not None or self.digest is not None:
            super().check_digest(path, force=force)

    def order(self) -> dict[str, Any]:
        """The order alone, as plain JSON values."""
        names = (
            "gpus hosts device memory_limit_bytes workload dims mesh_order layers_per_stage num_microbatches "
            "schedule recompute context threads"
        )
        return self.model_dump(mode="json", by_alias=True, include=set(names.split()))
