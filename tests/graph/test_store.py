"""Files of the store: written in blocks as numpy reads them, hashed by content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.graph import store, writer
from megagraph_cli.graph.store import DamagedStoreError, Facts, Writer, open_store

FACTS = Facts("tiny", "none", "nowhere", 2, 0, {"isolated": 0}, 0)


def write(folder: Path, shift: int = 0) -> Writer:
    folder.mkdir()
    into = Writer(folder)
    for name in ("indptr", "indices", "labels", "clusters", "cluster_sizes", "coarse_indptr", "coarse_indices"):
        into.put(name, np.arange(5) + shift)
    return into


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
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 7)
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


def test_an_array_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    writers = []
    for name in ("whole", "stream", "allocated"):
        (tmp_path / name).mkdir()
        writers.append(Writer(tmp_path / name))
    writers[0].put("x", x)
    with writers[1].stream("x", np.float32, x.shape) as out:
        out.write(x[:5])
        out.write(x[5:])
    place = writers[2].allocate("x", np.float32, x.shape)
    np.testing.assert_array_equal(place, np.zeros_like(x))
    place[:] = x
    writers[2].put("x", place)
    assert len({into.digest() for into in writers}) == 1
    assert len({(into.folder / "x.npy").read_bytes() for into in writers}) == 1
    assert all(into.sizes == writers[0].sizes for into in writers)


def test_an_array_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    into = Writer(tmp_path)
    with into.stream("x", np.int32, (5, 2)) as out:
        out.write(np.arange(6, dtype=np.int32).reshape(3, 2))
        rows = out.rows(3)
        out.give_up()
    np.testing.assert_array_equal(rows, np.arange(6).reshape(3, 2))  # what is mapped stays readable
    assert list(tmp_path.iterdir()) == []
    assert not into.sizes
    assert not into.hashes


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_arrays_of_nothing_can_be_allocated(shape: tuple[int, ...], tmp_path: Path) -> None:
    into = Writer(tmp_path)
    into.put("x", into.allocate("x", np.int8, shape))
    assert np.load(tmp_path / "x.npy").shape == shape


def test_store_without_meta_is_no_store(tmp_path: Path) -> None:
    into = write(tmp_path / "a")
    with pytest.raises(DamagedStoreError):
        open_store(tmp_path / "a")
    into.finish(FACTS)
    graph = open_store(tmp_path / "a")
    assert (graph.name, graph.licence, graph.source, graph.num_classes) == ("tiny", "none", "nowhere", 2)
    assert graph.digest == into.digest()
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
