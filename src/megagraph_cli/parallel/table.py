"""Gradients of an embedding table: only the rows that a step touched exist, and only they travel.

A rank's lookups leave one gradient row for each distinct row of a micro-batch. After the backward these are summed by
row, gathered with their ids over the ``loss`` group (dp x cp), and summed again, in one order on every rank, so that
replicas stay equal to the last bit. Shapes are static but for one number, the most rows that any rank touched, which
is agreed on before the forward: on a device the host then waits for nothing that was issued since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.parallel.collectives import all_gather
from megagraph_cli.parallel.mesh import Mesh


@dataclass(frozen=True)
class TouchedRows:
    """Gradient rows by table row.

    ``ids`` int64 [n]: each touched row once, ascending, then ``num_rows`` of the table in slots that are not used;
    ``rows`` [n, D]: their gradients, zero in unused slots.
    """

    ids: Tensor
    rows: Tensor


def count_distinct(ids: Tensor) -> Tensor:
    """How many different values ``ids`` int64 [n] has: int64 [1], left on the device."""
    ordered = ids.sort().values
    return (ordered[1:] != ordered[:-1]).sum().view(1) + int(ids.numel() > 0)


def sum_by_row(ids: Tensor, rows: Tensor, num_rows: int, size: int) -> TouchedRows:
    """Rows of equal id added up in the order they stand in, in ``size`` slots, of which every distinct id needs one.

    ids int64 [n] (``num_rows`` = no row), rows [n, D] -> TouchedRows of ``size`` slots; no host sync.
    """
    count = ids.numel()
    ordered, order = ids.sort(stable=True)
    slot = torch.zeros_like(ordered)
    torch.cumsum(ordered[1:] != ordered[:-1], dim=0, out=slot[1:])
    lengths = torch.zeros_like(slot).scatter_add_(0, slot, torch.ones_like(slot))
    distinct = torch.full_like(ordered, num_rows).scatter_(0, slot, ordered)
    # A segment is summed by one thread from left to right; index_add on a device has no order.
    sums = torch.segment_reduce(rows.index_select(0, order), "sum", lengths=lengths, axis=0, unsafe=True)
    if size <= count:
        return TouchedRows(distinct[:size], sums[:size])
    more = size - count
    return TouchedRows(
        torch.cat((distinct, distinct.new_full((more,), num_rows))),
        torch.cat((sums, sums.new_zeros((more, rows.shape[1])))),
    )


class _Later:
    """A number on the device that the host reads later, waiting only for what was issued before it."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = number
        if number.is_cuda:
            self._host = torch.empty_like(number, device="cpu", pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._host)


class TableGradient:
    """The gradient of one table [U, D] over a step: ``begin`` before the forward, ``reduce`` after the backward."""

    def __init__(self, table: nn.Parameter, mesh: Mesh) -> None:
        self.table = table
        self._mesh = mesh
        self._sharers = mesh.dims.dp * mesh.dims.cp
        self._capacity: _Later | None = None
        self.touched: TouchedRows | None = None

    def begin(self, ids: Sequence[Tensor]) -> None:
        """Agree on the most rows that a rank will touch; ``ids`` int64 [n] of each of this rank's micro-batches."""
        most = count_distinct(torch.cat(list(ids)))
        if self._sharers > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.loss)
        self._capacity = _Later(most)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over the ranks of ``loss``; afterwards ``touched`` is the same on all of them."""
        assert self._capacity is not None, "begin comes first"
        size = self._capacity.read()
        grad, self._capacity = self.table.grad, None
        self.forget()
        num_rows = self.table.shape[0]
        assert grad is not None, "no lookup reached the loss"
        # Uncoalesced: coalescing would sort and sum in an order of its own.
        touched = sum_by_row(grad._indices()[0], grad._values(), num_rows, size)
        if self._sharers > 1:
            ids, rows = (self._gather(part) for part in (touched.ids, touched.rows))
            touched = sum_by_row(ids, rows, num_rows, min(ids.numel(), num_rows))
        self.touched = touched

    def _gather(self, own: Tensor) -> Tensor:
        everyones = own.new_empty((self._sharers * own.shape[0], *own.shape[1:]))
        all_gather(everyones, own, self._mesh.loss)
        return everyones

    def forget(self) -> None:
        """Drop what lookups have left so far."""
        self.table.grad = None
        self.touched = None

    def square_sum(self) -> Tensor:
        """This rank's part of the squared norm of the whole model's gradient: the rank at dp = cp = 0 counts."""
        assert self.touched is not None
        if self._mesh.place.dp or self._mesh.place.cp:
            return torch.zeros((), dtype=torch.float64, device=self.table.device)
        norm: Tensor = torch.linalg.vector_norm(self.touched.rows, dtype=torch.float64)
        return norm.square()

    def scale(self, factor: Tensor) -> None:
        assert self.touched is not None
        self.touched.rows.mul_(factor.to(self.touched.rows.dtype))

    def dense(self) -> Tensor:
        """The reduced gradient as a whole table [U, D]: for tests and tools, not for training."""
        assert self.touched is not None
        whole = self.table.new_zeros((self.table.shape[0] + 1, self.table.shape[1]))
        return whole.index_copy_(0, self.touched.ids, self.touched.rows)[:-1]
