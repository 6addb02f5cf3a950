"""The profiling worker: ``torchrun -m megagraph_cli.runtime.profile job.json``.

Every context degree from 1 to the number of workers is measured, divisor or not, in groups of that size that run at
the same time on as many workers as fit: workers of a real run share memory bandwidth and links in the same way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import CommSample, ComputeSample, HostSample, Link, Machine, Profile
from megagraph_cli.graph.prepare import open_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.parallel.mesh import COLLECTIVE_DEADLINE
from megagraph_cli.runtime.grouping import Grouping
from megagraph_cli.runtime.job import ProfileJob
from megagraph_cli.runtime.measure import max_over_ranks
from megagraph_cli.runtime.measure_compute import Sizes, largest_microbatch, measure_modules, measure_optimizer, ways
from megagraph_cli.runtime.measure_host import measure_host
from megagraph_cli.runtime.measure_links import Pair, measure_all_gather, measure_all_reduce, measure_p2p
from megagraph_cli.runtime.meters import free_bytes, overhead_bytes
from megagraph_cli.runtime.probes import PLAIN, Context, Way
from megagraph_cli.runtime.setup import Worker, run_worker

HOST: Link = "host"
NETWORK: Link = "network"
MESSAGE_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
LAYER_S = {False: 0.2, True: 0.06}
"""About how long the largest micro-batch may take in one layer, by ``quick``."""
FULL_S = 180.0
"""Seconds that the whole profile may take: a smaller ``--budget`` measures smaller micro-batches."""
BUDGET_SHARE = 0.8
"""Steps are behind when they have taken more than this share of their part of the budget: starting and ending takes the
rest."""
MEMORY_SHARE = 0.6
"""Sizes stop at this share of the free memory."""


@dataclass(frozen=True)
class Grid:
    """The sizes that are measured: layers in a row, micro-batches, messages, targets."""

    layers: tuple[int, ...]
    microbatches: tuple[int, ...]
    messages: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, batch_size: int, num_layers: int, *, quick: bool, largest: int) -> Grid:
        """Micro-batches up to ``largest`` in steps that tell a constant from a slope; messages over four decades."""
        top = max(1, min(batch_size, largest))
        parts = (8, 2, 1) if quick else (16, 4, 2, 1)
        deep = (1, 2) if quick else (1, 2, 4, 8)
        return cls(
            layers=tuple(n for n in deep if n <= max(1, num_layers - 1)),
            microbatches=tuple(sorted({max(1, top // part) for part in parts})),
            messages=MESSAGE_BYTES[::2] if quick else MESSAGE_BYTES,
            targets=tuple(sorted({max(1, top // part) for part in parts})),
        )

    def sizes(self, way: Way) -> Sizes:
        """Sizes of a way to run layers: what differs from the plain way is told from fewer of them."""
        if way == PLAIN:
            return Sizes(self.layers, self.microbatches)
        some = {self.microbatches[0], *self.microbatches[-2:]} if len(self.microbatches) > 3 else self.microbatches
        return Sizes(tuple(sorted({self.layers[0], *self.layers[1:3][-1:]})), tuple(sorted(some)))


def fewer(sizes: Sizes) -> Sizes:
    """What is left of sizes when time is short: two of each, which still tell a constant from a slope."""
    return Sizes(sizes.layers[:2], sizes.microbatches[:2])


class Step(Protocol):
    """One part of the profile; every rank takes it together. ``hurried``: behind the budget."""

    def __call__(self, *, hurried: bool) -> None: ...


@dataclass
class Profiler:
    """Takes the measurements in an order that every rank follows."""

    worker: Worker
    job: ProfileJob
    context: Context
    compute: list[ComputeSample] = field(default_factory=list)
    comm: list[CommSample] = field(default_factory=list)
    host: list[HostSample] = field(default_factory=list)

    def measure_all(self) -> None:
        begin_s = time.perf_counter()
        alone = self._group_of(1)
        assert alone is not None
        grid = self._choose_grid(alone)
        steps = list(self._steps(grid, alone))
        for done, (what, step) in enumerate(steps):
            self._tell(done, len(steps), what)
            dist.barrier()
            step(hurried=self._behind(time.perf_counter() - begin_s, done / len(steps)))
        self._tell(len(steps), len(steps), "done")

    def _behind(self, elapsed_s: float, share_done: float) -> bool:
        """Whether more of the budget is gone than of the work is done: rank 0's clock, told to all."""
        if self.job.budget_s is None:
            return False
        behind = torch.tensor(float(elapsed_s > self.job.budget_s * share_done * BUDGET_SHARE and share_done > 0))
        behind = behind.to(self.worker.device)
        dist.broadcast(behind, src=0)
        return bool(behind.item())

    def _choose_grid(self, alone: dist.ProcessGroup) -> Grid:
        sharers = self.grouping.per_host if self.worker.device.type == "cpu" else 1
        usable = MEMORY_SHARE * free_bytes(self.worker.device) / sharers
        layer_s = LAYER_S[self.job.quick]
        if self.job.budget_s is not None:
            layer_s = min(layer_s, LAYER_S[False] * self.job.budget_s / FULL_S)
        largest = largest_microbatch(self.context, alone, layer_s, usable)
        workload = self.job.workload
        return Grid.of(workload.batch.batch_size, workload.model.num_layers, quick=self.job.quick, largest=largest)

    def _steps(self, grid: Grid, alone: dist.ProcessGroup) -> Iterator[tuple[str, Step]]:
        for cp in range(1, min(self.worker.world_size, self.job.workload.batch.rows().sequence_rows) + 1):
            for link in self.grouping.links(cp) if cp > 1 else (HOST,):
                group = alone if cp == 1 else self._group_of(cp, link)
                for way in ways(cp):
                    named = [f"modules with cp={cp}"] + ["over the network"] * (link != HOST)
                    named += [f"{way.recompute} recompute, {way.context}"] * (way != PLAIN)
                    yield ", ".join(named), partial(self._modules, grid.sizes(way), cp, group, way, link)
        for layers in sorted({1, max(grid.layers), 4 * max(grid.layers)}):
            yield f"the optimizer of {layers} layers", partial(self._optimizer, alone, layers)
        for targets in grid.targets:
            yield f"batches of {targets} targets", partial(self._host, targets)
        for link in self.grouping.pair_links():
            measure = partial(measure_p2p, self.worker.device, pair=self._pair(link), link=link)
            yield f"messages between stages, {link}", partial(self._messages, grid, measure)
        for size in range(2, self.worker.world_size + 1):
            for link in self.grouping.links(size):
                group = self._group_of(size, link, most=None if link == NETWORK else 1)
                for what, of_group in (("sums", measure_all_reduce), ("gathers", measure_all_gather)):
                    measure = partial(of_group, self.worker.device, group, size, link=link)
                    yield f"{what} over {size} ranks, {link}", partial(self._messages, grid, measure)

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.worker.world_size, self.job.hosts)

    def _group_of(self, degree: int, link: Link = HOST, most: int | None = None) -> dist.ProcessGroup | None:
        """This rank's group among as many of that degree as fit (or ``most``); None where it is left over."""
        mine = None
        groups = [[rank] for rank in range(self.worker.world_size)] if degree == 1 else None
        for ranks in (groups or self.grouping.groups(degree, link))[:most]:
            group = dist.new_group(ranks, timeout=COLLECTIVE_DEADLINE)
            if self.worker.rank in ranks:
                mine = group
        return mine

    def _modules(
        self, sizes: Sizes, cp: int, group: dist.ProcessGroup | None, way: Way, link: Link, *, hurried: bool
    ) -> None:
        self.compute += measure_modules(self.context, cp, group, way, fewer(sizes) if hurried else sizes, link)

    def _optimizer(self, alone: dist.ProcessGroup, layers: int, *, hurried: bool) -> None:  # noqa: ARG002
        self.compute.append(measure_optimizer(self.context, alone, layers))

    def _host(self, targets: int, *, hurried: bool) -> None:  # noqa: ARG002
        self.host += measure_host(self.context, targets)

    def _messages(self, grid: Grid, measure: Callable[[int], CommSample], *, hurried: bool) -> None:
        self.comm += [measure(size) for size in (grid.messages[::2] if hurried else grid.messages)]

    def _pair(self, link: Link) -> Pair | None:
        """This rank's among the pairs that send to each other."""
        pairs = self.grouping.pairs(link)[: None if link == NETWORK else 1]
        return next(((first, second) for first, second in pairs if self.worker.rank in (first, second)), None)

    def _tell(self, done: int, total: int, what: str) -> None:
        if self.worker.rank == 0:
            with self.job.progress_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"done": done, "total": total, "what": what}) + "\n")


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Measure everything that ``fit`` needs and write the profile (rank 0)."""
    job = ProfileJob.model_validate(values, strict=False)
    dataset = job.workload.dataset
    graph = open_graph(job.graph_path)
    split = make_split(graph, dataset.split, dataset.split_seed)
    torch.set_float32_matmul_precision("high" if job.workload.train.matmul_precision == "tf32" else "highest")
    # Everyone's overhead before anyone's first batch; free memory with every worker's overhead already taken.
    (overhead,) = max_over_ranks([overhead_bytes(worker.device)], worker.device, True)
    free = -max_over_ranks([-free_bytes(worker.device)], worker.device, True)[0]
    profiler = Profiler(worker, job, Context(job.workload, graph, worker.device, job.threads, split.train))
    profiler.measure_all()
    if worker.device.type == "cuda":
        # Library workspaces and communicators come with use.
        torch.cuda.empty_cache()
        (overhead,) = max_over_ranks([max(overhead, overhead_bytes(worker.device))], worker.device, True)
    if worker.rank == 0:
        Profile(
            workload=job.workload,
            machine=Machine(
                hosts=job.hosts,
                device=job.device,
                num_devices=worker.world_size,
                memory_bytes=_per_worker(free, overhead, worker, job.hosts),
                overhead_bytes=overhead,
                backend=dist.get_backend(),
                torch=torch.__version__,
            ),
            compute=profiler.compute,
            comm=profiler.comm,
            host=profiler.host,
        ).save(job.out)


def _per_worker(free: int, overhead: int, worker: Worker, hosts: int) -> int:
    """What one worker may take in all: on a CPU an equal share of the host's free memory."""
    if worker.device.type == "cuda":
        return free + overhead
    return free // (worker.world_size // hosts) + overhead


if __name__ == "__main__":
    run_worker(main)
