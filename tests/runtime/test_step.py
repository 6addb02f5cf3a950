"""One optimizer step against the same step written down plainly, and the learning rate's course."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megagraph_cli.graph.batch import replica_targets
from megagraph_cli.model.bias import build_bias
from megagraph_cli.runtime.step import TrainStep, learning_rate
from megagraph_cli.runtime.tensors import to_device
from tests.runtime.small import BATCH, CPU, make_parts, make_plan, small_graph, small_workload

# float64; sums over 8 targets may run in another order.
TOLERANCE = 1e-12
TARGETS = np.array([4, 8, 15, 16, 23, 42, 59])  # one fewer than the batch: one target is padding


def make(num_microbatches: int = 1, grad_clip: float = 1.0) -> TrainStep:
    graph = small_graph()
    workload = small_workload(graph, train={"lr": 0.01, "grad_clip": grad_clip, "dtype": "float64"})
    return TrainStep(make_parts(make_plan(workload, num_microbatches=num_microbatches), graph))


def run(train: TrainStep, steps: int = 1, **changes: Any) -> Tensor:
    share = replica_targets(TARGETS, BATCH, 1, 0, train.parts.order.num_microbatches)
    batch = [to_device(part, CPU) for part in train.parts.builder.build(share, epoch=1, view=0)]
    for step in range(steps):
        summary = train.run(batch, step=step, num_targets=TARGETS.size, lr=0.01, **changes)
    return summary


def plainly(train: TrainStep, grad_clip: float, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters with the mean cross-entropy, torch's own clipping and its plain AdamW."""
    parts = train.parts
    stage = copy.deepcopy(parts.runner.stage)
    layout = parts.workload.batch.rows()
    (batch,) = parts.builder.build(np.append(TARGETS, -1), epoch=1, view=0)
    device_batch = to_device(batch, CPU)
    bias = build_bias(device_batch.topology, layout, 0, powers=3, scale=1.0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01, weight_decay=0.01, foreach=False)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(stage(device_batch.nodes, bias)[:-1], device_batch.labels[:-1])
        loss.backward()
        gradients = [p.grad for p in stage.parameters() if p.grad is not None]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        losses.append(loss.item())
        norms.append(norm.item())
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(stage.parameters(), grad_clip)
        optimizer.step()
    return losses, norms, dict(stage.named_parameters())


@pytest.mark.usefixtures("alone")
def test_the_next_batch_may_be_built_from_when_the_passes_are_done_and_before_others_are_waited_for() -> None:
    train, order = make(num_microbatches=2), []
    passes, reduce = train.parts.pipeline.step, train.gradients.reduce

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            result = call(*arguments)
            order.append(name)
            return result

        return noting

    with (
        mock.patch.object(type(train.parts.pipeline), "step", staticmethod(noted("passes", passes))),
        mock.patch.object(train.gradients, "reduce", noted("reduced", reduce)),
    ):
        run(train, on_wait=lambda: order.append("wait"))
    assert order == ["passes", "wait", "reduced"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("grad_clip", [0.0, 0.05, 1e6])
def test_a_step_is_what_plain_torch_does(grad_clip: float) -> None:
    train = make(grad_clip=grad_clip)
    losses, norms, expected = plainly(train, grad_clip, 3)
    assert norms[0] > 0.05  # so that the middle case clips
    for step in range(3):
        summary = run(train)
        assert abs(float(summary[0]) - losses[step]) <= TOLERANCE
        assert abs(float(summary[1]) - norms[step]) <= TOLERANCE * 10
    for name, parameter in train.parameters.items():
        # AdamW divides by the root of tiny second moments: gradients that are zero but for rounding move by up to lr.
        if name.endswith("bias_offset"):
            continue
        rows = slice(None)
        if name.endswith("qkv.bias"):
            rows = slice(16, None)
            assert float((parameter - expected[name])[:8].detach().abs().max()) <= 1e-9
        assert float((parameter - expected[name])[rows].detach().abs().max()) <= 1e-9, name


@pytest.mark.usefixtures("alone")
def test_micro_batches_accumulate_to_the_same_step() -> None:
    """The loss divides by the targets of the whole batch, so K changes nothing but the order of sums."""
    whole = run(make(1))
    for num_microbatches in (2, 3, 8):
        assert float((run(make(num_microbatches)) - whole).abs().max()) <= TOLERANCE * 10


@pytest.mark.usefixtures("alone")
def test_votes_to_stop_are_summed_and_the_inbox_is_emptied() -> None:
    train = make()
    assert run(train)[2] == 0.0
    assert run(train, stop_vote=True)[2] == 1.0
    assert train.parts.runner.inbox == ()


@pytest.mark.usefixtures("alone")
def test_the_learning_rate_given_is_the_one_used() -> None:
    """AdamW's first step moves a weight by lr in the direction of its gradient, decay aside."""
    train = make(grad_clip=0.0)
    before = {name: p.detach().clone() for name, p in train.parameters.items()}
    run(train)
    moved = train.parameters["head.linear.bias"].detach() - before["head.linear.bias"]
    assert float((moved.abs() - 0.01).abs().max()) <= 1e-6


def rates(**changes: float) -> list[float]:
    sizes: dict[str, Any] = {"steps_per_epoch": 5, "epochs": 4, "lr": 2.0, "end_lr": 0.5, "warmup_epochs": 1.0}
    sizes |= changes
    return [learning_rate(step, **sizes) for step in range(sizes["steps_per_epoch"] * sizes["epochs"] + 3)]


def test_warm_up_is_linear_and_ends_at_lr() -> None:
    assert rates()[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], rel=1e-12)


def test_decay_is_linear_and_reaches_end_lr_when_training_ends() -> None:
    expected = [2.0 - 1.5 * step / 15 for step in range(16)]
    assert rates()[5:21] == pytest.approx(expected, rel=1e-12)
    assert rates()[20:] == [0.5, 0.5, 0.5]


def test_no_warm_up_begins_at_lr_and_warm_up_alone_never_decays() -> None:
    assert rates(warmup_epochs=0.0)[0] == 2.0
    assert rates(warmup_epochs=9.0)[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)], rel=1e-12)
    assert rates(warmup_epochs=0.5)[:2] == pytest.approx([1.0, 2.0], rel=1e-12)
