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
        steps_s = []
        for index in range(len(self.plans)):
            step_s, peak_bytes = self._measure(index)
            steps_s.append(step_s)
            self._tell(index, step_s, peak_bytes, round_number=0)
        best = sorted(range(1, len(self.plans)), key=lambda index: steps_s[index])
        again = [0, *best[: self.job.best_again]]
        for round_number in range(1, self.job.rounds + 1):
            for index in again:
                step_s, peak_bytes = self._measure(index)
                self._tell(index, step_s, peak_bytes, round_number)

    def _measure(self, index: int) -> tuple[float, int]:
        """(slowest rank's median step, largest rank's peak), the same on every rank."""
        plan = self.plans[index]
        record = self._record(plan)
        # What the plan left behind would count as alive in the next one.
        gc.collect()
        records: list[RankRecord | None] = [None] * self.worker.world_size
        dist.all_gather_object(records, record)
        known = [each for each in records if each is not None]
        steps_s = [each.step_s for each in known if each.step_s is not None]
        peaks = [each.peak_bytes for each in known if each.peak_bytes is not None]
        assert steps_s, "a plan is run for more steps than are left untimed"
        return max(steps_s), max(peaks)

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

    def _tell(self, index: int, step_s: float, peak_bytes: int, round_number: int) -> None:
        if self.worker.rank == 0:
            line = {"plan": index, "round": round_number, "step_s": step_s, "peak_bytes": peak_bytes}
            with Path(self.job.results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Measure the plans of a job; a line of results for each, as it is done (rank 0)."""
    Validator(worker, ValidateJob.model_validate(values)).run()


if __name__ == "__main__":
    run_worker(main)
