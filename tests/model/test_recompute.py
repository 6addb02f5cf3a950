"""Layers that run again in the backward: the same gradients, dropout included, and only their inputs kept."""

from __future__ import annotations

import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.transformer import Stage
from tests.model.small import gradients_of, layer_shape, make_bias, make_inputs, make_stage, model_shape

LAYOUT = RowLayout(6, 1, 2)


def stage(*, recompute: bool, dropout: float) -> Stage:
    shape = model_shape(layer=layer_shape(dropout=dropout, attention_dropout=dropout), input_dropout=dropout)
    made = make_stage(shape, range(5)).train()
    made.recompute = recompute
    return made


def step(made: Stage) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of two micro-batches whose backwards come after both forwards."""
    torch.manual_seed(5)
    outs = [made(make_inputs(LAYOUT, 9, 7, seed=seed), make_bias(LAYOUT, drop_seed=seed)) for seed in (1, 2)]
    for out in outs:
        out.square().sum().backward()
    return torch.cat(outs).detach(), gradients_of([made])


def test_gradients_are_those_of_layers_that_keep_everything() -> None:
    for dropout in (0.0, 0.3):
        plain, expected = step(stage(recompute=False, dropout=dropout))
        again, got = step(stage(recompute=True, dropout=dropout))
        assert torch.equal(plain, again)
        for name, gradient in expected.items():
            assert torch.equal(got[name], gradient), (name, dropout)
    assert float(expected["layers.2.up.weight"].abs().max()) > 1e-3


def kept_bytes(made: Stage) -> int:
    """Bytes that autograd holds between forward and backward, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in own:
            held[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = torch.zeros(3, LAYOUT.sequence_rows, 8, dtype=torch.float64, requires_grad=True)
        made(x, make_bias(LAYOUT))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def test_a_layer_keeps_nothing_but_its_input() -> None:
    made = make_stage(model_shape(), range(1, 4))
    plain = kept_bytes(made)
    made.recompute = True
    x_bytes = 3 * LAYOUT.sequence_rows * 8 * 8
    assert kept_bytes(made) == 3 * x_bytes  # one input for each of three layers
    assert plain > 10 * 3 * x_bytes


def test_inference_runs_each_layer_once() -> None:
    made = stage(recompute=True, dropout=0.0).eval()
    with torch.no_grad():
        out = made(make_inputs(LAYOUT, 9, 7), make_bias(LAYOUT))
    assert not out.requires_grad
