"""Planetoid pickles: what is allowed, and parts that do not fit each other."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.planetoid import read_planetoid

X = (np.random.default_rng(0).random((12, 5)) < 0.5).astype(np.float32)
ONE_HOT = np.eye(2, dtype=np.int32)[np.arange(12) % 2]
TEST = np.array([11, 8])  # 9 and 10 are left out: neither features nor label


def parts() -> dict[str, Any]:
    neighbours: dict[int, list[int]] = defaultdict(list)
    for node in range(12):
        neighbours[node] = [(node + 1) % 12]
    return {
        "x": sparse.csr_matrix(X[:3]),
        "tx": sparse.csr_matrix(X[TEST]),
        "allx": sparse.csr_matrix(X[:8]),
        "y": ONE_HOT[:3],
        "ty": ONE_HOT[TEST],
        "ally": ONE_HOT[:8],
        "graph": neighbours,
    }


def write(folder: Path, values: dict[str, Any], test: str = "11\n8\n") -> None:
    for part, value in values.items():
        (folder / f"ind.tiny.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.tiny.test.index").write_text(test)


def test_left_out_ids_have_neighbours_but_no_label(tmp_path: Path) -> None:
    write(tmp_path, parts())
    raw = read_planetoid(tmp_path, "tiny")
    assert raw.num_nodes == 12
    expected = np.where(np.isin(np.arange(12), (9, 10)), -1, np.arange(12) % 2)
    np.testing.assert_array_equal(raw.labels, expected)
    rows = X.copy()
    rows[[9, 10]] = 0
    np.testing.assert_array_equal(raw.features.toarray(), rows)
    np.testing.assert_array_equal(raw.heads, (raw.tails + 1) % 12)
    assert raw.masks is not None
    assert np.flatnonzero(raw.masks.train[0]).tolist() == [0, 1, 2]
    assert np.flatnonzero(raw.masks.val[0]).tolist() == [3, 4, 5, 6, 7]
    assert np.flatnonzero(raw.masks.test[0]).tolist() == [8, 11]


@pytest.mark.parametrize(
    ("part", "value", "expected"),
    [
        ("tx", sparse.csr_matrix(X[:3]), "tx does not fit"),
        ("tx", X[TEST], "tx does not fit"),
        ("ty", ONE_HOT[:3], "ally and ty do not fit"),
        ("graph", [1, 2], "graph is truncated or damaged"),
        ("graph", {0: [1, "x"]}, "graph is truncated or damaged"),
        ("ally", {"a": 1}, "ally is truncated or damaged"),
        ("allx", np.array([{}], dtype=object), "allx is truncated or damaged"),
        ("ally", Path("x"), r"PurePosixPath|pathlib"),
    ],
)
def test_parts_that_do_not_fit(part: str, value: Any, expected: str, tmp_path: Path) -> None:
    write(tmp_path, parts() | {part: value})
    with pytest.raises(MgraphError, match=expected):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(("test", "expected"), [("3\n8\n", "overlaps"), ("8\n8\n", "repeats"), ("8\nx\n", "damaged")])
def test_bad_test_index(test: str, expected: str, tmp_path: Path) -> None:
    write(tmp_path, parts(), test)
    with pytest.raises(MgraphError, match=expected):
        read_planetoid(tmp_path, "tiny")
