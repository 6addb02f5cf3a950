"""The profiling worker: ``torchrun -m megagraph_cli.runtime.profile job.json``.

Every context degree from 1 to the number of workers is measured, divisor or not, in groups of that size that run at
the same time on as many workers as fit: workers of a real run share memory bandwidth and links in the same way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megagraph_cli.artifacts.profile import CommSample, ComputeSample, HostSample, Link, Machine, Profile
from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.prepare import open_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.parallel.mesh import COLLECTIVE_DEADLINE
from megagraph_cli.runtime.estimates import host_s, larger_s, messages_s, modules_s, optimizer_s, touched_s
from megagraph_cli.runtime.grid import (
    LARGER_MESSAGES,
    LARGER_S,
    LEAST_TOP,
    PLAIN,
    RUNS,
    Grid,
    Sizes,
    Way,
    ends,
    touched_sizes,
    ways,
)
from megagraph_cli.runtime.grouping import Grouping
from megagraph_cli.runtime.job import ProfileJob
from megagraph_cli.runtime.measure import max_over_ranks
from megagraph_cli.runtime.measure_compute import Room, measure_modules, measure_optimizer, try_microbatches
from megagraph_cli.runtime.measure_host import measure_host
from megagraph_cli.runtime.measure_links import Pair, measure_all_gather, measure_all_reduce, measure_p2p
from megagraph_cli.runtime.measure_touched import TouchedProbe, measure_touched
from megagraph_cli.runtime.meters import free_bytes
from megagraph_cli.runtime.pace import Pace, Work
from megagraph_cli.runtime.probes import Context
from megagraph_cli.runtime.setup import Worker, run_worker
from megagraph_cli.runtime.spare import WorkerMemory

HOST: Link = "host"
NETWORK: Link = "network"
LAYER_S = {False: 0.2, True: 0.06}
"""About how long the largest micro-batch may take in one layer, by ``quick``."""
BUDGET_S = {False: 180.0, True: 40.0}
"""Seconds from the launch that the profile takes where no ``--budget`` says otherwise, by ``quick``."""
MEASURING_S = {False: 90.0, True: 40.0}
"""What measuring may take of these however slow the start: a busy host must not cost the fit its samples."""
ENDING_S = 3.0
"""Of the budget: what writing the profile and ending the workers takes."""
LEAST_SHARE = 1 / 3
"""Of the time left that what must be measured may take at its least: the largest micro-batch is chosen so."""
MEMORY_SHARE = {"cpu": 0.6, "cuda": 1.0}
"""Sizes stop at this share of the free memory; beyond cuda's the device itself says so."""
EXCHANGE_SHARE = 0.9
"""Of cuda's memory for ranks that exchange rows: one that fails alone would leave the others waiting."""
DEEPEST_HELD = 8
"""A probe of several layers may hold so many times the bytes of the one that is tried first."""


@dataclass
class Profiler:
    """Takes the measurements in an order that every rank follows. ``clock``: the time since the epoch, rank 0's."""

    worker: Worker
    job: ProfileJob
    context: Context
    clock: Callable[[], float] = time.time
    compute: list[ComputeSample] = field(default_factory=list)
    comm: list[CommSample] = field(default_factory=list)
    host: list[HostSample] = field(default_factory=list)
    _groups: dict[tuple[int, Link, int | None], dist.ProcessGroup | None] = field(default_factory=dict)

    def measure_all(self) -> None:
        works, limit_s = self._works_within_budget()
        pace = Pace(works, limit_s)
        for place, work in enumerate(works):
            elapsed_s = self._elapsed_s()
            extent = pace.choose(place, elapsed_s)
            self._tell(elapsed_s, pace.left_s(place, elapsed_s), work.what)
            if extent != "none":
                work.take(extent == "least")
        self._tell(self._elapsed_s(), 0.0, "done")

    def _limit_s(self, start_s: float) -> float:
        """When the last measurement has to end, in seconds since the launch; the first begins after ``start_s``."""
        if self.job.budget_s is not None:
            return self.job.budget_s - ENDING_S
        return max(BUDGET_S[self.job.quick], start_s + MEASURING_S[self.job.quick]) - ENDING_S

    def _elapsed_s(self) -> float:
        """Seconds since the launch by rank 0's clock, told to all, so that all decide alike."""
        elapsed = torch.tensor(self.clock() - self.job.launched_s, dtype=torch.float64, device=self.worker.device)
        dist.broadcast(elapsed, src=0)
        return float(elapsed.item())

    def _works_within_budget(self) -> tuple[list[Work], float]:
        """What is measured and until when, micro-batches halved until the least that must be leaves time for more.

        Raises MgraphError (exit 2) where the budget asked for is less than even the smallest sizes take.
        """
        sharers = self.grouping.per_host if self.worker.device.type == "cpu" else 1
        kind = self.worker.device.type
        (free,) = max_over_ranks([-free_bytes(self.worker.device)], self.worker.device, True)
        usable = MEMORY_SHARE[kind] * -free / sharers
        alone = self._group_of(1)
        assert alone is not None
        trial = try_microbatches(self.context, alone, LAYER_S[self.job.quick], usable / DEEPEST_HELD)
        room = Room(EXCHANGE_SHARE * usable if kind == "cuda" else usable, may_try=kind == "cuda")
        elapsed_s = self._elapsed_s()
        limit_s = self._limit_s(elapsed_s)
        workload = self.job.workload
        top = min(trial.largest, workload.batch.batch_size)
        while True:
            grid = Grid.of(workload.batch.batch_size, workload.model.num_layers, quick=self.job.quick, largest=top)
            works = self._works(grid, trial.sequence_s, room)
            least_s = sum(work.least_s for work in works if not work.optional)
            if least_s <= LEAST_SHARE * (limit_s - elapsed_s) or top <= LEAST_TOP:
                break
            top = max(LEAST_TOP, top // 2)
        if self.job.budget_s is not None and elapsed_s + least_s > limit_s:
            raise MgraphError(
                f"--budget {self.job.budget_s:g} is too little: the workers took {elapsed_s:.0f} s to start and the "
                f"least that tells every coefficient takes about {least_s:.0f} s more; give it at least "
                f"--budget {math.ceil(elapsed_s + least_s + ENDING_S)}"
            )
        return works, limit_s

    def _works(self, grid: Grid, sequence_s: float, room: Room) -> list[Work]:
        """All parts: first those that tell every coefficient, then those that only make it surer."""
        works = [*self._module_works(grid, sequence_s, room)]
        for layers in sorted({1, max(grid.layers), 4 * max(grid.layers)}):
            seconds, optional = optimizer_s(layers), layers == max(grid.layers) > 1
            take = partial(self._optimizer, layers)
            works.append(Work(f"the optimizer of {layers} layers", take, seconds, seconds, optional))
        if sizes := self._touched_sizes():
            dim = self.job.workload.model.hidden_dim
            times = touched_s(sizes, dim, RUNS), touched_s(sizes, dim, 1)
            works.append(Work("touched rows of the table", partial(self._touched, sizes), *times))
        for targets in grid.targets:
            times = host_s(targets, RUNS), host_s(targets, 1)
            optional = targets not in ends(grid.targets)
            works.append(Work(f"batches of {targets} targets", partial(self._host, targets), *times, optional))
        for link in self.grouping.pair_links():
            measure = partial(measure_p2p, self.worker.device, pair=self._pair(link), link=link)
            times = messages_s(len(grid.messages), link), messages_s(2, link)
            works.append(Work(f"messages between stages, {link}", partial(self._messages, grid, measure), *times))
        for size, link, optional in self._degrees():
            group = self._group_of(size, link, most=None if link == NETWORK else 1)
            for what, of_group, most in (
                ("sums", measure_all_reduce, self._gradient_bytes()),
                ("gathers", measure_all_gather, 0),
            ):
                measure = partial(of_group, self.worker.device, group, size, link=link)
                take = partial(self._messages, grid, measure, most=most)
                times = messages_s(len(grid.messages), link) + larger_s(most), messages_s(2, link)
                works.append(Work(f"{what} over {size} ranks, {link}", take, *times, optional))
        return sorted(works, key=lambda work: work.optional)

    def _module_works(self, grid: Grid, sequence_s: float, room: Room) -> Iterator[Work]:
        most = self.job.workload.batch.rows().sequence_rows
        alone: list[tuple[int, Link, bool]] = [(1, HOST, False)]
        for cp, link, optional in alone + self._degrees(most):
            for way in ways(cp):
                named = [f"modules with cp={cp}"] + ["over the network"] * (link != HOST)
                named += [f"{way.recompute} recompute, {way.context}"] * (way != PLAIN)
                sizes = grid.sizes(way, cp)
                full_s, least_s = (modules_s(each, way, cp, link, sequence_s) for each in (sizes, sizes.least()))
                take = partial(self._modules, sizes, cp, way, room, link)
                yield Work(", ".join(named), take, full_s, least_s, optional)

    def _degrees(self, most: int | None = None) -> list[tuple[int, Link, bool]]:
        """(degree, link, optional) of all groups up to ``most`` ranks: a link's smallest and largest tell its slope."""
        top = self.worker.world_size if most is None else min(most, self.worker.world_size)
        found = [(size, link) for size in range(2, top + 1) for link in self.grouping.links(size)]
        needed = {each for link in (HOST, NETWORK) for each in ends(tuple(pair for pair in found if pair[1] == link))}
        return [(size, link, (size, link) not in needed) for size, link in found]

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.worker.world_size, self.job.hosts)

    def _group_of(self, degree: int, link: Link = HOST, most: int | None = None) -> dist.ProcessGroup | None:
        """This rank's group among as many of that degree as fit (or ``most``); None where it is left over."""
        key = degree, link, most
        if key not in self._groups:
            self._groups[key] = None
            groups = [[rank] for rank in range(self.worker.world_size)] if degree == 1 else None
            for ranks in (groups or self.grouping.groups(degree, link))[:most]:
                group = dist.new_group(ranks, timeout=COLLECTIVE_DEADLINE)
                if self.worker.rank in ranks:
                    self._groups[key] = group
        return self._groups[key]

    def _modules(self, sizes: Sizes, cp: int, way: Way, room: Room, link: Link, least: bool) -> None:
        group = self._group_of(cp, link)
        self.compute += measure_modules(self.context, cp, group, way, sizes.least() if least else sizes, room, link)

    def _optimizer(self, layers: int, least: bool) -> None:
        alone = self._group_of(1)
        assert alone is not None
        self.compute.append(measure_optimizer(self.context, alone, layers, 1 if least else RUNS))

    def _touched_sizes(self) -> list[tuple[int, int]]:
        """Up to as many rows as any plan's step can touch: its padding is less than a batch. None without a table."""
        workload = self.job.workload
        dim, batch = workload.model.hidden_dim, workload.batch
        table_rows = workload.parameters().table // dim
        most = min(table_rows, 2 * batch.batch_size * batch.rows().sequence_rows)
        return touched_sizes(most, dim, self.worker.device.type) if most else []

    def _touched(self, sizes: list[tuple[int, int]], least: bool) -> None:
        alone = self._group_of(1)
        assert alone is not None
        probe = TouchedProbe(self.context, alone)
        self.compute += [measure_touched(probe, rows, pieces, 1 if least else RUNS) for rows, pieces in sizes]

    def _host(self, targets: int, least: bool) -> None:
        self.host += measure_host(self.context, targets, 1 if least else RUNS)

    def _messages(self, grid: Grid, measure: Callable[[int], CommSample], least: bool, most: int = 0) -> None:
        """The grid's sizes, and larger ones until ``most`` bytes are reached or they would take long, on all ranks."""
        self.comm += [measure(size) for size in (ends(grid.messages) if least else grid.messages)]
        for larger in () if least else LARGER_MESSAGES:
            last, size = self.comm[-1], min(larger, most)
            if last.message_bytes >= most or last.time_s * size / last.message_bytes > LARGER_S:
                break
            self.comm.append(measure(size))

    def _gradient_bytes(self) -> int:
        """Of the whole model: the largest sum that any plan has. A table's is gathered, row by row."""
        workload = self.job.workload
        counts = workload.parameters()
        return (counts.of_model(workload.model.num_layers) - counts.table) * workload.itemsize_bytes

    def _pair(self, link: Link) -> Pair | None:
        """This rank's among the pairs that send to each other."""
        pairs = self.grouping.pairs(link)[: None if link == NETWORK else 1]
        return next(((first, second) for first, second in pairs if self.worker.rank in (first, second)), None)

    def _tell(self, elapsed_s: float, left_s: float, what: str) -> None:
        if self.worker.rank == 0:
            line = {"done": elapsed_s, "total": elapsed_s + left_s, "left_s": left_s, "what": what}
            with self.job.progress_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Measure everything that ``fit`` needs and write the profile (rank 0)."""
    job = ProfileJob.model_validate(values, strict=False)
    dataset = job.workload.dataset
    graph = open_graph(job.graph_path)
    split = make_split(graph, dataset.split, dataset.split_seed)
    torch.set_float32_matmul_precision("high" if job.workload.train.matmul_precision == "tf32" else "highest")
    memory = WorkerMemory.at_start(worker.device, worker.world_size // job.hosts)
    profiler = Profiler(worker, job, Context(job.workload, graph, worker.device, job.threads, split.train))
    profiler.measure_all()
    memory = memory.at_end(worker.device, profiler.context.fragmentation)
    if worker.rank == 0:
        Profile(
            workload=job.workload,
            machine=Machine(
                hosts=job.hosts,
                device=job.device,
                num_devices=worker.world_size,
                memory_bytes=memory.memory_bytes,
                overhead_bytes=memory.overhead_bytes,
                backend=dist.get_backend(),
                torch=torch.__version__,
            ),
            compute=profiler.compute,
            comm=profiler.comm,
            host=profiler.host,
        ).save(job.out)


if __name__ == "__main__":
    run_worker(main)
