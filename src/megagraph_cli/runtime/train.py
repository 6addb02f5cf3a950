"""The training worker: ``torchrun -m megagraph_cli.runtime.train job.json``."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.run import EpochRecord, RankRecord
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.graph.batch import Drawn, MicroBatch, epoch_order, replica_targets
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.loader import Begun, Prefetcher
from megagraph_cli.graph.prepare import open_graph
from megagraph_cli.graph.rewards import updated
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.batches import microbatch_targets, steps_per_epoch
from megagraph_cli.parallel.mesh import Mesh, build_mesh
from megagraph_cli.runtime.build import Order, StageParts, build_stage
from megagraph_cli.runtime.checkpoint import (
    TrainState,
    checkpoint_path,
    load_state,
    load_tensors,
    save_checkpoint,
    set_optimizer_step,
    whole_checkpoints,
    workload_digest,
)
from megagraph_cli.runtime.evaluate import predict, score
from megagraph_cli.runtime.hostfiles import HostFiles
from megagraph_cli.runtime.job import TrainJob
from megagraph_cli.runtime.memory import explain_out_of_memory, out_of_memory_in
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.record import MetricsFile, RankMeter, write_run
from megagraph_cli.runtime.rewards import ArmRewards
from megagraph_cli.runtime.setup import Worker, run_worker
from megagraph_cli.runtime.step import TrainStep, learning_rate
from megagraph_cli.runtime.tensors import to_device
from megagraph_cli.runtime.trace import Tracer

_METERED_STEPS = 2
"""The first step of a process makes the optimizer's state, the second is the first whole one. After these only cuda,
whose allocator tells every step's peak for nothing, goes on."""


class Trainer:
    """The loop of one rank: epochs of steps, evaluation, checkpoints, the run's record."""

    def __init__(self, job: TrainJob, plan: Plan, graph: Graph, parts: StageParts, rank: int) -> None:
        dataset = plan.workload.dataset
        self.job, self.plan, self.graph, self.parts = job, plan, graph, parts
        self.train = plan.workload.train
        self.batch_size = plan.workload.batch.batch_size
        self.split = make_split(graph, dataset.split, dataset.split_seed)
        self.step = TrainStep(parts)
        self.state = TrainState(
            workload_digest=workload_digest(plan.workload, job.graph.digest),
            sampling_weights=list(parts.builder.spec.weights),
        )
        self.metrics = MetricsFile(job.run_dir / "metrics.jsonl") if rank == 0 else None
        self.meter = RankMeter(rank, parts.mesh.place)
        self.tracer = Tracer(job.trace, rank, parts.mesh.place, parts.device)
        self.stopped = False
        # On a CPU a step ends when it returns; on cuda its loss is read a step late, so that nothing waits for it.
        self._lag = 0 if parts.device.type == "cpu" else 1
        self._unread: deque[tuple[Tensor, dict[str, Any], int]] = deque()
        self._last_read_s = 0.0

    @cached_property
    def _files(self) -> HostFiles:  # first asked for by all ranks together
        return HostFiles.of(self.job.hosts)

    @property
    def epochs(self) -> int:
        return self.job.epochs or self.train.epochs

    @property
    def num_train(self) -> int:
        return int(self.split.train.size)

    @property
    def at_last_step(self) -> bool:
        return self.job.max_steps is not None and self.state.step >= self.job.max_steps

    def run(self) -> None:
        """Train to the end or to a stop, leave a checkpoint, write run.json. All ranks call it together."""
        while self.state.epoch <= self.epochs and not self.stopped:
            # An epoch whose evaluation was cut short has all its steps done and still wants its record.
            if self.at_last_step and self.state.targets_done < self.num_train:
                break
            self._train_epoch()
            if self.stopped or self.state.targets_done < self.num_train:
                break
            self._finish_epoch()
        save_checkpoint(self.job.run_dir, self.state, self.step, self._files)
        test_score = None if self.stopped else self._test()
        status: Literal["completed", "interrupted"] = "interrupted" if self.stopped else "completed"
        self.tracer.write()
        write_run(self.job.run_dir, self.plan, status, self.state, self.meter, test_score, self.job.restarts)

    def measure(self) -> RankRecord:
        """Take ``max_steps`` steps and nothing else: no evaluation, no checkpoint, no record on disk but metrics."""
        assert self.job.max_steps is not None
        while not self.at_last_step:
            self._train_epoch()
            self.state = self.state.model_copy(update={"epoch": self.state.epoch + 1, "targets_done": 0})
        return self.meter.record()

    def _train_epoch(self) -> None:
        """The steps that the epoch still needs, and what they took."""
        start = time.perf_counter()
        order = epoch_order(self.split.train, self.train.rng_seed, self.state.epoch)
        first = -(-self.state.targets_done // self.batch_size)
        count = steps_per_epoch(self.num_train, self.batch_size) - first
        epoch = self.state.epoch

        if self.job.max_steps is not None:
            count = min(count, self.job.max_steps - self.state.step)
        builder = self.parts.builder

        def draw(index: int) -> Drawn:
            with self.tracer.span("host", "construction"):
                return builder.draw(self._share(order, first + index), epoch=epoch, view=0)

        self._last_read_s = time.perf_counter()
        with Prefetcher(Begun(draw, builder.finish, count), count, holds=True) as batches:
            for index, batch in enumerate(batches):
                self._one_step(batch, self._targets(order, first + index).size, batches.make_room)
                if self.stopped or self.at_last_step:
                    break
            self._read(lag=0)
        self.meter.stall_s += batches.stall_s
        self.state.stall_s += batches.stall_s
        self.state.epoch_s += time.perf_counter() - start

    def _targets(self, order: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        return order[index * self.batch_size : (index + 1) * self.batch_size]

    def _share(self, order: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        mesh = self.parts.mesh
        return replica_targets(
            self._targets(order, index),
            self.batch_size,
            mesh.dims.dp,
            mesh.place.dp,
            self.plan.num_microbatches,
        )

    def _one_step(self, batch: list[MicroBatch], num_targets: int, on_wait: Callable[[], None]) -> None:
        lr = learning_rate(
            self.state.step,
            steps_per_epoch=steps_per_epoch(self.num_train, self.batch_size),
            epochs=self.epochs,
            lr=self.train.lr,
            end_lr=self.train.end_lr,
            warmup_epochs=self.train.warmup_epochs,
        )
        device_batch = [to_device(part, self.parts.device) for part in batch]
        stop_vote = self.meter.rank == 0 and self.job.stop_file.exists()
        run = partial(
            self.step.run,
            device_batch,
            step=self.state.step,
            num_targets=num_targets,
            lr=lr,
            stop_vote=stop_vote,
            span=self.tracer.span,
            on_wait=on_wait,
        )
        if len(self.meter.step_s) < _METERED_STEPS:
            with metered(self.parts.device, holders=self.step.holders(device_batch)) as reading:
                summary = run()
            self.meter.saw_peak(reading.peak_bytes, reading.categories)
        else:
            self.tracer.begin_step()
            summary = self._plain_step(run)
            self.tracer.end_step()
        self._after_step(summary, lr, num_targets)

    def _plain_step(self, run: Callable[[], Tensor]) -> Tensor:
        """A step without the slow meter; on cuda its peak is still told."""
        if self.parts.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.parts.device)
            summary = run()
            self.meter.saw_peak(torch.cuda.max_memory_allocated(self.parts.device))
            return summary
        return run()

    def _after_step(self, summary: Tensor, lr: float, num_targets: int) -> None:
        self.state.step += 1
        self.state.targets_done += num_targets
        line = {"step": self.state.step, "epoch": self.state.epoch, "lr": lr}
        self._unread.append((summary, line, num_targets))
        self._read(self._lag)

    def _read(self, lag: int) -> None:
        """Read the summaries of all but the last ``lag`` steps; every rank reads the same numbers."""
        while len(self._unread) > lag:
            summary, line, num_targets = self._unread.popleft()
            loss, grad_norm, stop_votes = summary.tolist()
            now = time.perf_counter()
            step_s, self._last_read_s = now - self._last_read_s, now
            self.meter.step_s.append(step_s)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                what = "loss" if not math.isfinite(loss) else "gradient norm"
                raise MgraphError(
                    f"the {what} is not finite at step {line['step']}; lower train.lr, set train.grad_clip, "
                    "or train in float32, then resume from the last checkpoint",
                    EXIT_WORKER,
                )
            self.state.loss_sum += loss * num_targets
            self.stopped = self.stopped or stop_votes > 0
            if self.metrics is not None:
                self.metrics.append(line | {"loss": loss, "grad_norm": grad_norm, "step_s": step_s})

    def _finish_epoch(self) -> None:
        """Evaluate, record the epoch, write a checkpoint; a stop during evaluation leaves the epoch unrecorded."""
        rewards = self._rewards()
        found = predict(self.parts, self.split.val, self.batch_size, stopped=self._vote_to_stop, rewards=rewards)
        if found is None:
            self.stopped = True
            return
        state = self.state
        log_weights, weights = state.sampling_log_weights, state.sampling_weights
        if rewards is not None:
            means = rewards.means(self.split.val.size * self.plan.workload.batch.eval_views)
            log_weights, weights = updated(log_weights, weights, means)
        val_score = score(found, self.graph.labels[self.split.val], self.plan.workload.dataset.metric)
        best = max((record.val_score for record in state.epochs if record.val_score is not None), default=-math.inf)
        record = EpochRecord(
            epoch=state.epoch,
            train_loss=state.loss_sum / self.num_train,
            val_score=val_score,
            epoch_s=state.epoch_s,
            data_stall_s=state.stall_s,
            sampling_weights=state.sampling_weights,
        )
        improved = val_score is not None and val_score > best
        self.state = state.model_copy(
            update={
                "epoch": state.epoch + 1,
                "targets_done": 0,
                "loss_sum": 0.0,
                "epoch_s": 0.0,
                "stall_s": 0.0,
                "epochs": [*state.epochs, record],
                "best_epoch": state.epoch if improved else state.best_epoch,
                "best_step": state.step if improved else state.best_step,
                "sampling_weights": weights,
                "sampling_log_weights": log_weights,
            }
        )
        self._sample_by(weights)
        save_checkpoint(self.job.run_dir, self.state, self.step, self._files)

    def _rewards(self) -> ArmRewards | None:
        """Listens to this epoch's evaluation where sampling weights are due for an update after it."""
        every, parts = self.train.sampling_update_epochs, self.parts
        if not every or self.state.epoch % every:
            return None
        return ArmRewards(parts)

    def _sample_by(self, weights: list[float]) -> None:
        """Draw by the sampling weights p from now on."""
        self.parts = replace(self.parts, builder=self.parts.builder.with_weights(weights))

    def _vote_to_stop(self) -> bool:
        """Rank 0 looks for the stop file; all ranks learn of it together."""
        vote = torch.tensor(float(self.meter.rank == 0 and self.job.stop_file.exists()), device=self.parts.device)
        dist.all_reduce(vote)
        return bool(vote.item())

    def _test(self) -> float | None:
        """Test score of the best epoch's weights; None without a validated epoch or a test set."""
        if self.state.best_step is None or self.split.test.size == 0:
            return None
        if self.state.best_step != self.state.step:
            with self._files.here(checkpoint_path(self.job.run_dir, self.state.best_step)) as folder:
                load_tensors(folder, self.step, optimizer=False)
        (best,) = (record for record in self.state.epochs if record.epoch == self.state.best_epoch)
        self._sample_by(best.sampling_weights)
        found = predict(self.parts, self.split.test, self.batch_size, stopped=self._vote_to_stop)
        if found is None:
            self.stopped = True
            return None
        return score(found, self.graph.labels[self.split.test], self.plan.workload.dataset.metric)

    def resume(self) -> None:
        """Go on from the last whole checkpoint, whichever plan wrote it."""
        known = whole_checkpoints(self.job.run_dir)
        if last := self._files.agreed(known[-1].name if known else ""):
            with self._files.here(self.job.run_dir / "checkpoints" / last) as folder:
                self.state = load_state(folder, self.state.workload_digest)
                load_tensors(folder, self.step, optimizer=True)
            set_optimizer_step(self.step, self.state.step)
            self._sample_by(self.state.sampling_weights)
        if self.metrics is not None:
            self.metrics.cut_back(self.state.step)


def make_trainer(worker: Worker, job: TrainJob, plan: Plan, mesh: Mesh | None = None) -> Trainer:
    """Mesh (unless one is given), graph, stage and trainer of this rank."""
    mesh = mesh or build_mesh(plan.dims.parallel(), plan.mesh_order, worker.device.type, job.hosts)
    worker.place = mesh.place
    graph = open_graph(job.graph_path)
    workload = plan.workload.model_copy(update={"graph": job.graph})
    torch.set_float32_matmul_precision("high" if workload.train.matmul_precision == "tf32" else "highest")
    dims = plan.dims.parallel()
    parts = build_stage(
        Order.of(plan),
        workload,
        graph,
        mesh,
        worker.device,
        threads=job.threads,
        microbatch_size=microbatch_targets(workload.batch.batch_size, dims.dp, plan.num_microbatches),
    )
    parts.builder.warm_up()
    return Trainer(job, plan, graph, parts, worker.rank)


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Train under the plan of a job, from the start or from the last checkpoint."""
    job = TrainJob.model_validate(values)
    plan = Plan.load(job.plan, force=True)
    try:
        trainer = make_trainer(worker, job, plan)
        if job.resume:
            trainer.resume()
        trainer.run()
    except Exception as error:
        shortage = out_of_memory_in(error)
        if shortage is None:
            raise
        raise explain_out_of_memory(shortage, worker, plan) from error


if __name__ == "__main__":
    run_worker(main)
