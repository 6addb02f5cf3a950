"""Context parallelism without a ring: keys and values of all ranks are gathered at once.

Where a sequence is short, a ring of cp - 1 hops waits for latency alone; one collective each way waits once. The
result is the ring's, bit for bit in the forward: blocks are visited in the same order and merged in the same way.
The price is memory: all cp blocks of K/V, and of dK/dV in the backward, are here at once.

Legend: P context ranks, B sequences, R rows of this rank, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.parallel.collectives import all_gather
from megagraph_cli.parallel.context import Ring, RingCall, merge, pack, unpack


def gather_blocks(ring: Ring, own: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, its block), own block first, while the blocks of the others are on their way.

    ``own`` is used up: no block may be looked at when the last was visited.
    """
    blocks = own.new_empty((ring.size * own.shape[0], *own.shape[1:]))
    work = all_gather(blocks, own, ring.group, async_op=True)
    yield ring.rank, own
    assert work is not None
    work.wait()
    for hop in range(1, ring.size):
        owner = (ring.rank - hop) % ring.size
        yield owner, blocks.view(ring.size, *own.shape)[owner]
    _let_go(own, blocks)


def _let_go(*tensors: Tensor) -> None:
    """Free what was sent and received here and now: gloo's threads hold on to a collective's tensors for a while."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def scatter_sum(ring: Ring, blocks: Tensor) -> Tensor:
    """This rank's block of the sum over all ranks of ``blocks`` [P, ...].

    ``blocks`` is used up. An all-to-all and a sum rather than a reduce-scatter: the same bytes on the wire, which gloo
    would double, and a sum in the order of the ranks.
    """
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=ring.group)
    total = received.sum(dim=0)
    _let_go(received, blocks)
    return total


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, channel: Tensor, offset: Tensor, token: Tensor, call: RingCall
    ) -> Tensor:
        weights = call.weights(channel, offset, token)
        out: Tensor | None = None
        lse: Tensor | None = None
        for owner, block in gather_blocks(call.ring, pack(k, v)):
            part, part_lse = call.kernel.forward(q, *unpack(block), call.block(owner), weights)
            if out is None or lse is None:
                out, lse = part, part_lse
            else:
                out, lse = merge(out, lse, part, part_lse)
        assert out is not None
        assert lse is not None
        out = out.to(v.dtype)
        # K/V of the others are gathered again in the backward: kept, they would cost cp blocks in every layer.
        ctx.save_for_backward(q, k, v, out, lse, channel, offset, token)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, channel, offset, token = ctx.saved_tensors
        call: RingCall = ctx.call
        weights = call.weights(channel, offset, token)
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        local: list[Tensor] = []
        kv_grads: Tensor | None = None
        for owner, block in gather_blocks(call.ring, pack(k, v)):
            grads = call.kernel.backward(grad_out, delta, lse, q, *unpack(block), call.block(owner), weights)
            mine = [grads.q, grads.channel, grads.offset, grads.token]
            local = [a + b for a, b in zip(local, mine, strict=True)] if local else mine
            if kv_grads is None:
                kv_grads = block.new_empty((call.ring.size, *block.shape), dtype=lse.dtype)
            for into, each in zip(unpack(kv_grads[owner]), (grads.k, grads.v), strict=True):
                into.copy_(each)
        assert kv_grads is not None
        grad_k, grad_v = unpack(scatter_sum(call.ring, kv_grads))
        like = (q, k, v, channel, offset, token)
        full = (local[0], grad_k, grad_v, local[1], local[2], local[3])
        return (*(grad.to(tensor.dtype) for grad, tensor in zip(full, like, strict=True)), None)


def allgather_attention(
    q: Tensor, k: Tensor, v: Tensor, weights: tuple[Tensor, Tensor, Tensor], call: RingCall
) -> Tensor:
    """Biased attention of this rank's rows over the rows of all ranks: [H, B, R, E]; see ``ring_attention``."""
    out: Tensor = _AllGatherAttention.apply(q, k, v, *weights, call)  # type: ignore[no-untyped-call]
    return out
