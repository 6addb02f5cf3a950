"""Pieces of touched rows: none too large, none without a row that is in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.layout.pieces import PIECE, PIECES, num_pieces


@given(slots=st.integers(1, 10**7), dim=st.integers(1, 2048), in_use=st.integers(1, 10**7))
def test_a_piece_is_small_and_begins_in_use(slots: int, dim: int, in_use: int) -> None:
    in_use = min(in_use, slots)
    pieces = num_pieces(slots, dim, in_use)
    assert 1 <= pieces <= min(PIECES, in_use)
    if pieces < min(PIECES, in_use):
        assert slots * dim <= pieces * PIECE
