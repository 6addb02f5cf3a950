"""Row by row AdamW: dense AdamW where every row is touched, nothing at all where none is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megagraph_cli.layout import pieces
from megagraph_cli.parallel.row_adamw import RowAdamW
from megagraph_cli.parallel.table import TouchedRows

ROWS, DIM, LR, DECAY = 7, 3, 0.05, 0.1
# float64: a few operations on numbers of size one.
TOLERANCE = 1e-14


def table() -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64))


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64) for _ in range(steps)]


def dense_rows(updates: list[list[int]], grads: list[Tensor]) -> Tensor:
    """Each row by a dense AdamW of its own that sees only the steps in which the row was touched."""
    start = table().detach()
    out = []
    for row in range(ROWS):
        parameter = nn.Parameter(start[row].clone())
        optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=DECAY, foreach=False)
        for touched, grad in zip(updates, grads, strict=True):
            if row in touched:
                parameter.grad = grad[row].clone()
                optimizer.step()
        out.append(parameter.detach())
    return torch.stack(out)


def run(updates: list[list[int]], grads: list[Tensor], *, unused: int = 0, in_use: int = 1) -> tuple[RowAdamW, Tensor]:
    parameter = table()
    optimizer = RowAdamW(parameter, weight_decay=DECAY)
    for touched, grad in zip(updates, grads, strict=True):
        ids = torch.tensor(touched + [ROWS] * unused)
        rows = torch.cat((grad[touched], torch.zeros(unused, DIM, dtype=torch.float64)))
        optimizer.step(TouchedRows(ids, rows, min(in_use, len(touched))), LR)
    return optimizer, parameter.detach()


def test_rows_touched_in_every_step_move_as_under_dense_adamw() -> None:
    updates, grads = [list(range(ROWS))] * 5, gradients(5)
    _, got = run(updates, grads)
    whole = table()
    optimizer = torch.optim.AdamW([whole], lr=LR, weight_decay=DECAY, foreach=False)
    for grad in grads:
        whole.grad = grad.clone()
        optimizer.step()
    assert float((got - whole.detach()).abs().max()) <= TOLERANCE


def test_a_row_counts_its_own_updates_and_rests_in_between() -> None:
    updates, grads = [[0, 2, 5], [2], [0, 1, 2, 6], [6]], gradients(4)
    optimizer, got = run(updates, grads)
    assert optimizer.row_steps.tolist() == [2, 1, 3, 0, 0, 1, 2]
    assert torch.equal(got[3:5], table().detach()[3:5])
    assert not optimizer.exp_avg[3:5].any()
    assert float((got - dense_rows(updates, grads)).abs().max()) <= TOLERANCE


def test_slots_that_are_not_used_change_nothing() -> None:
    updates, grads = [[0, 2, 5], [6]], gradients(2)
    (plain, expected), (padded, got) = run(updates, grads), run(updates, grads, unused=4)
    assert torch.equal(expected, got)
    for name, state in plain.state().items():
        assert torch.equal(state, padded.state()[name]), name


@pytest.mark.parametrize("unused", [0, 4])
def test_pieces_of_the_rows_move_them_as_all_at_once(monkeypatch: pytest.MonkeyPatch, unused: int) -> None:
    updates, grads = [[0, 2, 5], [6], [0, 1, 2, 3, 4, 5, 6]], gradients(3)
    whole, expected = run(updates, grads)
    monkeypatch.setattr(pieces, "PIECE", DIM * 2)
    parts, got = run(updates, grads, unused=unused, in_use=ROWS)
    # float64; how long a piece is may change how its elements are worked on, by a rounding.
    assert float((got - expected).abs().max()) <= TOLERANCE
    for name, state in whole.state().items():
        assert float((state - parts.state()[name]).abs().max()) <= TOLERANCE, name
