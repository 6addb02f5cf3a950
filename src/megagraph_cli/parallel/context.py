"""Graph-aware context parallelism (GA-CP): rows of a sequence over the ranks of one axis, K/V blocks round a ring.

A rank keeps the bias of its own rows against all columns; at each hop it takes the columns of the visiting block's
owner and adds them to the scores before the softmax update, so the running maximum and sum see the biased score
(MegaGraph, "GA-CP"). The backward sends K/V round once more and recomputes the scores. The sum of a block's dK/dV
starts at the first rank that the block visits, follows it a hop behind, and ends at home; the owner adds its own share
there, half of which it computes while that last hop is under way (all of it, where there is one sequence or little to
compute).

Legend: B sequences, R rows of this rank, H heads, E head dim, M bias channels, G global tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.layout.halves import first_half

KV_TAG, GRAD_TAG = 0, 1
NOTHING = -1e30
"""Log-sum-exp over no keys: finite, so that it weighs nothing and yields no NaN."""


class Block(Protocol):
    """What a kernel reads besides q, k, v and weights, of some sequences: opaque, but for taking a part of them."""

    def sequences(self, start: int, stop: int) -> Block: ...


class Kernel(Protocol):
    """One block of biased attention: what the model's kernel offers, with ``block`` and ``weights`` opaque here."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Any, weights: Any) -> tuple[Tensor, Tensor]:
        """Normalised output [H, B, R, E] and log-sum-exp [H, B, R] of one block."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        delta: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: Any,
        weights: Any,
    ) -> Any:
        """Gradients named q, k, v, channel, offset, token of one block."""
        ...


@dataclass(frozen=True)
class Ring:
    """Neighbours on the context axis. ``rank`` and ``size`` are within ``group``."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def _next(self) -> int:
        return dist.get_global_rank(self.group, (self.rank + 1) % self.size)

    @property
    def _previous(self) -> int:
        return dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def exchange(self, outgoing: Tensor | None, incoming: Tensor | None, tag: int) -> list[dist.Work]:
        """Start one hop: ``outgoing`` to the next rank, ``incoming`` from the previous one; None is not sent."""
        if self.size == 1:
            if incoming is not None and outgoing is not None:
                incoming.copy_(outgoing)
            return []
        operations = []
        if outgoing is not None:
            operations.append(dist.P2POp(dist.isend, outgoing, self._next, self.group, tag))
        if incoming is not None:
            operations.append(dist.P2POp(dist.irecv, incoming, self._previous, self.group, tag))
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def owner(self, hop: int) -> int:
        """Whose block is here at a hop."""
        return (self.rank - hop) % self.size

    def visit(self, own: Tensor, empty: frozenset[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Yield (owner, its block), own block first, with the next hop in flight while the caller computes.

        ``own`` must be contiguous and is overwritten: it and one more buffer are all that travels. Blocks of owners in
        ``empty`` do not travel: None stands for them.
        """
        current, spare = own, torch.empty_like(own) if self.size > 1 else own
        for hop in range(self.size):
            here, following = self.owner(hop), self.owner(hop + 1)
            works: list[dist.Work] = []
            if hop + 1 < self.size:
                leaves, comes = here not in empty, following not in empty
                works = self.exchange(current if leaves else None, spare if comes else None, KV_TAG)
            yield here, None if here in empty else current
            wait_all(works)
            current, spare = spare, current


def wait_all(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def pack(k: Tensor, v: Tensor) -> Tensor:
    """k and v [H, B, R, E] in one contiguous buffer [2, B, R, E, H]: heads innermost, as kernels read them best."""
    buffer = k.new_empty((2, *k.shape[1:], k.shape[0]))
    for into, each in zip(unpack(buffer), (k, v), strict=True):
        into.copy_(each)
    return buffer


def unpack(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [H, B, R, E] as views of such a buffer."""
    k, v = buffer.movedim(-1, 1)
    return k, v


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial attentions over disjoint keys.

    With Z = exp(lse), the whole output is (Z1 out1 + Z2 out2) / (Z1 + Z2) = out1 exp(lse1 - lse) + out2
    exp(lse2 - lse), lse = log(Z1 + Z2).
    """
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp().unsqueeze(-1) + more_out * (more_lse - total).exp().unsqueeze(-1), total


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        channel: Tensor,
        offset: Tensor,
        token: Tensor,
        call: RingCall,
    ) -> Tensor:
        weights = call.weights(channel, offset, token)
        # A rank without real rows passes blocks on; what it would compute, nobody reads.
        idle = call.ring.rank in call.empty
        out: Tensor | None = None
        lse: Tensor | None = None
        for owner, block in call.ring.visit(pack(k, v), call.empty):
            if block is None or idle:
                continue
            part, part_lse = call.kernel.forward(q, *unpack(block), call.block(owner), weights)
            if out is None or lse is None:
                out, lse = part, part_lse
            else:
                out, lse = merge(out, lse, part, part_lse)
        if out is None or lse is None:
            stats = torch.float64 if q.dtype == torch.float64 else torch.float32
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], NOTHING, dtype=stats)
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, out, lse, channel, offset, token)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, channel, offset, token = ctx.saved_tensors
        call: RingCall = ctx.call
        ring, idle = call.ring, call.ring.rank in call.empty
        weights = call.weights(channel, offset, token)
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        # Heads innermost, as the kernel's own.
        grad_q = torch.zeros((*q.shape[1:], q.shape[0]), dtype=lse.dtype, device=q.device).movedim(-1, 0)
        learned = [torch.zeros_like(each, dtype=lse.dtype) for each in (channel, offset, token)]
        leaving, arriving = (k.new_empty((2, *k.shape[1:], k.shape[0]), dtype=lse.dtype) for _ in range(2))
        batch, rows = k.shape[1:3]

        def visit(keys: Tensor, values: Tensor, block: Block, part: slice) -> tuple[Tensor, Tensor]:
            """Add the gradients of this rank's rows of some sequences against a block; the block's dK and dV."""
            grads = call.kernel.backward(
                grad_out[:, part], delta[:, part], lse[:, part], q[:, part], keys, values, block, weights
            )
            grad_q[:, part] += grads.q
            for total, more in zip(learned, (grads.channel, grads.offset, grads.token), strict=True):
                total += more
            return grads.k, grads.v

        def visit_own(part: slice) -> tuple[Tensor, Tensor]:
            return visit(k[:, part], v[:, part], call.block(ring.rank).sequences(part.start, part.stop), part)

        half = first_half(batch, rows, torch.get_num_threads() if q.device.type == "cpu" else 1)
        parts = [] if idle else [slice(0, half), slice(half, batch)] if half < batch else [slice(0, batch)]
        own = []
        works: list[dist.Work] = []
        for hop, (owner, block) in enumerate(ring.visit(pack(k, v), call.empty)):
            if hop == 0:  # hides the first hop of K/V
                own += [visit_own(part) for part in parts[:-1]]
                continue
            grads = None if block is None or idle else visit(*unpack(block), call.block(owner), slice(0, batch))
            wait_all(works)
            leaving, arriving = arriving, leaving
            if grads is not None:
                for total, more in zip(unpack(leaving), grads, strict=True):
                    total.copy_(more) if hop == 1 else total.add_(more)
            elif hop == 1 and block is not None:
                leaving.zero_()
            grads = None  # what was added need not live through the next block
            comes = ring.owner(hop + 1) not in call.empty
            works = ring.exchange(None if block is None else leaving, arriving if comes else None, GRAD_TAG)
        block = None
        own += [visit_own(part) for part in parts[-1:]]  # hides the last hop of dK/dV
        wait_all(works)
        if idle or ring.size == 1:
            arriving.zero_()
        for part, grads in zip(parts, own, strict=True):
            for total, more in zip(unpack(arriving), grads, strict=True):
                total[:, part] += more
        like = (q, k, v, channel, offset, token)
        full = (grad_q, *unpack(arriving), *learned)
        return (*(grad.to(tensor.dtype) for grad, tensor in zip(full, like, strict=True)), None)


class _TargetAttention(torch.autograd.Function):
    """Row 0 as the only query: every rank attends from it to its own keys, partial results merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        channel: Tensor,
        offset: Tensor,
        token: Tensor,
        call: RingCall,
    ) -> Tensor:
        ring = call.ring
        q = q.clone(memory_format=torch.contiguous_format)
        dist.broadcast(q, group=ring.group, group_src=0)
        part, part_lse = call.kernel.forward(q, k, v, call.block(ring.rank), call.weights(channel, offset, token))
        packed = torch.cat((part, part_lse.unsqueeze(-1)), dim=-1)
        parts = [torch.empty_like(packed) for _ in range(ring.size)]
        dist.all_gather(parts, packed, group=ring.group)
        out, lse = parts[0][..., :-1], parts[0][..., -1]
        for other in parts[1:]:
            out, lse = merge(out, lse, other[..., :-1], other[..., -1])
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, out, lse, channel, offset, token)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, channel, offset, token = ctx.saved_tensors
        call: RingCall = ctx.call
        ring = call.ring
        # Only rank 0's copy of the row leads to the loss, so only its gradient counts.
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        dist.broadcast(grad_out, group=ring.group, group_src=0)
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        grads = call.kernel.backward(
            grad_out, delta, lse, q, k, v, call.block(ring.rank), call.weights(channel, offset, token)
        )
        grad_q = grads.q.to(q.dtype).contiguous()
        dist.all_reduce(grad_q, group=ring.group)
        if ring.rank != 0:
            grad_q = torch.zeros_like(grad_q)
        like = (q, k, v, channel, offset, token)
        full = (grad_q, grads.k, grads.v, grads.channel, grads.offset, grads.token)
        return (*(grad.to(tensor.dtype) for grad, tensor in zip(full, like, strict=True)), None)


@dataclass(frozen=True)
class RingCall:
    """What one attention call needs besides tensors: the ring, the kernel, and the model's block and weight makers.

    ``empty`` are the ranks that hold nothing but padding, the same on every rank: their blocks do not travel.
    """

    ring: Ring
    kernel: Kernel
    block: Callable[[int], Block]
    weights: Callable[[Tensor, Tensor, Tensor], Any]
    empty: frozenset[int] = frozenset()


def ring_attention(q: Tensor, k: Tensor, v: Tensor, weights: tuple[Tensor, Tensor, Tensor], call: RingCall) -> Tensor:
    """Biased attention of this rank's rows over the rows of all ranks of the ring: [H, B, R, E].

    ``weights`` = (channel [M, H], offset [H], token [G, H]); gradients of all six tensors are this rank's share.
    """
    out: Tensor = _RingAttention.apply(q, k, v, *weights, call)  # type: ignore[no-untyped-call]
    return out


def ring_target_attention(
    q: Tensor, k: Tensor, v: Tensor, weights: tuple[Tensor, Tensor, Tensor], call: RingCall
) -> Tensor:
    """Attention of row 0 over the rows of all ranks: [H, B, 1, E], the same on each; q counts on rank 0 only."""
    out: Tensor = _TargetAttention.apply(q, k, v, *weights, call)  # type: ignore[no-untyped-call]
    return out


ContextAttention = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], RingCall], Tensor]
"""What ``ring_attention`` is one of: (q, k, v, weights, call) -> outputs of this rank's rows."""
