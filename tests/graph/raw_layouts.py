"""One small untidy graph and writers of every raw layout that holds it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.graph.readers.rows import Rows

NUM_NODES, NUM_COLUMNS, NUM_CLASSES, NUM_TRAIN, NUM_TEST = 60, 12, 3, 9, 20


@dataclass(frozen=True)
class Sample:
    """Raw entries with self-loops, duplicates, one-way edges and isolated nodes, as every layout can hold them."""

    tails: NDArray[np.int64]
    heads: NDArray[np.int64]
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]


def sample(seed: int = 0, density: float = 0.15) -> Sample:
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, NUM_NODES - 3, (150, 2))  # the last three nodes stay isolated
    edges = np.concatenate([edges, edges[:11, ::-1], edges[:7], [[4, 4], [4, 4], [9, 9]]])
    x = ((rng.random((NUM_NODES, NUM_COLUMNS)) < density) * rng.integers(1, 5, (NUM_NODES, NUM_COLUMNS))).astype(
        np.float32
    )
    y = rng.integers(0, NUM_CLASSES, NUM_NODES)
    y[:NUM_CLASSES] = np.arange(NUM_CLASSES)
    first_test = NUM_NODES - NUM_TEST
    return Sample(
        edges[:, 0],
        edges[:, 1],
        x,
        y,
        np.arange(NUM_TRAIN),
        np.arange(NUM_TRAIN, first_test),
        np.arange(first_test, NUM_NODES),
    )


@dataclass(frozen=True)
class Reference:
    """What a prepared graph must hold, by plain Python sets."""

    edges: set[tuple[int, int]]
    self_loops: int
    duplicates: int
    one_way: int
    isolated: int


def reference(tails: NDArray[np.int64], heads: NDArray[np.int64], num_nodes: int) -> Reference:
    entries = list(zip(tails.tolist(), heads.tolist(), strict=True))
    distinct = set(entries)
    loops = {entry for entry in distinct if entry[0] == entry[1]}
    edges = {(min(entry), max(entry)) for entry in distinct - loops}
    one_way = sum(((u, v) in distinct) != ((v, u) in distinct) for u, v in edges)
    touched = {node for edge in edges for node in edge}
    return Reference(edges, len(loops), len(entries) - len(distinct), one_way, num_nodes - len(touched))


def _mask(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(NUM_NODES, dtype=np.bool_)
    mask[ids] = True
    return mask


def write_planetoid(folder: Path, name: str, data: Sample) -> None:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    order = np.random.default_rng(1).permutation(data.test)  # test.index is never sorted
    one_hot = np.eye(NUM_CLASSES, dtype=np.int32)[data.y]
    first = NUM_NODES - NUM_TEST
    neighbours: dict[int, list[int]] = defaultdict(list)
    for node in range(NUM_NODES):
        neighbours[node] = data.heads[data.tails == node].tolist()
    parts: dict[str, Any] = {
        "x": sparse.csr_matrix(data.x[data.train]),
        "tx": sparse.csr_matrix(data.x[order]),
        "allx": sparse.csr_matrix(data.x[:first]),
        "y": one_hot[data.train],
        "ty": one_hot[order],
        "ally": one_hot[:first],
        "graph": neighbours,
    }
    for part, value in parts.items():
        (raw / f"ind.{name}.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (raw / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in order))


def _csr_keys(matrix: sparse.csr_matrix, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}data": matrix.data,
        f"{prefix}indices": matrix.indices,
        f"{prefix}indptr": matrix.indptr,
        f"{prefix}shape": np.array(matrix.shape),
    }


def _adjacency(data: Sample) -> sparse.csr_matrix:
    """CSR that keeps duplicate entries."""
    order = np.argsort(data.tails, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(data.tails, minlength=NUM_NODES))])
    return sparse.csr_matrix((np.ones(order.size, np.float32), data.heads[order], indptr), shape=(NUM_NODES, NUM_NODES))


def write_amazon(folder: Path, name: str, data: Sample) -> None:
    (folder / "raw").mkdir(parents=True)
    np.savez(
        folder / "raw" / f"amazon_electronics_{name}.npz",
        labels=data.y,
        **_csr_keys(_adjacency(data), "adj_"),
        **_csr_keys(sparse.csr_matrix(data.x), "attr_"),
    )


def write_reddit(folder: Path, _name: str, data: Sample) -> None:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    types = _mask(data.train) * 1 + _mask(data.val) * 2 + _mask(data.test) * 3
    np.savez(raw / "reddit_data.npz", feature=data.x, label=data.y, node_types=types, node_ids=np.arange(NUM_NODES))
    entries = (np.ones(data.tails.size), (data.tails, data.heads))
    sparse.save_npz(raw / "reddit_graph.npz", sparse.coo_matrix(entries, shape=(NUM_NODES, NUM_NODES)))


def write_saint(folder: Path, _name: str, data: Sample) -> None:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "adj_full.npz", format=np.array(b"csr"), **_csr_keys(_adjacency(data), ""))
    np.save(raw / "feats.npy", data.x.astype(np.float64))
    (raw / "class_map.json").write_text(json.dumps({str(node): int(label) for node, label in enumerate(data.y)}))
    role = {"tr": data.train.tolist(), "va": data.val.tolist(), "te": data.test.tolist()}
    (raw / "role.json").write_text(json.dumps(role))


def write_csv_gz(path: Path, table: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    np.savetxt(text, table, delimiter=",", fmt="%d" if table.dtype.kind == "i" else "%.9g")
    path.write_bytes(gzip.compress(text.getvalue().encode()))


def write_ogb(folder: Path, name: str, data: Sample) -> None:
    split = {"arxiv": "time", "products": "sales_ranking"}[name]
    tables = {
        "raw/edge": np.stack([data.tails, data.heads], axis=1),
        "raw/node-feat": data.x,
        "raw/node-label": data.y[:, None],
        "raw/num-node-list": np.array([[NUM_NODES]]),
        "raw/num-edge-list": np.array([[data.tails.size]]),
        f"split/{split}/train": data.train[:, None],
        f"split/{split}/valid": data.val[:, None],
        f"split/{split}/test": data.test[:, None],
    }
    for file, table in tables.items():
        write_csv_gz(folder / f"{file}.csv.gz", table)


def write_ogb_binary(folder: Path, name: str, data: Sample) -> None:
    write_ogb(folder, name, data)
    for table in (folder / "raw").iterdir():
        table.unlink()
    np.savez(
        folder / "raw" / "data.npz",
        edge_index=np.stack([data.tails, data.heads]),
        num_nodes_list=np.array([NUM_NODES]),
        num_edges_list=np.array([data.tails.size]),
        node_feat=data.x,
        edge_reltype=np.zeros((data.tails.size, 1)),
    )
    np.savez(folder / "raw" / "node-label.npz", node_label=data.y[:, None].astype(np.float32))


WRITERS: dict[str, Callable[[Path, str, Sample], None]] = {
    "citeseer": write_planetoid,
    "cora": write_planetoid,
    "pubmed": write_planetoid,
    "computers": write_amazon,
    "photo": write_amazon,
    "reddit": write_reddit,
    "reddit2": write_saint,
    "arxiv": write_ogb,
    "products": write_ogb,
}


def write_own(path: Path, data: Sample, **changes: Any) -> Path:
    """A user's file with edge_index, x, y; ``changes`` replace arrays, None removes one."""
    arrays = {"edge_index": np.stack([data.tails, data.heads]), "x": data.x, "y": data.y} | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def whole(rows: Any) -> NDArray[Any]:
    """All blocks of a table that is read block by block."""
    assert isinstance(rows, Rows)
    table = np.concatenate(list(rows.blocks(Path(gettempdir()))))
    assert (table.shape, table.dtype) == (rows.shape, rows.dtype)
    return table
