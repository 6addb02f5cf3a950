"""Heterogeneous pipeline parallelism (HPP): micro-batches through stages of unequal layer counts.

A stage module is called as ``module(x, index)``: ``index`` int64 [1] on the CPU is the number of the micro-batch,
whose own tensors (ids, bias, labels) each rank already has; only x crosses a boundary. The order of work is that of
``layout/schedules.py``, which the cost model simulates. With one stage the micro-batches accumulate one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.backward import backward_from
from megagraph_cli.layout.schedules import SCHEDULES

Notice = Callable[[], None]
SpanOf = Callable[[Literal["device", "link", "host"], str], AbstractContextManager[None]]
"""(lane, name) -> what to work inside of, so that it can be timed."""


def no_span(lane: str, name: str) -> AbstractContextManager[None]:  # noqa: ARG001
    """Times nothing."""
    return nullcontext()


class Pipeline(Protocol):
    """Runs all micro-batches of one step on this rank's stage."""

    def step(self, before_last: Notice, span: SpanOf = no_span) -> None:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters.

        ``before_last`` is called once, before the last backward: what it adds to a gradient makes it complete.
        """
        ...

    def infer(self) -> list[Tensor]:
        """Forward only, without gradients; on the last stage the outputs of the micro-batches in order, else []."""
        ...


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, index [1]) -> scalar loss of that micro-batch."""


@dataclass(frozen=True)
class SingleStage:
    """pp = 1: micro-batches accumulate one after another, so one is alive at a time."""

    module: nn.Module
    num_microbatches: int
    loss: LossFunction

    def step(self, before_last: Notice, span: SpanOf = no_span) -> None:
        for index in torch.split(torch.arange(self.num_microbatches), 1):
            with span("device", f"forward {int(index)}"):
                loss = self.loss(self.module(index, index), index)
            if int(index) == self.num_microbatches - 1:
                before_last()
            with span("device", f"backward {int(index)}"):
                backward_from(loss, None)
            del loss  # it holds on to the micro-batch's channels while the next one goes forward

    def infer(self) -> list[Tensor]:
        with torch.no_grad():
            return [self.module(index, index) for index in torch.split(torch.arange(self.num_microbatches), 1)]


@dataclass(frozen=True)
class Neighbours:
    """The stages before and after this one.

    ``down`` carries x towards the last stage, ``up`` its gradients towards the first. Each is a group of all stages,
    or two that take the links in turn; with more than two stages it must be two. NCCL does the messages of a group one
    after another, and a receive is posted long before its message is sent: a stage that sent in the same group would
    have its sends wait behind it, and stages would wait for each other in a circle.
    """

    stage: int
    num_stages: int
    down: Sequence[dist.ProcessGroup]
    up: Sequence[dist.ProcessGroup]

    @property
    def before(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The (down, up) groups of the link to the stage before."""
        return self._link(self.stage - 1)

    @property
    def after(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The (down, up) groups of the link to the stage after."""
        return self._link(self.stage)

    def _link(self, number: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return self.down[number % len(self.down)], self.up[number % len(self.up)]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.num_stages - 1

    def meet(self, device: torch.device) -> None:
        """One message over every link, in an order that cannot wait in a circle: NCCL connects on first use."""
        token = torch.zeros(1, device=device)
        if not self.first:
            dist.recv(token, group=self.before[0], group_src=self.stage - 1)
        if not self.last:
            dist.send(token, group=self.after[0], group_dst=self.stage + 1)
            dist.recv(token, group=self.after[1], group_src=self.stage + 1)
        if not self.first:
            dist.send(token, group=self.before[1], group_dst=self.stage - 1)


class Boundary(NamedTuple):
    """x as it crosses into or out of a stage: one static shape for all boundaries."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Inbox:
    """Messages of one direction, received in order, the next one posted while the caller works on this one."""

    def __init__(self, group: dist.ProcessGroup, source: int, boundary: Boundary, count: int) -> None:
        self._group, self._source, self._boundary = group, source, boundary
        self._left = count
        self._posted: tuple[Tensor, dist.Work] | None = None
        self._post()

    def _post(self) -> None:
        self._posted = None
        if self._left:
            buffer = torch.empty(self._boundary.shape, dtype=self._boundary.dtype, device=self._boundary.device)
            work = dist.irecv(buffer, group=self._group, group_src=self._source)
            assert work is not None
            self._left -= 1
            self._posted = buffer, work

    def take(self) -> Tensor:
        assert self._posted is not None, "more messages taken than are sent"
        buffer, work = self._posted
        work.wait()
        self._post()
        return buffer


class _Outbox:
    """Messages of one direction; a tensor stays alive until the caller settles its message.

    Only the caller knows when that costs no waiting: gloo tells that a message has left to nobody but its waiter.
    """

    def __init__(self, group: dist.ProcessGroup, destination: int) -> None:
        self._group, self._destination = group, destination
        self._leaving: deque[tuple[Tensor, dist.Work]] = deque()

    def put(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=self._destination)
        assert work is not None
        self._leaving.append((tensor, work))

    def settle_oldest(self) -> None:
        """Wait until the oldest message has left, and let go of it."""
        self._leaving.popleft()[1].wait()

    def settle(self, most: int = 0) -> None:
        """Let go of all but the ``most`` newest messages."""
        while len(self._leaving) > most:
            self.settle_oldest()


class Staged:
    """pp > 1: a stage's work in the order of a schedule.

    No more than one receive of each direction is posted ahead, so a stage holds the x of the micro-batches in flight
    and one more. What it sends it holds no longer than it must: an x until its gradient comes back, which tells that
    it arrived, and a gradient until the second backward after it, when the stage before has taken it or is behind.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        neighbours: Neighbours,
        schedule: str,
        num_microbatches: int,
        loss: LossFunction,
        boundary: Boundary,
    ) -> None:
        self._module, self._loss, self._boundary = module, loss, boundary
        self._at, self._count = neighbours, num_microbatches
        self._order = SCHEDULES[schedule].order(neighbours.stage, neighbours.num_stages, num_microbatches)
        neighbours.meet(boundary.device)

    def step(self, before_last: Notice, span: SpanOf = no_span) -> None:
        arriving, leaving = self._down()
        returning, passing = self._up()
        held: dict[int, tuple[Tensor, Tensor]] = {}
        for place, work in enumerate(self._order):
            index = torch.tensor([work.microbatch])
            if work.kind == "forward":
                x = index
                if arriving is not None:
                    with span("link", f"receive for forward {work.microbatch}"):
                        x = arriving.take().requires_grad_()
                with span("device", f"forward {work.microbatch}"):
                    out = self._module(x, index)
                    if leaving is not None:
                        leaving.put(out.detach())
                    held[work.microbatch] = x, self._loss(out, index) if self._at.last else out
                continue
            if place == len(self._order) - 1:
                before_last()
            x, out = held.pop(work.microbatch)
            if passing is not None:
                passing.settle(1)
            gradient = None
            if returning is not None:
                with span("link", f"receive for backward {work.microbatch}"):
                    gradient = returning.take()
            if leaving is not None:
                leaving.settle_oldest()
            with span("device", f"backward {work.microbatch}"):
                backward_from(out, gradient)
            del out, gradient
            if passing is not None:
                assert x.grad is not None
                passing.put(x.grad)
            del x
        if passing is not None:
            passing.settle()

    def infer(self) -> list[Tensor]:
        arriving, leaving = self._down()
        outputs = []
        with torch.no_grad():
            for index in torch.split(torch.arange(self._count), 1):
                if leaving is not None:
                    leaving.settle(1)
                out = self._module(index if arriving is None else arriving.take(), index)
                if leaving is None:
                    outputs.append(out)
                else:
                    leaving.put(out)
        if leaving is not None:
            leaving.settle()
        return outputs

    def _down(self) -> tuple[_Inbox | None, _Outbox | None]:
        """Where x comes from and where it goes."""
        at = self._at
        return (
            None if at.first else _Inbox(at.before[0], at.stage - 1, self._boundary, self._count),
            None if at.last else _Outbox(at.after[0], at.stage + 1),
        )

    def _up(self) -> tuple[_Inbox | None, _Outbox | None]:
        """Where gradients come from and where they go."""
        at = self._at
        return (
            None if at.last else _Inbox(at.after[1], at.stage + 1, self._boundary, self._count),
            None if at.first else _Outbox(at.before[1], at.stage - 1),
        )
