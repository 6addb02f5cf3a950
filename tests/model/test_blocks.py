"""One layer against its formula spelled out, the target-only form against the whole, and dropout's keys."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import LocalAttend
from megagraph_cli.model.bias import AttentionBias
from megagraph_cli.model.blocks import Layer, LayerShape
from tests.model.dense_attend import DenseAttend
from tests.model.small import layer_shape, make_bias

# float64; chains of sums of at most 12 terms of size about 1 through one layer.
TOLERANCE = 1e-12
LAYOUT = RowLayout(6, 2, 2)


def make_layer(shape: LayerShape, index: int = 0) -> Layer:
    layer = Layer(shape, LocalAttend(), index).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    return layer


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def token_bias(token_GM: Tensor) -> Tensor:
    """[M, S, S]: a token's vector on its row and column, the mean of two where two tokens meet."""
    rows, begin = LAYOUT.sequence_rows, LAYOUT.num_sampled + LAYOUT.num_super
    out = token_GM.new_zeros((token_GM.shape[1], rows, rows))
    for i in range(rows):
        for j in range(rows):
            ends = [end - begin for end in (i, j) if end >= begin]
            for end in ends:
                out[:, i, j] = out[:, i, j] + token_GM[end] / len(ends)
    return out


def spelled_out(layer: Layer, x: Tensor, bias: AttentionBias, token_GM: Tensor) -> Tensor:
    """y = LN(h); h += W_o softmax(q k^T / sqrt(E) + W_bias^T features + b_bias) v; h += W_2 GELU(W_1 LN(h))."""
    attention = layer.attention
    d, heads = attention.qkv.in_features, attention.num_heads
    y = norm(x, layer.norm1.weight, layer.norm1.bias)
    q, k, v = ((y @ attention.qkv.weight.T + attention.qkv.bias)[..., i * d : (i + 1) * d] for i in range(3))
    channels = bias.features[0] + token_bias(token_GM).unsqueeze(1)
    parts = []
    for head in range(heads):
        columns = slice(head, None, heads)
        logits = q[..., columns] @ k[..., columns].transpose(-1, -2) / math.sqrt(d / heads)
        logits = logits + torch.einsum("mbrc,m->brc", channels, attention.bias_weight[:, head])
        logits = logits + attention.bias_offset[head]
        logits = logits.masked_fill(bias.padded_keys[0].unsqueeze(1), -torch.inf)
        parts.append(torch.softmax(logits, -1) @ v[..., columns])
    x = x + torch.stack(parts, -1).flatten(-2) @ attention.out.weight.T + attention.out.bias
    hidden = norm(x, layer.norm2.weight, layer.norm2.bias) @ layer.up.weight.T + layer.up.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return x + hidden @ layer.down.weight.T + layer.down.bias


def results(layer: Layer, x: Tensor, token_GM: Tensor, out: Tensor) -> list[Tensor]:
    """[out, gradients of x, of the tokens' channels and of every parameter] under a fixed gradient of out."""
    leaves = [x, token_GM, *layer.parameters()]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def worst(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


def test_a_layer_is_its_formula() -> None:
    layer, bias = make_layer(layer_shape()), make_bias(LAYOUT)
    x, token_GM = random(3, LAYOUT.sequence_rows, 8), random(2, 3)
    got = results(layer, x, token_GM, layer(x, bias, token_GM))
    assert worst(got, results(layer, x, token_GM, spelled_out(layer, x, bias, token_GM))) <= TOLERANCE


def test_the_target_only_layer_is_the_first_row_of_the_whole() -> None:
    layer, bias = make_layer(layer_shape()), make_bias(LAYOUT)
    x, token_GM = random(3, LAYOUT.sequence_rows, 8), random(2, 3)
    got = results(layer, x, token_GM, layer.target(x, bias, token_GM))
    assert got[0].shape == (3, 1, 8)
    assert worst(got, results(layer, x, token_GM, layer(x, bias, token_GM)[:, :1])) <= TOLERANCE


def test_a_layer_without_global_tokens() -> None:
    layout = RowLayout(5, 1, 0)
    layer, bias = make_layer(layer_shape()), make_bias(layout)
    x, token_GM = random(3, layout.sequence_rows, 8), random(0, 3)
    dense = make_layer(layer_shape())
    dense.attention.attend = DenseAttend()
    assert float((layer(x, bias, token_GM) - dense(x, bias, token_GM)).detach().abs().max()) <= TOLERANCE


def test_what_a_padded_row_holds_reaches_no_other_row() -> None:
    layer, bias = make_layer(layer_shape()), make_bias(LAYOUT)
    padded = bias.padded_keys[0]
    assert bool(padded.any())
    x, token_GM = random(3, LAYOUT.sequence_rows, 8).detach(), random(2, 3)
    other = torch.where(padded.unsqueeze(-1), x + 100, x)
    assert torch.equal(layer(x, bias, token_GM)[~padded], layer(other, bias, token_GM)[~padded])


def drops(index: int, seed: int, *, training: bool = True) -> Tensor:
    layer = make_layer(layer_shape(attention_dropout=0.5), index).train(training)
    bias = replace(make_bias(LAYOUT), drop_seed=seed)
    out: Tensor = layer(random(3, LAYOUT.sequence_rows, 8), bias, random(2, 3))
    return out.detach()


def test_attention_dropout_is_keyed_by_micro_batch_and_layer() -> None:
    assert torch.equal(drops(0, 1), drops(0, 1))
    assert not torch.equal(drops(0, 1), drops(0, 2))
    assert not torch.equal(drops(0, 1), drops(1, 1))
    assert torch.equal(drops(0, 1, training=False), drops(1, 2, training=False))


@pytest.mark.parametrize("kind", ["forward", "target"])
def test_attention_dropout_keeps_its_masks_from_forward_to_backward(kind: str) -> None:
    """The recomputed backward is the gradient of this forward: against autograd through stored scores."""
    bias = replace(make_bias(LAYOUT), drop_seed=5)
    x, token_GM = random(3, LAYOUT.sequence_rows, 8), random(2, 3)
    found = []
    for attend in (LocalAttend(), DenseAttend()):
        layer = make_layer(layer_shape(attention_dropout=0.4)).train()
        layer.attention.attend = attend
        found.append(results(layer, x, token_GM, getattr(layer, kind)(x, bias, token_GM)))
    assert worst(*found) <= TOLERANCE
