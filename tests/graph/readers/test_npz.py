"""The three key layouts of a .npz file, each in its variants."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers import rows
from megagraph_cli.graph.readers.npz import read_npz

RNG = np.random.default_rng(0)
EDGES = RNG.integers(0, 30, (80, 2))
X = (RNG.random((30, 7)) < 0.4).astype(np.float32)
Y = RNG.integers(0, 3, 30)
MASKS = RNG.random((3, 4, 30)) < 0.3  # part, published split, node


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def csr(matrix: sparse.csr_matrix, prefix: str) -> dict[str, Any]:
    arrays = {key: getattr(matrix, key) for key in ("data", "indices", "indptr")}
    return {f"{prefix}_{key}": value for key, value in arrays.items()} | {f"{prefix}_shape": np.array(matrix.shape)}


def whole(features: Any, scratch: Path) -> np.ndarray:
    """All blocks of a table that is read block by block."""
    return np.concatenate(list(features.blocks(scratch)))


@pytest.mark.parametrize("layout", ["[V]", "[V, k]", "[k, V]", "bytes"])
def test_own_keys_and_masks(layout: str, tmp_path: Path) -> None:
    masks = MASKS[:, :1, :] if layout == "[V]" else MASKS
    stored = {"[V]": masks[:, 0], "[V, k]": masks.transpose(0, 2, 1), "[k, V]": masks, "bytes": masks.astype(np.uint8)}
    parts = dict(zip(("train_mask", "val_mask", "test_mask"), stored[layout], strict=True))
    raw = read_npz(save(tmp_path / "g.npz", edge_index=EDGES.T, x=X, y=Y, **parts))
    np.testing.assert_array_equal(np.stack([raw.tails, raw.heads]), EDGES.T)
    np.testing.assert_array_equal(whole(raw.features, tmp_path), X)
    assert raw.masks is not None
    for mask, expected in zip((raw.masks.train, raw.masks.val, raw.masks.test), masks, strict=True):
        np.testing.assert_array_equal(mask, expected)


def test_own_sparse_features_stay_sparse(tmp_path: Path) -> None:
    raw = read_npz(save(tmp_path / "g.npz", edge_index=EDGES.T, y=Y, **csr(sparse.csr_matrix(X), "x")))
    assert sparse.issparse(raw.features)
    np.testing.assert_array_equal(raw.features.toarray(), X)


def test_own_without_features(tmp_path: Path) -> None:
    raw = read_npz(save(tmp_path / "g.npz", edge_index=EDGES.T, y=Y))
    assert raw.features is None
    assert raw.masks is None
    assert raw.num_nodes == 30


@pytest.mark.parametrize("dense", [False, True])
def test_gnn_benchmark_keys(dense: bool, tmp_path: Path) -> None:
    adjacency = sparse.csr_matrix((np.ones(80), EDGES.T), shape=(30, 30))
    attr = {"attr_matrix": X} if dense else csr(sparse.csr_matrix(X), "attr")
    raw = read_npz(save(tmp_path / "g.npz", labels=Y, **csr(adjacency, "adj"), **attr))
    found = sparse.csr_matrix((np.ones(raw.tails.size), (raw.tails, raw.heads)), shape=(30, 30))
    assert (found.astype(bool) != adjacency.astype(bool)).nnz == 0
    features = raw.features.toarray() if sparse.issparse(raw.features) else whole(raw.features, tmp_path)
    np.testing.assert_array_equal(features, X)


def test_heterophilous_keys(tmp_path: Path) -> None:
    parts = dict(zip(("train_masks", "val_masks", "test_masks"), MASKS, strict=True))
    raw = read_npz(save(tmp_path / "g.npz", edges=EDGES, node_features=X, node_labels=Y, **parts))
    np.testing.assert_array_equal(np.stack([raw.tails, raw.heads], axis=1), EDGES)
    np.testing.assert_array_equal(raw.labels, Y)
    assert raw.masks is not None
    np.testing.assert_array_equal(raw.masks.test, MASKS[2])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"adj_indptr": np.zeros(31, np.int64)}, "do not fit 30 rows"),
        ({"adj_indices": np.full(80, 30)}, "beyond the 30 columns"),
        ({"adj_indices": np.zeros(79, np.int64)}, "80 values for 79 column"),
        ({"adj_shape": np.array([30, 31])}, "square"),
        ({"adj_shape": np.array([30])}, "adj_"),
        ({"labels": None}, "no array 'labels'"),
    ],
)
def test_gnn_benchmark_arrays_that_do_not_fit(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    order = np.lexsort((EDGES[:, 1], EDGES[:, 0]))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(EDGES[:, 0], minlength=30))])
    arrays = {
        "adj_data": np.ones(80),
        "adj_indices": EDGES[order, 1],
        "adj_indptr": indptr,
        "adj_shape": np.array([30, 30]),
        "labels": Y,
    } | change
    path = save(tmp_path / "g.npz", **{key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(MgraphError, match=expected):
        read_npz(path)


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<i2", "|b1", "<f2"])
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("save_as", [np.savez, np.savez_compressed])
def test_x_comes_in_blocks_as_it_is(kind: str, by_column: bool, save_as: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(rows, "BLOCK_ENTRIES", 3 * X.shape[1])  # three rows
    x = np.asarray(RNG.integers(0, 9, X.shape).astype(kind), order="F" if by_column else "C")
    save_as(tmp_path / "g.npz", edge_index=EDGES.T, x=x, y=Y)
    features = read_npz(tmp_path / "g.npz").features
    assert isinstance(features, rows.Rows)
    assert (features.shape, features.dtype) == (x.shape, x.dtype)
    for _ in range(2):  # as often as it is asked for
        blocks = list(features.blocks(tmp_path))
        assert {block.shape[0] for block in blocks} == {3}
        np.testing.assert_array_equal(np.concatenate(blocks), x)
    assert [path.name for path in tmp_path.iterdir()] == ["g.npz"]


@pytest.mark.parametrize("by_column", [False, True])
def test_x_that_changed_or_is_damaged_is_one_sentence(by_column: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "g.npz", edge_index=EDGES.T, x=np.asarray(X, order="F" if by_column else "C"), y=Y)
    features = read_npz(path).features
    content = bytearray(path.read_bytes())
    at = content.find(np.asarray(X, order="F" if by_column else "C").tobytes("A"))
    assert at > 0
    content[at + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(MgraphError, match=r"g\.npz is truncated or damaged \(Bad CRC"):
        whole(features, tmp_path)
    save(path, edge_index=EDGES.T, x=X[:20], y=Y)
    with pytest.raises(MgraphError, match="not the one that was there before"):
        whole(features, tmp_path)


def test_header_of_more_than_the_file_has(tmp_path: Path) -> None:
    short = io.BytesIO()
    np.lib.format.write_array_header_1_0(short, {"descr": "<f4", "fortran_order": False, "shape": (30, 7)})
    short.write(bytes(30 * 7 * 4 - 1))
    save(tmp_path / "g.npz", edge_index=EDGES.T, y=Y)
    with zipfile.ZipFile(tmp_path / "g.npz", "a") as file:
        file.writestr("x.npy", short.getvalue())
    with pytest.raises(MgraphError, match=r"g\.npz is truncated or damaged \(an array ends 1 bytes early"):
        whole(read_npz(tmp_path / "g.npz").features, tmp_path)


def test_header_that_asks_for_too_much_memory(tmp_path: Path) -> None:
    own = io.BytesIO()
    np.lib.format.write_array_header_1_0(own, {"descr": "<f8", "fortran_order": False, "shape": (2, 1 << 55)})
    with zipfile.ZipFile(tmp_path / "g.npz", "w") as file:
        file.writestr("edge_index.npy", own.getvalue())
    with pytest.raises(MgraphError, match=r"g\.npz"):
        read_npz(tmp_path / "g.npz")


def test_encrypted_archive_is_one_sentence(tmp_path: Path) -> None:
    path = save(tmp_path / "g.npz", edge_index=EDGES.T, y=Y)
    content = bytearray(path.read_bytes())
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := content.find(signature, start + 1)) >= 0:
            content[start + at] |= 1  # the flag of an encrypted member
    path.write_bytes(content)
    with pytest.raises(MgraphError, match="encrypted"):
        read_npz(path)
