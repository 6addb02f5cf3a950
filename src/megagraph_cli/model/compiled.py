"""The compiled block kernel behind the interface of the plain one: tensors outside, addresses and threads inside.

Legend: B sequences, R rows, C columns, H heads, E head dim, M channels, G tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megagraph_cli.model import kernels, tiles
from megagraph_cli.model.block import BiasWeights, Block, BlockGrads, statistics_dtype
from megagraph_cli.model.drop import Drop, sequence_keys
from megagraph_cli.model.threads import run

_LANES = 8
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
        frame = call.frame(out=out, lse=lse, delta=torch.empty_like(lse))
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
        frame = call.frame(grad=call.inside(grad_out), lse=call.inside(lse), delta=call.inside(delta), grad_q=grad_q)
        parts = len(call.parts)
        # Parts that share sequences write copies of their own; nobody writes padded columns.
        copies = 1 if call.whole_sequences else parts
        grad_kv = call.new(copies, 2, call.batch, call.columns, call.head_dim).zero_()
        channel, token = call.learned(parts)

        pieces = []
        for number, part in enumerate(call.parts):
            mine = grad_kv[number % copies]
            into = (mine[0], mine[1], channel[number], token[number])
            pieces.append((*part, *map(Tensor.data_ptr, into)))
        run("backward", call.dtype, call.kept, frame, pieces, parts)
        grad_k, grad_v = grad_kv[0] if copies == 1 else grad_kv.sum(0)
        return BlockGrads(
            q=call.outside(grad_q),
            k=call.outside(grad_k),
            v=call.outside(grad_v),
            channel=call.ungrouped(channel.sum(0)),
            offset=channel.new_zeros(call.heads),
            token=call.ungrouped(token.sum(0)),
        )


class _Call:
    """One call's tensors in the form that the kernels read: heads innermost, in groups of eight."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, block: Block, weights: BiasWeights) -> None:
        self.heads, self.batch, self.rows, self.head_dim = q.shape
        self.columns = k.shape[2]
        self.dtype = statistics_dtype(q.dtype)
        self.lanes = -(-self.heads // _LANES) * _LANES
        self.kept = block.drop.kept if block.drop else 1.0
        self._q, self._k, self._v = self.inside(q), self.inside(k), self.inside(v)
        self._block = block
        self._features = block.features.to(self.dtype).movedim(0, -1)
        if self._features.stride(-1) != 1:
            self._features = self._features.contiguous()
        self._padded = block.padded_keys.contiguous()
        self._channel, self._token = (self._grouped(x.to(self.dtype)) * tiles.LOG2E for x in weights[::2])
        self._keys = None if block.drop is None else sequence_keys(block.drop, np.arange(self.batch))
        self.whole_sequences, self.parts = self._parts()

    def _parts(self) -> tuple[bool, list[tuple[int, int, int, int]]]:
        """Ranges of sequences and rows for the threads: whole sequences, or rows where there are too few of them."""
        pairs = self.batch * self.rows * self.columns * self.lanes // _LANES
        threads = max(1, min(torch.get_num_threads(), pairs // _PAIRS_PER_THREAD))
        if self.batch % threads == 0 or self.batch >= 8 * threads:
            return True, [(*part, 0, self.rows) for part in cut(self.batch, threads)]
        return False, [(0, self.batch, *part) for part in cut(self.rows, min(threads, self.rows))]

    def _pad(self, x: Tensor) -> Tensor:
        """Zeros to whole groups of heads in the last dim, which becomes contiguous."""
        if self.lanes != self.heads:
            x = functional.pad(x, (0, self.lanes - self.heads))
        return x if x.stride(-1) == 1 else x.contiguous()

    def _grouped(self, x_XH: Tensor) -> Tensor:
        """[X, H] -> [H/8, X, 8]."""
        return self._pad(x_XH).view(-1, self.lanes // _LANES, _LANES).transpose(0, 1).contiguous()

    def ungrouped(self, x: Tensor) -> Tensor:
        """[H/8, X, 8] -> [X, H]."""
        return x.transpose(0, 1).flatten(1)[:, : self.heads]

    def inside(self, x: Tensor) -> Tensor:
        """[H, ...] -> [..., H]: a view where heads already lie innermost."""
        return self._pad(x.to(self.dtype).movedim(0, -1))

    def outside(self, x: Tensor) -> Tensor:
        """[..., H] -> [H, ...]."""
        return x[..., : self.heads].movedim(-1, 0)

    def new(self, *shape: int) -> Tensor:
        return torch.empty(*shape, self.lanes, dtype=self.dtype)

    def learned(self, parts: int) -> tuple[Tensor, Tensor]:
        """Zeros for the gradients of channel and token weights, one copy for each part."""
        return self._channel.new_zeros(parts, *self._channel.shape), self._token.new_zeros(parts, *self._token.shape)

    def frame(
        self,
        *,
        lse: Tensor,
        delta: Tensor,
        out: Tensor | None = None,
        grad: Tensor | None = None,
        grad_q: Tensor | None = None,
    ) -> kernels.Frame:
        """Addresses and strides; what they point to must outlive the kernel's run."""
        block, drop = self._block, self._block.drop
        lse, delta = lse.contiguous(), delta.contiguous()
        self._alive = (lse, delta, out, grad, grad_q)
        features = self._strides(self._features)[:3]
        fields = [
            self.batch,
            self.rows,
            self.columns,
            self.lanes,
            self.head_dim,
            self._channel.shape[1],
            self._token.shape[1],
            *self._place(self._q),
            *self._place(self._k),
            *self._place(self._v),
            *(self._place(grad) if grad is not None else (0, 0, 0, 0)),
            self._features.data_ptr(),
            *features,
            self._padded.data_ptr(),
            0 if out is None else out.data_ptr(),
            lse.data_ptr(),
            delta.data_ptr(),
            0 if grad_q is None else grad_q.data_ptr(),
            self._channel.data_ptr(),
            self._token.data_ptr(),
            *(block.row_tokens.start, block.row_tokens.stop, block.row_tokens.first),
            *(block.column_tokens.start, block.column_tokens.stop, block.column_tokens.first),
            0 if self._keys is None else self._keys.ctypes.data,
            0 if drop is None else drop.dropped - 2**31,
            block.first_row,
            block.first_column,
        ]
        return kernels.Frame(*fields)

    def _strides(self, x: Tensor) -> list[int]:
        return [stride * x.element_size() for stride in x.stride()]

    def _place(self, x_BREH: Tensor) -> tuple[int, int, int, int]:
        batch, row, element, _ = self._strides(x_BREH)
        return x_BREH.data_ptr(), batch, row, element
