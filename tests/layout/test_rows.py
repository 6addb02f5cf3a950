"""Every row of a sequence lives on exactly one rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.layout.rows import RowLayout


@given(st.integers(1, 70), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9))
def test_blocks_cover_the_padded_sequence_once(num_sampled: int, num_super: int, num_global: int, cp: int) -> None:
    rows = RowLayout(num_sampled, num_super, num_global, cp)
    held = [row for rank in range(cp) for row in rows.rows_of(rank)]
    assert held == list(range(rows.padded_rows))
    assert rows.sequence_rows <= rows.padded_rows < rows.sequence_rows + cp
    assert (rows.num_nodes, rows.sequence_rows) == (num_sampled, num_sampled + num_super + num_global)


def test_the_published_setting_has_17_rows() -> None:
    assert RowLayout(15, 1, 1, cp=4).sequence_rows == 17
    assert RowLayout(15, 1, 1, cp=4).rows_per_rank == 5


def test_ranks_past_the_last_row_are_empty() -> None:
    assert RowLayout(3, 1, 1, cp=4).empty_ranks == {3}
    assert RowLayout(1, 0, 1, cp=4).empty_ranks == {2, 3}
    assert RowLayout(5, 1, 1, cp=4).empty_ranks == frozenset()
