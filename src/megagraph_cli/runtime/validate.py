"""The validating worker: ``torchrun -m megagraph_cli.runtime.validate job.json``.

Runs plan after plan for a few steps each in one process group, as training does, and measures step and peak. The
plan that the search put first and the three best others are then measured again in turn.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import RankRecord
from megagraph_cli.layout.dims import ParallelDims
from megagraph_cli.parallel.mesh import Mesh, build_mesh
from megagraph_cli.runtime.job import TrainJob, ValidateJob
from megagraph_cli.runtime.memory import explain_out_of_memory, out_of_memory_in
from megagraph_cli.runtime.setup import Worker, run_worker
from megagraph_cli.runtime.train import make_trainer

Meshes = dict[tuple[ParallelDims, tuple[str, ...]], Mesh]


class Validator:
    """Measures plans one after another; process groups are made once for each mesh."""

    def __init__(self, worker: Worker, job: ValidateJob) -> None:
        self.worker, self.job = worker, job
        self.plans = [Plan.load(path) for path in job.plans]
        self._meshes: Meshes = {}

    def run(self) -> None:
        """All plans once, then the best ones in turn; every rank takes part."""
        steps_s = dict(self.job.known)
        for index in range(len(self.plans)):
            if index not in steps_s and index not in self.job.left_out:
                steps_s[index] = self._measure(index, round_number=0)
        pick = [index for index in (0,) if index in steps_s]
        best = sorted(sorted(steps_s.keys() - {0}), key=lambda index: steps_s[index])
        for round_number in range(1, self.job.rounds + 1):
            for index in (*pick, *best[: self.job.best_again]):
                self._measure(index, round_number)

    def _measure(self, index: int, round_number: int) -> float:
        """The slowest rank's median step, the same on every rank; it is told with the largest rank's peak."""
        plan = self.plans[index]
        self._tell(index, round_number)
        record = self._record(plan)
        # What the plan left behind would count as alive in the next one.
        gc.collect()
        records: list[RankRecord | None] = [None] * self.worker.world_size
        dist.all_gather_object(records, record)
        known = [each for each in records if each is not None]
        steps_s = [each.step_s for each in known if each.step_s is not None]
        peaks = [each.peak_bytes for each in known if each.peak_bytes is not None]
        assert steps_s, "a plan is run for more steps than are left untimed"
        self._tell(index, round_number, step_s=max(steps_s), peak_bytes=max(peaks))
        return max(steps_s)

    def _record(self, plan: Plan) -> RankRecord:
        job = TrainJob(
            **self.job.model_dump(include={"graph_path", "device", "threads", "launcher_pid", "hosts", "graph"}),
            plan=self.job.plans[0],
            run_dir=self.job.work_dir,
            epochs=None,
            max_steps=self.job.steps,
            resume=False,
            stop_file=self.job.work_dir / "stop",
        )
        try:
            trainer = make_trainer(self.worker, job, plan, self._mesh(plan))
            return trainer.measure()
        except Exception as error:
            shortage = out_of_memory_in(error)
            if shortage is None:
                raise
            raise explain_out_of_memory(shortage, self.worker, plan) from error

    def _mesh(self, plan: Plan) -> Mesh:
        key = (plan.dims.parallel(), tuple(plan.mesh_order))
        if key not in self._meshes:
            self._meshes[key] = build_mesh(*key, self.worker.device.type, self.job.hosts)
        return self._meshes[key]

    def _tell(self, index: int, round_number: int, **measured: float) -> None:
        """One line: a measurement begins or, with what was ``measured``, is done."""
        if self.worker.rank == 0:
            line = {"plan": index, "round": round_number, **measured}
            with Path(self.job.results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Measure the plans of a job; a line of results for each, as it is done (rank 0)."""
    Validator(worker, ValidateJob.model_validate(values)).run()


if __name__ == "__main__":
    run_worker(main)
