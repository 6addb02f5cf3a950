"""Biased attention, forward and backward, beside plain PyTorch in the same run: time ratios and peak memory.

    python bench/attention.py [--threads 1,2] [--shapes 256x17,128x64,8x512,1x2048] [--rounds 9]

Both peers compute the same function in float32 with a 6-channel learned bias, 8 heads of 8: `dense` is softmax of
stored scores; `sdpa` is torch's scaled_dot_product_attention with the bias as a mask that needs a gradient. The
channels lie as each can read them fastest. Calls alternate; the ratio is the better peer's median time over ours.
Bytes are the peak of live tensors during the call beyond inputs, output and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megagraph_cli.model.attention import BiasWeights, Drop, LocalAttend
from megagraph_cli.model.bias import AttentionBias, TokenRows
from megagraph_cli.runtime.meters import metered

HEADS, HEAD_DIM, CHANNELS = 8, 8, 6
DROPOUT = 0.1


@dataclass(frozen=True)
class Inputs:
    """q, k, v [H, B, S, E] that lie as [B, S, E, H]; the peers get contiguous copies.

    Each is dense in its own layout: of leaves that are not, autograd copies the gradient once more.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: AttentionBias
    weights: BiasWeights
    grad: Tensor


def make_inputs(batch: int, rows: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, batch, rows, HEAD_DIM, HEADS, generator=generator)
    q, k, v = (each.permute(3, 0, 1, 2).detach().requires_grad_() for each in qkv)
    features = torch.rand(CHANNELS, batch, rows, rows, generator=generator)
    bias = AttentionBias(
        features=features.add_(features.transpose(-1, -2).clone())
        .permute(1, 2, 3, 0)
        .contiguous()
        .permute(3, 0, 1, 2)
        .unsqueeze(0),
        padded_keys=torch.zeros(1, batch, rows, dtype=torch.bool),
        tokens=(TokenRows(0, 0, 0),),
        cp_rank=0,
    )
    weights = BiasWeights(
        torch.randn(CHANNELS, HEADS, generator=generator).requires_grad_(),
        torch.zeros(HEADS, requires_grad=True),
        torch.zeros(0, HEADS, requires_grad=True),
    )
    return Inputs(q, k, v, bias, weights, torch.randn(batch, rows, HEAD_DIM, HEADS, generator=generator))


def learned_bias(inputs: Inputs, channel: Tensor, offset: Tensor) -> Tensor:
    """[H, B, S, S]: one product of [H, M] with all channels."""
    features = inputs.bias.features[0]
    flat = torch.addmm(offset.unsqueeze(-1), channel.T, features.view(CHANNELS, -1))
    return flat.view(HEADS, *features.shape[1:])


def dense(inputs: Inputs, leaves: Sequence[Tensor], dropout: float) -> Tensor:
    q, k, v, channel, offset = leaves
    scores = (q * HEAD_DIM**-0.5) @ k.transpose(-1, -2) + learned_bias(inputs, channel, offset)
    return functional.dropout(torch.softmax(scores, dim=-1), dropout) @ v


def sdpa(inputs: Inputs, leaves: Sequence[Tensor], dropout: float) -> Tensor:
    q, k, v, channel, offset = leaves
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=learned_bias(inputs, channel, offset), dropout_p=dropout
    )


def ours(inputs: Inputs, leaves: Sequence[Tensor], dropout: float) -> Tensor:
    q, k, v, channel, offset = leaves
    drop = Drop(dropout, 7) if dropout else None
    return LocalAttend()(q, k, v, inputs.bias, BiasWeights(channel, offset, inputs.weights.token), drop)


Attention = Callable[[Inputs, Sequence[Tensor], float], Tensor]
METHODS: dict[str, Attention] = {"ours": ours, "dense": dense, "sdpa": sdpa}


def leaves_of(inputs: Inputs, name: str) -> list[Tensor]:
    """What a method reads, with no gradients yet."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.weights.channel, inputs.weights.offset)
    if name == "ours":
        return [t.detach().requires_grad_() for t in tensors]
    return [t.detach().contiguous().requires_grad_() for t in tensors]


def run_once(name: str, inputs: Inputs, leaves: Sequence[Tensor], grad: Tensor, dropout: float) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    out = METHODS[name](inputs, leaves, dropout)
    out.backward(grad)
    return out.detach()


def check_equal(inputs: Inputs) -> None:
    """All three compute the same output and gradients; float32 sums differ by rounding."""
    found = {}
    for name in METHODS:
        leaves = leaves_of(inputs, name)
        out = run_once(name, inputs, leaves, grad_of(inputs, name), 0.0)
        # The offset's gradient is zero by mathematics: only rounding is left to compare.
        found[name] = [out, *(leaf.grad for leaf in leaves[:4])]
    for name in ("ours", "sdpa"):
        for a, b in zip(found[name], found["dense"], strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())), name


def grad_of(inputs: Inputs, name: str) -> Tensor:
    grad = inputs.grad.permute(3, 0, 1, 2)
    return grad if name == "ours" else grad.contiguous()


def medians(inputs: Inputs, rounds: int, dropout: float) -> dict[str, float]:
    """Seconds of forward + backward by method, the methods taking turns."""
    leaves = {name: leaves_of(inputs, name) for name in METHODS}
    grads = {name: grad_of(inputs, name) for name in METHODS}
    samples: dict[str, list[float]] = {name: [] for name in METHODS}
    for number in range(rounds + 2):
        for name in METHODS:
            start = time.perf_counter()
            run_once(name, inputs, leaves[name], grads[name], dropout)
            if number >= 2:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in samples.items()}


def peak_bytes(name: str, inputs: Inputs) -> int:
    leaves, grad = leaves_of(inputs, name), grad_of(inputs, name)
    run_once(name, inputs, leaves, grad, 0.0)
    for leaf in leaves:
        leaf.grad = None
    with metered(torch.device("cpu"), from_zero=True) as reading:
        out = run_once(name, inputs, leaves, grad, 0.0)
    kept = out.nbytes + sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return reading.peak_bytes - kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default="256x17,128x64,8x512,1x2048")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print("threads  B x S      ours ms  dense ms  sdpa ms  ratio  dropout/none  ours MiB  dense MiB  dense/ours")
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for shape in arguments.shapes.split(","):
            batch, rows = map(int, shape.split("x"))
            inputs = make_inputs(batch, rows)
            check_equal(inputs)
            plain = medians(inputs, arguments.rounds, 0.0)
            dropped = medians(inputs, arguments.rounds, DROPOUT)
            mine, theirs = peak_bytes("ours", inputs), peak_bytes("dense", inputs)
            print(
                f"{threads:7}  {shape:9}  {plain['ours'] * 1e3:7.2f}  {plain['dense'] * 1e3:8.2f}  "
                f"{plain['sdpa'] * 1e3:7.2f}  {min(plain['dense'], plain['sdpa']) / plain['ours']:5.2f}  "
                f"{dropped['ours'] / plain['ours']:12.2f}  {mine / 2**20:8.2f}  {theirs / 2**20:9.2f}  "
                f"{theirs / max(1, mine):10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
