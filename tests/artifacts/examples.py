"""Whole artifacts, small enough to read, for the tests of this folder and of the commands."""

from __future__ import annotations

from typing import Any

from megagraph_cli.artifacts.cost_model import CostModel, MeasuredRange, MeasuredWay, Quality, QualityTable
from megagraph_cli.artifacts.plan import Dims, Plan
from megagraph_cli.artifacts.profile import CommSample, ComputeSample, HostSample, Machine, Profile
from megagraph_cli.artifacts.run import EpochRecord, Failure, Measured, RankRecord, Run
from megagraph_cli.artifacts.validation import (
    MeasuredPlan,
    MemoryAgreement,
    PredictedPlan,
    TimeAgreement,
    ValidatedPlan,
    Validation,
)
from megagraph_cli.artifacts.workload import DatasetSection, GraphInfo, Workload

GRAPH = GraphInfo(
    digest="ab" * 32,
    nodes=100,
    edges=300,
    features=16,
    feature_density=0.25,
    classes=3,
    clusters=10,
    train=60,
    val=20,
    test=20,
)
MACHINE = Machine(
    hosts=1, device="cpu", num_devices=2, memory_bytes=10**9, overhead_bytes=10**8, backend="gloo", torch="2.13.0"
)


def workload(graph: GraphInfo | None = GRAPH) -> Workload:
    """Defaults on a dataset called demo."""
    return Workload(dataset=DatasetSection(name="demo"), graph=graph)


def hand_written_plan() -> dict[str, Any]:
    """The least that train takes: no forecast, no digest, no graph."""
    sections = workload(None).model_dump(mode="json")
    sections.pop("graph")
    return {
        "schema": "mgraph.plan/1",
        "gpus": 2,
        "workload": sections,
        "dims": {"pp": 2, "dp": 1, "cp": 1},
        "layers_per_stage": [2, 2],
        "num_microbatches": 2,
    }


def plan() -> Plan:
    """A plan as the search writes it, with a forecast."""
    brief = {
        "dims": {"pp": 1, "dp": 2, "cp": 1},
        "layers_per_stage": [4],
        "num_microbatches": 1,
        "schedule": "gpipe",
        "recompute": "none",
        "context": "ring",
        "predicted": {"step_s": 0.25, "peak_bytes": 900},
    }
    return Plan.model_validate(
        hand_written_plan()
        | {
            "workload": workload().model_dump(mode="json"),
            "device": "cpu",
            "memory_limit_bytes": 10**9,
            "predicted": {
                "step_s": 0.5,
                "epoch_s": 1.5,
                "peak_bytes": 1000,
                "overhead_bytes": 100,
                "margin_bytes": 10,
                "stages": [
                    {"time_s": 0.2, "memory_bytes": {"parameters": 600}},
                    {"time_s": 0.3, "memory_bytes": {"parameters": 1000}},
                ],
            },
            "search": {"num_candidates": 5, "num_feasible": 4},
            "extrapolated": [{"quantity": "gpus", "measured_max": 2.0, "asked": 4.0}],
            "pareto": [brief],
            "runners_up": [brief],
        }
    )


def profile() -> Profile:
    """One measurement of each kind."""
    return Profile(
        workload=workload(),
        machine=MACHINE,
        compute=[
            ComputeSample(
                module="layer",
                num_layers=2,
                cp=1,
                rows=17,
                sequence_rows=17,
                microbatch_size=32,
                forward_s=0.01,
                backward_s=0.02,
                memory={"saved": 100},
                samples_s=[[0.01, 0.02]],
            )
        ],
        comm=[
            CommSample(
                op="p2p", axis="pp", group_size=2, link="host", message_bytes=1024, time_s=1e-4, samples_s=[1e-4]
            )
        ],
        host=[HostSample(op="construct", targets=32, sequence_rows=17, threads=1, time_s=0.1, samples_s=[0.1])],
    )


def cost_model() -> CostModel:
    """One term, and a quality that held nothing out for time."""
    return CostModel(
        workload=workload(),
        machine=MACHINE,
        terms={"layer": {"per_row": 1.5e-6}},
        quality=QualityTable(
            memory=Quality(mape=0.03, r2=0.99, max_under=0.01, num_fit=5, num_held_out=3),
            time=Quality(mape=None, r2=None, max_under=None, num_fit=5, num_held_out=0),
        ),
        measured=MeasuredRange(
            gpus=2,
            layers=4,
            microbatch_size=128,
            message_bytes=4096,
            ways=[MeasuredWay(recompute="none", context="ring", spread=False, layers=4, microbatch_size=128)],
        ),
    )


def validation() -> Validation:
    """One plan that was run."""
    return Validation(
        workload=workload(),
        machine=MACHINE,
        steps=8,
        plans=[
            ValidatedPlan(
                gpus=2,
                overrides={"model.num_layers": 8},
                dims=Dims(pp=2, dp=1, cp=1),
                layers_per_stage=[4, 4],
                num_microbatches=2,
                schedule="gpipe",
                recompute="none",
                context="ring",
                predicted=PredictedPlan(step_s=0.5, peak_bytes=1000, margin_bytes=10),
                measured=MeasuredPlan(step_s=0.4, peak_bytes=990),
            )
        ],
        memory=MemoryAgreement(mape=0.01, r2=None, max_under=0.0),
        time=TimeAgreement(mape=0.25, spearman=None, regret=0.0),
    )


def run() -> Run:
    """A failed run with one whole epoch."""
    return Run(
        status="failed",
        rng_seed=0,
        epochs=[
            EpochRecord(
                epoch=1, train_loss=1.5, val_score=0.5, epoch_s=2.0, data_stall_s=0.1, sampling_weights=[0.25] * 4
            )
        ],
        best_epoch=1,
        test_score=None,
        data_stall_s=0.05,
        ranks=[RankRecord(rank=0, pp=0, dp=0, cp=0, peak_bytes=1000, step_s=0.5)],
        predicted=None,
        measured=Measured(step_s=None, peak_bytes=None),
        failure=Failure(rank=1, pp=1, dp=0, cp=0, signal="SIGKILL", message="rank 1 was killed by SIGKILL"),
    )
