"""The gathering kernel is numpy's indexing, for rows of any width, repeats and float16 included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.graph import gather
from megagraph_cli.graph.gather import gather_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [1, 3, 16, 33, 100])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
def test_gathered_rows_are_those_of_the_table(width: int, count: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(width)
    table = rng.normal(size=(40, width)).astype(dtype)
    rows = rng.integers(0, 40, count)
    found = gather_rows(table, rows)
    assert found.dtype == np.float32
    assert np.array_equal(found, table[rows].astype(np.float32))


def test_a_mapped_table_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.arange(60, dtype=np.float32).reshape(12, 5)
    np.save(tmp_path / "table.npy", table)
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    kernel, read = gather._gather, []
    monkeypatch.setattr(gather, "_gather", lambda *given: (read.append(given[0]), kernel(*given)))
    assert np.array_equal(gather_rows(mapped, np.array([11, 0, 11])), table[[11, 0, 11]])
    assert np.shares_memory(read[0], mapped)


def test_a_row_that_is_not_there_is_refused() -> None:
    for row in (-1, 4):
        with pytest.raises(AssertionError):
            gather_rows(np.zeros((4, 2), dtype=np.float32), np.array([0, row]))
