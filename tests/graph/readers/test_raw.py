"""Labels: gaps, starts, missing ones."""

from __future__ import annotations

import numpy as np
import pytest

from megagraph_cli.graph.readers.raw import compact_labels


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        ([0, 1, 2], [0, 1, 2], 3),
        ([1, 9, 5, 9], [0, 2, 1, 2], 3),
        ([-1, 88, 0, -1], [-1, 1, 0, -1], 2),
        ([-1, -1], [-1, -1], 0),
        ([2.0, -1.0, 7.0], [0, -1, 1], 2),
        ([[3], [1]], [1, 0], 2),
        ([True, False], [1, 0], 2),
    ],
)
def test_labels_are_compacted_in_order(labels: list[float], expected: list[int], classes: int) -> None:
    found, count = compact_labels("file", np.array(labels), len(labels))
    assert found.tolist() == expected
    assert found.dtype == np.int64
    assert count == classes
