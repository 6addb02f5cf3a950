"""Pieces of touched rows: none too large, none without a row that is in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.layout.pieces import CUDA_PIECE, PIECE, PIECES, num_pieces


@given(
    slots=st.integers(1, 10**7),
    dim=st.integers(1, 2048),
    in_use=st.integers(1, 10**7),
    device=st.sampled_from([("cpu", PIECE), ("cuda", CUDA_PIECE)]),
)
def test_a_piece_is_small_and_begins_in_use(slots: int, dim: int, in_use: int, device: tuple[str, int]) -> None:
    in_use, (kind, most) = min(in_use, slots), device
    pieces = num_pieces(slots, dim, in_use, kind)
    assert 1 <= pieces <= min(PIECES, in_use)
    if pieces < min(PIECES, in_use):
        assert slots * dim <= pieces * most
    # No more pieces than such large ones make.
    assert pieces == 1 or slots * dim > (pieces - 1) * most


def test_a_device_that_launches_kernels_has_few_pieces() -> None:
    assert [num_pieces(10**5, 64, 10**5, kind) for kind in ("cpu", "cuda")] == [64, 2]
