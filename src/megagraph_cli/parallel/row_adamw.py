"""AdamW for the rows of a table that a step touched; the others, and their moments, stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megagraph_cli.layout.pieces import num_pieces
from megagraph_cli.parallel.table import TouchedRows


class RowAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) row by row.

    Each row counts its own updates for the bias correction, and decays only when it is updated. A row that every step
    touches moves exactly as under dense AdamW; dense AdamW would also decay all other rows, and move them by what is
    left of their momentum. ``exp_avg`` and ``exp_avg_sq`` [U, D], ``row_steps`` int32 [U].
    """

    def __init__(
        self,
        table: nn.Parameter,
        *,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.table = table
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self.exp_avg = torch.zeros_like(table, requires_grad=False)
        self.exp_avg_sq = torch.zeros_like(table, requires_grad=False)
        self.row_steps = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name; the tensors themselves."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "row_steps": self.row_steps}

    @torch.no_grad()
    def step(self, touched: TouchedRows, lr: float, pieces: int | None = None) -> None:
        """Update the touched rows; at least one slot is in use, no slot's row twice.

        Beside the rows of a piece stand four copies: its gradient, both moments and its rows of the table. ``pieces``:
        how many, at most as many as slots are in use; as the device has it unless said.
        """
        slots, dim = touched.rows.shape
        if pieces is None:
            pieces = num_pieces(slots, dim, touched.in_use, self.table.device.type)
        for first in range(pieces):
            self._update(touched.ids[first::pieces], touched.rows[first::pieces], lr)

    def _update(self, ids: Tensor, grad: Tensor, lr: float) -> None:
        ids, grad = _filled(ids, grad, self.table.shape[0])
        beta1, beta2 = self.betas
        steps = self.row_steps.index_select(0, ids).add_(1)
        mean = self.exp_avg.index_select(0, ids).lerp_(grad, 1 - beta1)
        square = self.exp_avg_sq.index_select(0, ids).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        self.row_steps.index_copy_(0, ids, steps)
        self.exp_avg.index_copy_(0, ids, mean)
        self.exp_avg_sq.index_copy_(0, ids, square)
        # In float64 whatever the table: 1 - beta2^t loses half its digits in float32 at the first steps.
        exponent = steps.double().unsqueeze(-1)
        mean_correction = (1 - beta1**exponent).to(grad.dtype)
        square_correction = (1 - beta2**exponent).sqrt_().to(grad.dtype)
        change = mean.div_(mean_correction).div_(square.sqrt_().div_(square_correction).add_(self.eps))
        rows = self.table.index_select(0, ids).mul_(1 - lr * self.weight_decay)
        self.table.index_copy_(0, ids, rows.sub_(change, alpha=lr))


def _filled(ids: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(ids, rows) in which unused slots repeat the first, so that writing them writes the same numbers again."""
    places = torch.arange(ids.numel(), device=ids.device)
    pick = torch.where(ids < num_rows, places, 0)
    return ids.index_select(0, pick), rows.index_select(0, pick)
