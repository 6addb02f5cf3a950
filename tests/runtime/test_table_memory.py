"""A table of node embeddings: the peak that a cost model of real measurements foretells beside a real step's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.artifacts.profile import Machine, Profile
from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.setting import Setting, role_of
from megagraph_cli.cost.touched import Touched
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.parallel.row_adamw import RowAdamW
from megagraph_cli.parallel.table import TableGradient
from megagraph_cli.runtime.grid import PLAIN, Sizes
from megagraph_cli.runtime.measure_compute import Room, measure_modules, measure_optimizer
from megagraph_cli.runtime.measure_host import measure_host
from megagraph_cli.runtime.measure_touched import TouchedProbe, measure_touched
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.probes import Context
from tests.graph.tiny import random_graph
from tests.ranks import run_ranks
from tests.runtime.small import CPU, make_plan, make_trainer, one_rank, small_workload

NODES, BATCH = 800, 256


def table_graph() -> Graph:
    """800 nodes and 160 clusters without features."""
    graph = random_graph("none", num_nodes=NODES, density=0.02, seed=3)
    return replace(graph, labels=np.random.default_rng(5).integers(0, 3, NODES), num_classes=3)


def table_workload(graph: Graph) -> Workload:
    return small_workload(
        graph,
        model={"num_layers": 2, "hidden_dim": 32, "ffn_dim": 16},
        batch={"batch_size": BATCH},
        train={"dtype": "float32"},
    )


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """From a profile of one worker, without links: of memory nothing else is needed."""
    graph = table_graph()
    workload = table_workload(graph)
    with one_rank():
        alone = torch.distributed.group.WORLD
        assert alone is not None
        targets = make_split(graph, workload.dataset.split, workload.dataset.split_seed).train
        context = Context(workload, graph, CPU, 1, targets)
        profile = Profile(
            workload=workload,
            machine=Machine(
                hosts=1, device="cpu", num_devices=1, memory_bytes=1, overhead_bytes=0, backend="gloo", torch=""
            ),
            compute=[
                *measure_modules(context, 1, alone, PLAIN, Sizes((1, 2), (8, 16, 32)), Room(math.inf)),
                *(measure_optimizer(context, alone, layers) for layers in (1, 4)),
                *(measure_touched(TouchedProbe(context, alone), rows, 1, 1) for rows in (10, 100)),
            ],
            comm=[],
            host=measure_host(context, 8) + measure_host(context, 32),
        )
    return Predictor(fit(profile), workload)


def measured(rank: int, folder: Path, graph: Graph, plans: list[Plan]) -> list[int]:
    """This rank's peak under each plan."""
    found = []
    for number, plan in enumerate(plans):
        peak_bytes = make_trainer(rank, folder / str(number), plan, graph, max_steps=2).measure().peak_bytes
        assert peak_bytes is not None
        found.append(peak_bytes)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("dp", "counts"), [(1, (8, 32)), (2, (4, 16))])
def test_no_peak_with_a_table_is_above_prediction_and_margin(
    dp: int, counts: tuple[int, ...], predictor: Predictor, tmp_path: Path
) -> None:
    """Few large micro-batches, of which the activations are the most, and many small ones, of which the rows are."""
    graph, workload = table_graph(), predictor.workload
    plans = [make_plan(workload, dp=dp, layers=(2,), num_microbatches=count) for count in counts]
    if dp == 1:
        with one_rank():
            by_rank = [measured(0, tmp_path, graph, plans)]
    else:
        by_rank = run_ranks(dp, measured, tmp_path, graph, plans)
    largest = []
    for count, *peaks in zip(counts, *by_rank, strict=True):
        setting = Setting(ParallelDims(1, dp, 1), count, "gpipe")
        memory = predictor.memory(setting, role_of(0, 1), np.array([2.0]))
        terms = memory.at_peak(count, 1)
        predicted = sum(terms.values())
        assert max(peaks) <= predicted + predictor.margin_bytes(predicted), (count, peaks, terms)
        # Even draws touch more rows than those of a graph with hubs, and gloo mostly lets go in time.
        assert predicted <= 1.15 * max(peaks) + memory.touched.late_bytes, (count, peaks, terms)
        largest.append("activations" if "activations" in terms else "rows")
    assert largest == ["activations", "rows"]


def rises(rank: int, rows: int, table_rows: int, dim: int, count: int) -> tuple[int, int]:
    """(bytes above the table's, its moments' and the ids' while a step's micro-batches go by, and after them)."""
    sharers = torch.distributed.get_world_size()
    table = nn.Parameter(torch.zeros(table_rows, dim))
    gradient = TableGradient(table, build_mesh(ParallelDims(1, sharers, 1), AXES, "cpu"))
    optimizer = RowAdamW(table, weight_decay=0.1)
    ids = torch.arange(rows * rank, rows * (rank + 1)) % table_rows

    def passes() -> None:
        gradient.begin(ids.chunk(count))
        for part in ids.chunk(count):
            functional.embedding(part, table, sparse=True).sum().backward()  # type: ignore[no-untyped-call]

    def end() -> None:
        gradient.reduce()
        gradient.square_sum()
        assert gradient.touched is not None
        optimizer.step(gradient.touched, 1e-3)

    with metered(CPU, from_zero=True) as during:
        passes()
    with metered(CPU, from_zero=True) as after:
        end()
    return during.peak_bytes, during.end_bytes + after.peak_bytes


@pytest.mark.ranks
@pytest.mark.parametrize("sharers", [1, 2, 3])
def test_touched_rows_take_what_is_reckoned(sharers: int) -> None:
    """Every rank touches 1200 other rows of 3000, in 12 micro-batches."""
    rows, table_rows, dim = 1200, 3000, 256
    expected = Touched(rows, sharers, table_rows, dim, 4)
    whole = max(expected.exchange_bytes, expected.update_bytes) + expected.summed_bytes
    for during, after in run_ranks(sharers, rises, rows, table_rows, dim, 12):
        # Beside them a micro-batch has its rows, their gradient and that gradient's own rows.
        assert expected.passing_bytes <= during <= expected.passing_bytes + math.ceil(3.5 * rows / 12 * dim * 4)
        assert 0.8 * whole <= after <= whole + 64 * rows
