"""What a training step sends equals the formula, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.graph.batch import replica_targets
from megagraph_cli.graph.graph import Graph
from megagraph_cli.layout import wire
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device
from tests.ranks import run_ranks
from tests.runtime.small import BATCH, CPU, make_parts, make_plan, small_graph, small_workload
from tests.wire_counter import Counts, counted

TARGETS = np.array([4, 8, 15, 16, 23, 42, 59])


@dataclass(frozen=True)
class Case:
    """A plan, and what of its workload decides what is sent."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    layers: tuple[int, ...] = (3,)
    num_microbatches: int = 1
    schedule: str = "gpipe"
    recompute: str = "none"
    context: str = "ring"
    dtype: str = "float64"
    embedding: str = "features"
    num_sampled: int = 5


CASES = {
    2: [
        Case(cp=2),
        Case(cp=2, num_microbatches=2, recompute="full", dtype="bfloat16"),
        Case(cp=2, context="allgather", embedding="table"),
        Case(cp=2, context="allgather", recompute="full", dtype="float32"),
        Case(dp=2, num_microbatches=2, embedding="both"),
        Case(pp=2, layers=(1, 2), num_microbatches=4, schedule="1f1b", embedding="table", dtype="float32"),
    ],
    3: [
        Case(pp=3, layers=(1, 1, 1), num_microbatches=3, schedule="1f1b"),
        Case(cp=3, context="allgather"),
        Case(cp=3, num_microbatches=2),
    ],
    4: [
        Case(pp=2, cp=2, layers=(2, 1), num_microbatches=2, recompute="full"),
        Case(dp=2, cp=2, num_microbatches=2, embedding="both", dtype="float32"),
        Case(cp=4, num_sampled=3, recompute="full"),  # the last rank holds padding alone
    ],
}


def workload_of(case: Case, graph: Graph) -> Workload:
    changes = {"model": {"embedding": case.embedding}, "batch": {"num_sampled": case.num_sampled}}
    return small_workload(graph, train={"dtype": case.dtype}, **changes)


def sent(_rank: int, case: Case) -> tuple[Counts, list[int]]:
    """(bytes that this rank sent in its second step, distinct table rows of each of its micro-batches' lookups)."""
    graph = small_graph()
    plan = make_plan(
        workload_of(case, graph),
        pp=case.pp,
        dp=case.dp,
        cp=case.cp,
        layers=case.layers,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        recompute=case.recompute,
        context=case.context,
    )
    train = TrainStep(make_parts(plan, graph))
    mesh = train.parts.mesh
    share = replica_targets(TARGETS, BATCH, case.dp, mesh.place.dp, case.num_microbatches)
    for step in range(2):
        batch = train.parts.builder.build(share, epoch=1, view=step)
        with counted(mesh) as counts:
            train.run([to_device(part, CPU) for part in batch], step=step, num_targets=TARGETS.size, lr=0.01)
        touched = sorted({int(row) for part in batch if part.inputs is not None for row in part.inputs.rows})
    return counts, touched


def expected(case: Case, most_rows: int) -> dict[str, int]:
    """The formula, from the plan, the workload and the most table rows that a rank touched."""
    workload = workload_of(case, small_graph())
    model, itemsize = workload.model, workload.itemsize_bytes
    layout = workload.batch.rows(case.cp)
    microbatch = -(-BATCH // (case.dp * case.num_microbatches))
    sizes = wire.AttentionSizes(
        cp=case.cp,
        microbatch=microbatch,
        rows=layout.rows_per_rank,
        hidden_dim=model.hidden_dim,
        num_heads=model.num_heads,
        itemsize=2 if case.dtype == "bfloat16" else itemsize,
        stats_itemsize=itemsize,
        empty=len(layout.empty_ranks),
    )
    context = sum(
        case.dp
        * case.num_microbatches
        * wire.context_bytes(sizes, layers, last=stage == case.pp - 1, recompute=case.recompute, context=case.context)
        for stage, layers in enumerate(case.layers)
    )
    sharers = case.dp * case.cp
    x_bytes = microbatch * layout.rows_per_rank * model.hidden_dim * itemsize
    counts = workload.parameters()
    own = counts.of_model(3) - counts.shared - counts.table
    table = wire.table_bytes(most_rows, model.hidden_dim, itemsize, sharers) if counts.table else 0
    formula = {
        "context": context,
        "boundary": sharers * wire.boundary_bytes(x_bytes, case.pp, case.num_microbatches),
        "gradients": wire.gradient_bytes(own, counts.shared, itemsize, num_stages=case.pp, sharers=sharers),
        "table": table,
        "summary": wire.summary_bytes(case.pp * sharers),
    }
    return {why: size for why, size in formula.items() if size}


def sent_in_turn(rank: int, cases: list[Case]) -> list[tuple[Counts, list[int]]]:
    return [sent(rank, case) for case in cases]


@pytest.mark.ranks
@pytest.mark.parametrize("size", list(CASES))
def test_a_step_sends_what_the_formula_says(size: int) -> None:
    by_rank = run_ranks(size, sent_in_turn, CASES[size])
    for case, ranks in zip(CASES[size], zip(*by_rank, strict=True), strict=True):
        total: dict[str, Fraction] = {}
        for counts, _ in ranks:
            for why, part in counts.items():
                total[why] = total.get(why, Fraction()) + part
        most_rows = max(len(touched) for _, touched in ranks)
        assert {why: part for why, part in total.items() if part} == expected(case, most_rows), case


def test_a_large_tables_rows_are_few_bytes_beside_a_dense_sum() -> None:
    """2.4 million rows of 64, 1024 targets of 16 rows each over two replicas, every row another: 1 / 20 at most."""
    rows = 1024 // 2 * 16
    sparse = wire.table_bytes(rows, 64, 4, 2)
    dense = wire.all_reduce_bytes(2_400_000 * 64 * 4, 2)
    assert sparse <= dense / 20
