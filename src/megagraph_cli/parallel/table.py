"""Gradients of an embedding table: only the rows that a step touched exist, and only they travel.

A rank's lookups leave one gradient row for each distinct row of a micro-batch. As a backward leaves them they are added
to those of the micro-batches before. After the last they are gathered with their ids over the ``loss`` group (dp x cp),
piece by piece, and added up in one order on every rank, so that replicas stay equal to the last bit. Shapes are static
but for one number, the most rows that any rank touched, which is agreed on before the forward: on a device the host
then waits for nothing that was issued since.

What lives at the largest moments, with M the most rows that a rank touches, g ranks that share the table and n the rows
of the micro-batch that goes back:

- from the first backward to the last, M rows and ids of the step so far, and in a backward beside these n rows and
  their slots, which stand where the activations of the layers before went;
- the sum over ranks: a rank's own M rows and ids, g M slots of all ranks' rows in the sum, min(g M, U) rows and ids of
  the sum, and a piece of everyone's rows, of which gloo makes a copy that may still be there when the next piece has
  its own;
- norm and optimizer: the sum, and what ``RowAdamW`` makes beside a piece of it.

Ids alone (sorting them as a step begins, say) are never the most: at that moment there is no activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.layout.pieces import num_pieces
from megagraph_cli.parallel.collectives import all_gather
from megagraph_cli.parallel.mesh import Mesh
from megagraph_cli.parallel.square_sum import square_sum


@dataclass(frozen=True)
class TouchedRows:
    """Gradient rows by table row.

    ``ids`` int64 [n]: each touched row once, ascending, then ``num_rows`` of the table in slots that are not used;
    ``rows`` [n, D]: their gradients, zero in unused slots. Summed over all ranks, at least ``in_use`` slots are used.
    """

    ids: Tensor
    rows: Tensor
    in_use: int = 1

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Add ``rows`` [k, D] to those of ``ids`` int64 [k]: each of them once and here, or no row of the table.

        Rows of no row are zero: wherever they are added nothing changes, in whatever order.
        """
        slots = torch.searchsorted(self.ids, ids).clamp_(max=self.ids.numel() - 1)
        self.rows.index_add_(0, slots, rows)


class RowSum:
    """The rows of g ranks added up by id, piece by piece, each rank's in turn: in one order wherever it is done.

    ``touched`` is the sum so far.
    """

    def __init__(self, ids: Tensor, like: Tensor, in_use: int) -> None:
        """``ids`` int64 [g, M]: what each rank touched, as in ``TouchedRows``, of a table ``like`` [U, D].

        They are overwritten with slots of the sum: looked up once for all pieces, without memory of their own.
        """
        distinct, _ = distinct_rows(ids.view(-1), like.shape[0])
        ids.copy_(torch.searchsorted(distinct, ids).clamp_(max=distinct.numel() - 1))
        self._slots = ids
        self.touched = TouchedRows(distinct, like.new_zeros((distinct.numel(), like.shape[1])), in_use)

    def add(self, first: int, rows: Tensor) -> None:
        """Add ``rows`` [g, n, D], those of every rank from the ``first`` on."""
        # One call for each rank: several ranks' rows of one id within a call would be added in any order on cuda.
        for slots, own in zip(self._slots[:, first : first + rows.shape[1]], rows, strict=True):
            self.touched.rows.index_add_(0, slots, own)


def distinct_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(int64 [min(n, num_rows)] the different rows in ``ids``, ascending, then ``num_rows``; int64 [1] their number).

    ids int64 [n] (``num_rows`` = no row); both stay on the device.
    """
    ordered = ids.sort().values
    slot = torch.zeros_like(ordered)
    torch.cumsum(ordered[1:] != ordered[:-1], dim=0, out=slot[1:])
    distinct = torch.full_like(ordered, num_rows).scatter_(0, slot, ordered)
    number = (distinct < num_rows).sum().view(1)
    return _of_length(distinct, min(ids.numel(), num_rows), num_rows), number


def _of_length(ids: Tensor, length: int, num_rows: int) -> Tensor:
    """A copy of the first ``length`` of ids [n], ``num_rows`` in what slots are more than n."""
    kept = ids.new_full((length,), num_rows)
    kept[: ids.numel()] = ids[:length]
    return kept


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
    """The gradient of one table [U, D] over a step: ``begin`` before the forward, ``reduce`` after the backward.

    ``touched``: this rank's micro-batches added up so far, after ``reduce`` the sum over all ranks of ``loss``.
    """

    def __init__(self, table: nn.Parameter, mesh: Mesh) -> None:
        self.table = table
        self._mesh = mesh
        self._sharers = mesh.dims.dp * mesh.dims.cp
        self._distinct: Tensor | None = None
        self._most: _Later | None = None
        self.touched: TouchedRows | None = None
        # Hooks are out of the garbage collector's sight: one that held on to this object would keep the table forever.
        came_back = WeakMethod(self._came_back)

        def hook(table: nn.Parameter) -> None:
            if (alive := came_back()) is not None:
                alive(table)

        table.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def begin(self, ids: Sequence[Tensor]) -> None:
        """Agree on the most rows that a rank will touch.

        ``ids`` int64 [n] of each of this rank's micro-batches; each names a row once.
        """
        self.forget()
        self._distinct, most = distinct_rows(torch.cat(list(ids)), self.table.shape[0])
        if self._sharers > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.loss)
        self._most = _Later(most)

    @torch.no_grad()
    def _came_back(self, table: nn.Parameter) -> None:
        """Add what a micro-batch's backward left to what those before it left; nothing where no step has begun."""
        if self._most is None:
            return
        if self.touched is None:
            assert self._distinct is not None
            most = self._most.read()
            self.touched = self._zeros(_of_length(self._distinct, most, table.shape[0]), in_use=most)
            self._distinct = None
        grad, table.grad = table.grad, None
        assert grad is not None
        # Uncoalesced: coalescing would sort what is distinct anyway.
        self.touched.add(grad._indices()[0], grad._values())

    def _zeros(self, ids: Tensor, in_use: int) -> TouchedRows:
        return TouchedRows(ids, self.table.new_zeros((ids.numel(), self.table.shape[1])), in_use)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over the ranks of ``loss``; afterwards ``touched`` is the same on all of them."""
        assert self.touched is not None, "no lookup reached the loss"
        self._most = None
        if self._sharers == 1:
            return
        own, dim = self.touched, self.table.shape[1]
        total = RowSum(self._gather(own.ids), self.table, own.in_use)
        length = -(-own.in_use // num_pieces(own.in_use, dim, own.in_use, self.table.device.type))
        # One buffer for all pieces: gloo would hold on to each one's own for a while.
        buffer = own.rows.new_empty(self._sharers * length * dim)
        for first in range(0, own.in_use, length):
            rows = own.rows[first : first + length]
            total.add(first, self._gather(rows, buffer[: self._sharers * rows.numel()]))
        self.touched = total.touched

    def _gather(self, own: Tensor, buffer: Tensor | None = None) -> Tensor:
        """[n, ...] of every rank: [g, n, ...], in ``buffer`` where there is one."""
        everyones = own.new_empty(self._sharers * own.numel()) if buffer is None else buffer
        all_gather(everyones.view(-1, *own.shape[1:]), own, self._mesh.loss)
        return everyones.view(self._sharers, *own.shape)

    def forget(self) -> None:
        """Drop what lookups have left so far."""
        self.table.grad = None
        self.touched = self._distinct = self._most = None

    def square_sum(self) -> Tensor:
        """This rank's part of the squared norm of the whole model's gradient: the rank at dp = cp = 0 counts."""
        assert self.touched is not None
        if self._mesh.place.dp or self._mesh.place.cp:
            return torch.zeros((), dtype=torch.float64, device=self.table.device)
        return square_sum(self.touched.rows)

    def scale(self, factor: Tensor) -> None:
        assert self.touched is not None
        self.touched.rows.mul_(factor.to(self.touched.rows.dtype))

    def dense(self) -> Tensor:
        """The reduced gradient as a whole table [U, D]: for tests and tools, not for training."""
        assert self.touched is not None
        whole = self.table.new_zeros((self.table.shape[0] + 1, self.table.shape[1]))
        return whole.index_copy_(0, self.touched.ids, self.touched.rows)[:-1]
