"""Files of the store: written in blocks as numpy reads them, hashed by content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.graph import store
from megagraph_cli.graph.store import DamagedStoreError, Facts, Writer, open_store

FACTS = Facts("tiny", "none", "nowhere", 2, 0, {"isolated": 0}, 0)


def write(folder: Path, shift: int = 0) -> Writer:
    folder.mkdir()
    writer = Writer(folder)
    for name in ("indptr", "indices", "labels", "clusters", "cluster_sizes", "coarse_indptr", "coarse_indices"):
        writer.put(name, np.arange(5) + shift)
    return writer


@pytest.mark.parametrize(
    "blocks",
    [
        [np.arange(6, dtype=np.int32)],
        [np.zeros(0, np.int64)],
        [np.arange(12.0).reshape(3, 4), np.zeros((2, 4))],
        [np.arange(12, dtype=np.float32).reshape(4, 3).T],
        [np.array([[True, False]])],
    ],
)
def test_blocks_are_stacked(blocks: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK_BYTES", 7)
    Writer(tmp_path).put("a", *blocks)
    found = np.load(tmp_path / "a.npy")
    np.testing.assert_array_equal(found, np.concatenate(blocks))
    assert found.dtype == blocks[0].dtype


def test_digest_is_of_content_alone(tmp_path: Path) -> None:
    one, two, other = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", shift=1)
    assert one.digest() == two.digest() != other.digest()
    two.put("table_extra", np.arange(3))
    assert one.digest() == two.digest()  # the sampler's tables follow from the rest
    two.put("mask_train", np.arange(3))
    assert one.digest() != two.digest()


def test_store_without_meta_is_no_store(tmp_path: Path) -> None:
    writer = write(tmp_path / "a")
    with pytest.raises(DamagedStoreError):
        open_store(tmp_path / "a")
    writer.finish(FACTS)
    graph = open_store(tmp_path / "a")
    assert (graph.name, graph.licence, graph.source, graph.num_classes) == ("tiny", "none", "nowhere", 2)
    assert graph.digest == writer.digest()
    assert graph.features is None
    assert graph.tables == {}


def test_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part.npy").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with store.exclusive(tmp_path / "a", lambda: None) as there:
        assert not there
        with pytest.raises(OSError, match="No space"):
            store.publish(tmp_path / "a", fail)
    assert list(tmp_path.iterdir()) == []
