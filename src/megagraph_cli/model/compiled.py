"""The compiled block kernel behind the interface of the plain one: tensors outside, addresses and threads inside.

Legend: B sequences, R rows, C columns, H heads, E head dim, M channels, G tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megagraph_cli.layout.heads import LANES, padded_heads
from megagraph_cli.model import kernels, tiles
from megagraph_cli.model.block import BiasWeights, Block, BlockGrads, statistics_dtype
from megagraph_cli.model.drop import Drop, sequence_keys
from megagraph_cli.model.threads import run

_PAIRS_PER_THREAD = 16384
"""(row, column) pairs below which another thread costs more than it saves: some 0.3 ms of work."""

_NUMBERS_PER_THREAD = 200_000


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """[0, size) in consecutive ranges of nearly equal length."""
    ends = [size * part // parts for part in range(parts + 1)]
    return list(pairwise(ends))


def drop_rows(x_BRD: Tensor, drop: Drop, residual: Tensor | None) -> Tensor:
    """residual + x with some of its elements dropped and the others scaled; D is a multiple of eight."""
    batch, rows, size = x_BRD.shape
    out = torch.empty(x_BRD.shape, dtype=x_BRD.dtype)
    x = x_BRD.contiguous()
    added = None if residual is None else residual.contiguous()
    keys = sequence_keys(drop, np.arange(batch))
    addresses = (x.data_ptr(), 0 if added is None else added.data_ptr(), out.data_ptr(), keys.ctypes.data)
    shape = (rows, size, drop.first_row, drop.dropped - 2**31)
    parts = cut(batch, max(1, min(torch.get_num_threads(), x.numel() // _NUMBERS_PER_THREAD)))
    run("drop_rows", x_BRD.dtype, drop.kept, (*addresses, *shape), parts, len(parts))
    return out


class CompiledKernel:
    """Forward and backward of one block on a CPU. q, k and v whose heads lie innermost in memory are not copied."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> tuple[Tensor, Tensor]:
        """Normalised output of this block alone [H, B, R, E] and its log-sum-exp [H, B, R]."""
        call = _Call(q, k, v, block, weights)
        out, lse = call.new(call.batch, call.rows, call.head_dim), call.new(call.batch, call.rows)
        delta = torch.empty_like(lse)
        frame = call.frame(out=out.data_ptr(), lse=lse.data_ptr(), delta=delta.data_ptr())
        run("forward", call.dtype, call.kept, frame, call.parts, len(call.parts))
        return call.outside(out), call.outside(lse)

    def backward(
        self,
        grad_out: Tensor,
        delta: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: Block,
        weights: BiasWeights,
    ) -> BlockGrads:
        """Gradients of one block from the final statistics."""
        call = _Call(q, k, v, block, weights)
        grad_q = call.new(call.batch, call.rows, call.head_dim)
        frame = call.frame(
            grad=call.place(grad_out),
            lse=call.statistics(lse),
            delta=call.statistics(delta),
            grad_q=grad_q.data_ptr(),
        )
        parts = len(call.parts)
        # Parts that share sequences write copies of their own; nobody writes padded columns.
        copies = 1 if call.whole_sequences else parts
        grad_kv = call.zeros(copies, 2, call.batch, call.columns, call.head_dim, call.lanes)
        learned = call.zeros(parts, call.channels + call.tokens, call.lanes)

        pieces = []
        half, ours = call.bytes(grad_kv.stride(1)), call.bytes(learned.stride(0))
        for number, part in enumerate(call.parts):
            to_k = grad_kv.data_ptr() + number % copies * 2 * half
            channel = learned.data_ptr() + number * ours
            pieces.append((*part, to_k, to_k + half, channel, channel + call.bytes(call.channels * call.lanes)))
        run("backward", call.dtype, call.kept, frame, pieces, parts)
        grad_k, grad_v = (grad_kv[0] if copies == 1 else grad_kv.sum(0)).unbind()
        channels, tokens = torch.split(learned[0] if parts == 1 else learned.sum(0), [call.channels, call.tokens])
        return BlockGrads(
            q=call.outside(grad_q),
            k=call.outside(grad_k),
            v=call.outside(grad_v),
            channel=call.ungrouped(channels),
            offset=call.zeros(call.heads),
            token=call.ungrouped(tokens),
        )


class _Call:
    """One call's tensors as addresses and strides: heads innermost, in groups of eight.

    What lies as the kernels read it is taken as it is, without so much as a view: with short sequences a call's time
    is the time to set it up. Whatever had to be copied lives as long as this object.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> None:
        self.heads, self.batch, self.rows, self.head_dim = q.shape
        self.columns = k.shape[2]
        self.channels, self.tokens = weights.channel.shape[0], weights.token.shape[0]
        self.dtype = statistics_dtype(q.dtype)
        self.lanes = padded_heads(self.heads)
        self.kept = block.drop.kept if block.drop else 1.0
        self._alive: list[object] = []
        self._block = block
        self._qkv = (*self.place(q), *self.place(k), *self.place(v))
        self._learned = [self._grouped(each) for each in (weights.channel, weights.token)]
        self.whole_sequences, self.parts = self._parts()

    def _parts(self) -> tuple[bool, list[tuple[int, int, int, int]]]:
        """Ranges of sequences and rows for the threads: whole sequences, or rows where there are too few of them."""
        pairs = self.batch * self.rows * self.columns * self.lanes // LANES
        threads = max(1, min(torch.get_num_threads(), pairs // _PAIRS_PER_THREAD))
        if self.batch % threads == 0 or self.batch >= 8 * threads:
            return True, [(*part, 0, self.rows) for part in cut(self.batch, threads)]
        return False, [(0, self.batch, *part) for part in cut(self.rows, min(threads, self.rows))]

    def new(self, *shape: int) -> Tensor:
        return torch.empty(*shape, self.lanes, dtype=self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def place(self, x_HBRE: Tensor) -> tuple[int, int, int, int]:
        """Address, and strides over B, R and E, of a tensor with its heads innermost."""
        x = x_HBRE
        if x.dtype != self.dtype or x.stride(0) != 1 or self.lanes != self.heads:
            x = self._inside(x)
        self._alive.append(x)
        _, batch, row, element = x.stride()
        return x.data_ptr(), self.bytes(batch), self.bytes(row), self.bytes(element)

    def statistics(self, x_HBR: Tensor) -> int:
        """Address of a tensor that lies as [B, R, H]."""
        x = x_HBR
        if x.dtype != self.dtype or x.stride() != (1, self.rows * self.lanes, self.lanes) or self.lanes != self.heads:
            x = self._inside(x).movedim(0, -1).contiguous()
        self._alive.append(x)
        return x.data_ptr()

    def _inside(self, x: Tensor) -> Tensor:
        """[H, ...] -> the same shape, with zeros to whole groups of heads, heads innermost in memory."""
        x = x.to(self.dtype).movedim(0, -1)
        if self.lanes != self.heads:
            x = functional.pad(x, (0, self.lanes - self.heads))
        return x.contiguous().movedim(-1, 0)

    def outside(self, x: Tensor) -> Tensor:
        """[..., H] -> [H, ...]."""
        return (x if self.lanes == self.heads else x[..., : self.heads]).movedim(-1, 0)

    def _grouped(self, x_XH: Tensor) -> int:
        """Address of [X, H] in base 2 as [H/8, X, 8]."""
        x = x_XH.to(self.dtype) * tiles.LOG2E
        if self.lanes != self.heads:
            x = functional.pad(x, (0, self.lanes - self.heads))
        if self.lanes != LANES:
            x = x.view(-1, self.lanes // LANES, LANES).transpose(0, 1)
        x = x.contiguous()
        self._alive.append(x)
        return x.data_ptr()

    def ungrouped(self, x: Tensor) -> Tensor:
        """[X, H] of a tensor that lies as [H/8, X, 8]."""
        if self.lanes != LANES:
            x = x.reshape(self.lanes // LANES, -1, LANES).transpose(0, 1).flatten(1)
        return x if self.lanes == self.heads else x[:, : self.heads]

    def _features(self) -> tuple[int, int, int, int]:
        """Address, and strides over B, R and C, of the block's channels, which lie side by side."""
        x = self._block.features
        if x.dtype != self.dtype or x.stride(0) != 1:
            x = x.to(self.dtype).movedim(0, -1).contiguous().movedim(-1, 0)
        self._alive.append(x)
        _, batch, row, column = x.stride()
        return x.data_ptr(), self.bytes(batch), self.bytes(row), self.bytes(column)

    def frame(
        self,
        *,
        lse: int,
        delta: int,
        out: int = 0,
        grad: tuple[int, int, int, int] = (0, 0, 0, 0),
        grad_q: int = 0,
    ) -> kernels.Frame:
        """Addresses and strides; what they point to must outlive the kernel's run."""
        block, drop = self._block, self._block.drop
        padded = block.padded_keys.contiguous()
        keys = None if drop is None else sequence_keys(drop, np.arange(self.batch))
        self._alive += [padded, keys]
        channel, token = self._learned
        return kernels.Frame(
            self.batch,
            self.rows,
            self.columns,
            self.lanes,
            self.head_dim,
            self.channels,
            self.tokens,
            *self._qkv,
            *grad,
            *self._features(),
            padded.data_ptr(),
            out,
            lse,
            delta,
            grad_q,
            channel,
            token,
            *(block.row_tokens.start, block.row_tokens.stop, block.row_tokens.first),
            *(block.column_tokens.start, block.column_tokens.stop, block.column_tokens.first),
            0 if keys is None else keys.ctypes.data,
            0 if drop is None else drop.dropped - 2**31,
            block.first_row,
            block.first_column,
        )
