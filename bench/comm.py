"""What communication costs, and how much of it computation hides.

    python bench/comm.py [--sequences 8] [--rows 512] [--rounds 5]

- **ring**: biased attention over two hosts joined by a slowed link (network namespaces and `tc`, as root), S = 512,
  8 heads of 8, 6 channels, forward and backward. The link is free and slow in turn within one run; its slow rate makes
  one hop take `--share` of one block's forward. Hidden = 1 - (time a rank does nothing but wait for hops) / (number of
  hops x time of one hop alone).
- **gather**: the same attention with K/V gathered at once, beside the ring, on the free link.
- **table**: gradient and update of a 2.4 million x 64 table for 1024 targets of 16 rows over two replicas, beside a
  dense sum of the table's gradient and torch's fused AdamW.

Each rank has one core. Prints medians over rounds, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.layout import wire
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import BiasWeights
from megagraph_cli.model.bias import AttentionBias, TokenRows
from megagraph_cli.parallel import context
from megagraph_cli.parallel.context import Ring, wait_all
from megagraph_cli.parallel.mesh import Mesh, build_mesh
from megagraph_cli.parallel.row_adamw import RowAdamW
from megagraph_cli.parallel.table import TableGradient
from megagraph_cli.runtime.build import make_attend
from megagraph_cli.runtime.meters import metered
from parts.slow_link import limit, missing, run_on_both

HEADS, HEAD_DIM, POWERS = 8, 8, 6
TABLE_ROWS, TABLE_DIM, TARGETS, TARGET_ROWS = 2_400_000, 64, 1024, 16
CPU = torch.device("cpu")


def main() -> None:
    options = _options()
    if "RANK" not in os.environ:
        why = missing()
        if why is not None:
            sys.exit(f"bench/comm.py needs a link that it can slow down: {why}")
        print(run_on_both(sys.argv, deadline_s=540)[0], end="")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = build_mesh(ParallelDims(1, 1, 2), AXES, "cpu")
    attention = Attention(mesh, options)
    found = [attention.hidden(options), attention.gathered(options)]
    if not options.no_table:
        found.append(table(build_mesh(ParallelDims(1, 2, 1), AXES, "cpu"), options.rounds))
    dist.destroy_process_group()
    if mesh.place.cp == 0:
        for line in found:
            print(json.dumps(line))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--no-table", action="store_true")
    return parser.parse_args()


def median_s(function: Callable[[], object], times: int = 3) -> float:
    """Seconds of one call, both ranks starting together, the slower one's; one call goes before."""
    taken = []
    for _ in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(taken[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


class Attention:
    """One layer's attention on this rank's half of the rows."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        self.mesh = mesh
        layout = RowLayout(options.rows, 0, 0, cp=2)
        rows, batch = layout.rows_per_rank, options.sequences
        generator = torch.Generator().manual_seed(mesh.place.cp)
        features = torch.rand(2, POWERS, batch, rows, rows, generator=generator)
        self.bias = AttentionBias(
            features=features,
            padded_keys=torch.zeros(2, batch, rows, dtype=torch.bool),
            tokens=tuple(TokenRows.of(layout, owner) for owner in range(2)),
            cp_rank=mesh.place.cp,
        )
        shape = (HEADS, batch, rows, HEAD_DIM)
        self.qkv = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        self.grad = torch.randn(shape, generator=generator)
        self.weights = BiasWeights(
            torch.randn(POWERS, HEADS).requires_grad_(), torch.zeros(HEADS), torch.zeros(0, HEADS)
        )
        self.attend = {way: make_attend(mesh, way) for way in ("ring", "allgather")}
        self.sizes = wire.AttentionSizes(2, batch, rows, HEADS * HEAD_DIM, HEADS, 4, 4)

    def forward(self, way: str = "ring") -> Tensor:
        return self.attend[way](*self.qkv, self.bias, self.weights, None)

    def both(self, way: str = "ring") -> None:
        self.forward(way).backward(self.grad)

    def hop(self) -> None:
        """One block of K/V to the neighbour and one from it."""
        ring = Ring(self.mesh.cp, self.mesh.place.cp, 2)
        outgoing, incoming = torch.stack(self.qkv[1:]).detach(), torch.empty(2, *self.grad.shape)
        for work in ring.exchange(outgoing, incoming, 0):
            work.wait()

    def waited_s(self, calls: int) -> float:
        """Seconds of a forward and backward in which this rank does nothing but wait for a hop: the slower rank's."""
        waits: list[float] = []

        def timed(works: list[dist.Work]) -> None:
            start = time.perf_counter()
            wait_all(works)
            waits[-1] += time.perf_counter() - start

        with mock.patch.object(context, "wait_all", timed):
            for _ in range(calls):
                dist.barrier()
                waits.append(0.0)
                self.both()
        slowest = torch.tensor(statistics.median(waits), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def hidden(self, options: argparse.Namespace) -> dict[str, Any]:
        """The share of hop time that computation hides on the slow link; both links' times beside it."""
        hops = sum(wire.layer_bytes(self.sizes, "ring")) / 2 / self.sizes.kv_bytes
        block_s = median_s(self.forward, 7) / 2
        rate = self.sizes.kv_bytes / (options.share * block_s)
        rounds = []
        for _ in range(options.rounds):
            free_s = median_s(self.both)
            limit(rate)
            rounds.append((free_s, median_s(self.both), median_s(self.hop), self.waited_s(5)))
            limit(None)
        free_s, slow_s, hop_s, waited_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        return {
            "what": "ring",
            "sequences": options.sequences,
            "rows": options.rows,
            "block_forward_s": block_s,
            "free_s": free_s,
            "slow_s": slow_s,
            "hop_s": hop_s,
            "hops": hops,
            "waited_s": waited_s,
            "hidden": 1 - waited_s / (hops * hop_s),
        }

    def gathered(self, options: argparse.Namespace) -> dict[str, Any]:
        """Both contexts on the free link, alternating."""
        rounds = [[median_s(lambda c=c: self.both(c)) for c in ("ring", "allgather")] for _ in range(options.rounds)]  # type: ignore[misc]
        ring_s, gather_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        return {"what": "gather", "rows": options.rows, "ring_s": ring_s, "allgather_s": gather_s}


def table(mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of a sparse and a dense step of the table, gradient to update."""
    generator = torch.Generator().manual_seed(mesh.place.dp)
    ids = torch.randint(0, TABLE_ROWS, (TARGETS // 2 * TARGET_ROWS,), generator=generator).unique()
    weight = nn.Parameter(torch.zeros(TABLE_ROWS, TABLE_DIM))
    sparse_s, peak_bytes = sparse_step(mesh, weight, ids, rounds)
    dense_s = dense_step(mesh, weight, ids)
    most = torch.tensor(ids.numel())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    sparse_bytes = wire.table_bytes(int(most), TABLE_DIM, 4, 2)
    dense_bytes = wire.all_reduce_bytes(weight.nbytes, 2)
    return {
        "what": "table",
        "sparse_s": sparse_s,
        "dense_s": dense_s,
        "sparse_bytes": sparse_bytes,
        "dense_bytes": dense_bytes,
        "bytes_ratio": sparse_bytes / dense_bytes,
        "peak_bytes_by_table": peak_bytes / weight.nbytes,
    }


def sparse_step(mesh: Mesh, weight: nn.Parameter, ids: Tensor, rounds: int) -> tuple[float, int]:
    """(seconds, peak bytes): the peak holds the table, two moments, and no gradient of the table's size."""
    gradient, optimizer = TableGradient(weight, mesh), RowAdamW(weight, weight_decay=0.01)

    def step() -> None:
        gradient.begin([ids])
        functional.embedding(ids, weight, sparse=True).sum().backward()  # type: ignore[no-untyped-call]
        gradient.reduce()
        assert gradient.touched is not None
        optimizer.step(gradient.touched, 1e-3)
        gradient.forget()

    step()
    with metered(CPU) as reading:
        step()
    return statistics.median(median_s(step) for _ in range(rounds)), reading.peak_bytes


def dense_step(mesh: Mesh, weight: nn.Parameter, ids: Tensor) -> float:
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def step() -> None:
        functional.embedding(ids, weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        dist.all_reduce(weight.grad, group=mesh.loss)
        optimizer.step()
        weight.grad.zero_()

    return median_s(step, times=1)


if __name__ == "__main__":
    main()
