"""Micro-batches through stages: gradients and outputs of the whole, in order, under every schedule."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.layout.schedules import SCHEDULES, Work, receive_buffers
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.parallel.pipeline import Boundary, Neighbours, Pipeline, SingleStage, Staged
from tests.ranks import run_ranks

SPLITS = {2: (range(1), range(1, 5)), 3: (range(2), range(2, 3), range(3, 5))}
LAST = Work("backward", -1)
"""Stands in the log where the pipeline says that its last backward comes."""
HIDDEN, ROWS, BATCH, CLASSES, NUM_MICROBATCHES = 4, 3, 2, 5, 4
# float64; sums of at most 24 terms of size about 1 in another order.
TOLERANCE = 1e-13


class Part(nn.Module):
    """Some linear layers; the first part makes x from the micro-batch's number, the last reads row 0."""

    def __init__(self, layers: range, count: int, log: list[Work]) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == count
        self.layers = nn.ModuleDict({str(i): nn.Linear(HIDDEN, HIDDEN) for i in layers}).to(torch.float64)
        self.head = nn.Linear(HIDDEN, CLASSES).to(torch.float64) if self.last else None
        self.log = log
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data.normal_(generator=generator)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        number = int(index)
        self.log.append(Work("forward", number))
        if self.first:
            x = torch.randn(
                BATCH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(number), dtype=torch.float64
            ).requires_grad_()
        out = x
        for layer in self.layers.values():
            out = torch.tanh(layer(out))
        if out.requires_grad:
            out.register_hook(lambda _: self.log.append(Work("backward", number)))
        return out if self.head is None else self.head(out[:, 0])


def loss(output: Tensor, index: Tensor) -> Tensor:
    """Another weight for each micro-batch, so that a mix-up shows."""
    return (output.square().sum() * (1 + float(index))) / 8


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def whole(log: list[Work]) -> tuple[Part, Pipeline]:
    module = Part(range(5), 5, log)
    return module, SingleStage(module, NUM_MICROBATCHES, loss)


def test_one_stage_accumulates_its_micro_batches_one_after_another() -> None:
    log: list[Work] = []
    module, pipeline = whole(log)
    pipeline.step(lambda: log.append(LAST))
    expected = [Work(kind, i) for i in range(NUM_MICROBATCHES) for kind in ("forward", "backward")]  # type: ignore[arg-type]
    assert log == [*expected[:-1], LAST, expected[-1]]
    got = gradients(module)
    module.zero_grad()
    total = sum((loss(module(torch.zeros(0), i), i) for i in torch.arange(NUM_MICROBATCHES)), torch.zeros(()))
    total.backward()
    for name, gradient in gradients(module).items():
        assert float((got[name] - gradient).abs().max()) <= TOLERANCE * max(1.0, float(gradient.abs().max())), name


def test_inference_gives_the_outputs_in_order_and_no_gradient() -> None:
    module, pipeline = whole([])
    outputs = pipeline.infer()
    assert len(outputs) == NUM_MICROBATCHES
    for number, output in enumerate(outputs):
        assert not output.requires_grad
        assert torch.equal(output, module(torch.zeros(0), torch.tensor([number])).detach())
    assert not gradients(module)


def neighbours(rank: int, size: int) -> Neighbours:
    """Groups as the mesh makes them."""
    mesh = build_mesh(ParallelDims(size, 1, 1), AXES, "cpu")
    return Neighbours(rank, size, mesh.pp_down, mesh.pp_up)


def staged(rank: int, schedule: str) -> tuple[dict[str, Tensor], list[Tensor], list[Work]]:
    """Gradients after a step, inference's outputs, and the order of work, of this rank's stage; twice the same."""
    log: list[Work] = []
    size = dist.get_world_size()
    module = Part(SPLITS[size][rank], 5, log)
    pipeline = Staged(
        module,
        neighbours=neighbours(rank, size),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        loss=loss,
        boundary=Boundary((BATCH, ROWS, HIDDEN), torch.float64, torch.device("cpu")),
    )
    pipeline.step(lambda: log.append(LAST))
    first, order = gradients(module), list(log)
    outputs = [output.clone() for output in pipeline.infer()]
    assert gradients(module).keys() == first.keys()
    module.zero_grad()
    pipeline.step(lambda: None)
    for name, gradient in gradients(module).items():
        assert torch.equal(gradient, first[name]), name
    return first, outputs, order


def both_schedules(rank: int) -> dict[str, tuple[dict[str, Tensor], list[Tensor], list[Work]]]:
    return {schedule: staged(rank, schedule) for schedule in SCHEDULES}


@pytest.mark.ranks
@pytest.mark.parametrize("size", list(SPLITS))
def test_uneven_stages_equal_the_whole_under_every_schedule(size: int) -> None:
    module, pipeline = whole([])
    pipeline.step(lambda: None)
    expected, outputs = gradients(module), pipeline.infer()
    by_rank = run_ranks(size, both_schedules)
    for schedule, entry in SCHEDULES.items():
        got = {name: gradient for rank in by_rank for name, gradient in rank[schedule][0].items()}
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = max(1.0, float(gradient.abs().max()))
            assert float((got[name] - gradient).abs().max()) <= TOLERANCE * scale, (schedule, name)
        assert by_rank[0][schedule][1] == []
        for mine, theirs in zip(by_rank[-1][schedule][1], outputs, strict=True):
            assert float((mine - theirs).abs().max()) <= TOLERANCE
        for stage in range(size):
            # The layout's order is what the cost model simulates: it must be what really happens.
            order = list(entry.order(stage, size, NUM_MICROBATCHES))
            assert by_rank[stage][schedule][2] == [*order[:-1], LAST, order[-1]], (schedule, stage)


def posted(rank: int) -> list[int]:
    """How many receives this stage has posted when each of its forwards and backwards begins, under 1F1B."""
    log: list[Work] = []
    counts: list[int] = []
    module = Part(SPLITS[2][rank], 5, log)
    with mock.patch.object(dist, "irecv", wraps=dist.irecv) as receives:
        module.register_forward_pre_hook(lambda *_: counts.append(receives.call_count))
        pipeline = Staged(
            module,
            neighbours=neighbours(rank, 2),
            schedule="1f1b",
            num_microbatches=NUM_MICROBATCHES,
            loss=loss,
            boundary=Boundary((BATCH, ROWS, HIDDEN), torch.float64, torch.device("cpu")),
        )
        pipeline.step(lambda: None)
        counts.append(receives.call_count)
    return counts


@pytest.mark.ranks
def test_the_next_receive_is_posted_before_the_work_on_this_one_begins() -> None:
    first, last = run_ranks(2, posted)
    # The last stage: two posted when its first forward begins, and so on to all four.
    assert last == [2, 3, 4, 4, 4]
    # The first stage receives gradients alone: the first is awaited from the start, the next as soon as one is taken.
    assert first == [1, 1, 2, 3, 4]


MANY = 12
"""Micro-batches: many more than stages."""


def most_alive(rank: int, size: int) -> dict[str, int]:
    """Most tensors that this stage holds at once, of those it received and those it sent each way, under 1F1B."""
    at = neighbours(rank, size)
    alive: dict[str, list[weakref.ref[Tensor]]] = {}
    most: dict[str, int] = {}

    def noting(call: Any) -> Any:
        def wrapper(tensor: Tensor, *, group: dist.ProcessGroup, **place: int) -> Any:
            way = "down" if any(group is link for link in at.down) else "up"
            name = f"{call.__name__} {way}"
            alive.setdefault(name, []).append(weakref.ref(tensor))
            most[name] = max(most.get(name, 0), sum(ref() is not None for ref in alive[name]))
            return call(tensor, group=group, **place)

        return wrapper

    pipeline = Staged(
        Part(SPLITS[size][rank], 5, []),
        neighbours=at,
        schedule="1f1b",
        num_microbatches=MANY,
        loss=loss,
        boundary=Boundary((BATCH, ROWS, HIDDEN), torch.float64, torch.device("cpu")),
    )
    with mock.patch.multiple(dist, isend=noting(dist.isend), irecv=noting(dist.irecv)):
        pipeline.step(lambda: None)
        steps = dict(most)
        most.clear()
        pipeline.infer()
    return steps | {f"infer {name}": count for name, count in most.items()}


@pytest.mark.ranks
def test_what_a_stage_holds_does_not_grow_with_the_number_of_micro_batches() -> None:
    size = 3
    for stage, most in enumerate(run_ranks(size, most_alive, size)):
        in_flight = SCHEDULES["1f1b"].in_flight(stage, size, MANY)
        expected = {}
        if stage:
            expected["irecv down"] = receive_buffers(in_flight, MANY)
            expected["isend up"] = 2
            # The one being worked on, and the next.
            expected["infer irecv down"] = 2
        if stage < size - 1:
            # A micro-batch in flight waits for its gradient.
            expected["isend down"] = in_flight
            expected["irecv up"] = 2
            expected["infer isend down"] = 2
        assert most.keys() == expected.keys()
        assert all(most[name] <= bound for name, bound in expected.items()), (stage, most, expected)
