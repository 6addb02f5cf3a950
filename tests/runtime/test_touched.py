"""What the profile measures of a table's touched rows: what training does to them, at the sizes that tell its terms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.cost.regression import fit_coefficients
from megagraph_cli.cost.terms import row_update_regressors
from megagraph_cli.layout.pieces import num_pieces
from megagraph_cli.parallel.table import RowSum
from megagraph_cli.runtime.grid import MOST_TOUCHED, touched_sizes
from megagraph_cli.runtime.measure_touched import TouchedProbe, measure_touched
from megagraph_cli.runtime.probes import Context
from tests.runtime.small import CPU, one_rank, small_graph, small_workload


@pytest.fixture
def probe() -> Iterator[TouchedProbe]:
    graph = small_graph()
    workload = small_workload(graph, model={"embedding": "both"})
    with one_rank():
        alone = torch.distributed.group.WORLD
        assert alone is not None
        yield TouchedProbe(Context(workload, graph, CPU, 1, np.arange(8)), alone)


def test_a_sample_is_of_the_rows_and_pieces_that_were_asked_for(probe: TouchedProbe) -> None:
    sample = measure_touched(probe, 12, 3, 2)
    assert (sample.module, sample.num_layers, sample.rows, sample.pieces) == ("optimizer", 0, 12, 3)
    assert sample.memory == {"parameters": 12 * 8 * 8}  # 8 numbers in float64
    assert len(sample.samples_s) == 2
    assert min(sample.forward_s, sample.backward_s) > 0


@pytest.mark.parametrize("pieces", [1, 3, 5])
def test_what_is_measured_is_a_sum_of_two_ranks_rows_and_an_update_of_one(
    probe: TouchedProbe, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RowSum] = []

    class Kept(RowSum):
        def __init__(self, ids: torch.Tensor, like: torch.Tensor, in_use: int) -> None:
            super().__init__(ids, like, in_use)
            made.append(self)

    monkeypatch.setattr("megagraph_cli.runtime.measure_touched.RowSum", Kept)
    probe.load(7)
    rows, ids = probe._rows.clone(), probe._ids.clone()
    expected = torch.zeros_like(probe.table)
    for mine in ids:
        assert mine.unique().numel() == 7
        expected.index_add_(0, mine, rows)
    probe.merge(pieces)
    touched = made[0].touched
    got = torch.zeros(probe.table.shape[0] + 1, probe.table.shape[1], dtype=rows.dtype)
    got.index_copy_(0, touched.ids, touched.rows)
    # float64: sums of two numbers of size one.
    assert float((got[:-1] - expected).abs().max()) <= 1e-14
    probe.update(pieces)
    updated = probe.optimizer.row_steps.nonzero().flatten()
    assert updated.tolist() == ids[0].tolist()
    assert float(probe._rows.norm()) == pytest.approx(1.0, rel=1e-12)  # clipped


@given(most=st.integers(2, 10**8), dim=st.sampled_from([8, 64, 512]), device=st.sampled_from(["cpu", "cuda"]))
def test_sizes_tell_a_step_a_piece_and_a_byte_apart(most: int, dim: int, device: str) -> None:
    sizes = touched_sizes(most, dim, device)
    assert len(sizes) <= 4
    assert max(rows for rows, _ in sizes) == min(most, MOST_TOUCHED[device] // dim)
    assert all(pieces <= rows for rows, pieces in sizes)
    assert any(pieces == num_pieces(rows, dim, rows, device) for rows, pieces in sizes)
    if most < 3:
        return
    planted = {"step": 5e-5, "call": 2e-4, "bytes": 3e-9}
    regressors = [row_update_regressors(pieces, rows * dim * 4) for rows, pieces in sizes]
    seconds = [sum(planted[name] * value for name, value in each.items()) for each in regressors]
    # Of small tables the bytes are a thousandth of the constants.
    assert fit_coefficients(regressors, seconds) == pytest.approx(planted, rel=1e-3)
