"""The Open Graph Benchmark's (OGB) raw node-property folders: gzipped CSV tables, read in blocks by pandas, or arrays.

The ogb package itself does not serve here: it asks on stdin before it downloads, writes pickles beside the raw files,
which may be read-only and which newer torch refuses to load, and looks for a newer version when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Masks
from megagraph_cli.graph.progress import Pace, Report
from megagraph_cli.graph.readers.files import Npz, reading
from megagraph_cli.graph.readers.raw import RawGraph
from megagraph_cli.graph.readers.rows import Rows

_RAW = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
BINARY = ("raw/data.npz", "raw/node-label.npz")
_PARTS = ("train", "valid", "test")
_BLOCK_ENTRIES = 1 << 23


def files(split: str) -> tuple[str, ...]:
    """The files of a dataset with the official split ``split``, relative to its folder."""
    return tuple(f"raw/{name}.csv.gz" for name in _RAW) + _split_files(split)


def binary_files(split: str) -> tuple[str, ...]:
    """The same of a dataset in OGB's binary layout."""
    return (*BINARY, *_split_files(split))


def _split_files(split: str) -> tuple[str, ...]:
    return tuple(f"split/{split}/{part}.csv.gz" for part in _PARTS)


def read_ogb(folder: Path, report: Report, split: str) -> RawGraph:
    """The raw graph of an OGB folder, whose features are yet to be parsed. Raises MgraphError (exit 2) on a damaged
    file or one with too few rows."""
    raw = folder / "raw"
    num_nodes, num_edges = (_count(raw / f"num-{kind}-list.csv.gz") for kind in ("node", "edge"))
    edges = _table(raw / "edge.csv.gz", num_edges, 2, np.int64, np.int32, report)
    features = _rows(raw / "node-feat.csv.gz", num_nodes)
    labels = _table(raw / "node-label.csv.gz", num_nodes, 1, np.float64, np.float64, report)
    tails, heads = np.ascontiguousarray(edges[:, 0]), np.ascontiguousarray(edges[:, 1])
    masks = _masks(folder / "split" / split, num_nodes)
    return RawGraph(str(raw), num_nodes, tails, heads, _known(labels), features, masks)


def read_binary(folder: Path, _report: Report, split: str) -> RawGraph:
    """The raw graph of an OGB folder in the binary layout: ``data.npz`` (edge_index [2, N], num_nodes_list and
    num_edges_list of one graph, node_feat [V, F] or none) and ``node-label.npz`` (node_label [V] or [V, 1]).

    Raises MgraphError (exit 2) on damaged files, or arrays that do not fit each other.
    """
    with Npz(folder / BINARY[0]) as data, Npz(folder / BINARY[1]) as label:
        counts = data.get("num_nodes_list")
        if counts.shape != (1,):
            raise MgraphError(f"{data.path} holds {counts.size} graphs; give it one")
        num_nodes = int(counts[0])
        edges, features, labels = data.get("edge_index"), data.find_rows("node_feat"), label.get("node_label")
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise MgraphError(f"{data.path} has edge_index of shape {list(edges.shape)}; give it the shape [2, E]")
    masks = _masks(folder / "split" / split, num_nodes)
    return RawGraph(str(folder / "raw"), num_nodes, edges[0], edges[1], _known(labels), features, masks)


def _known(labels: NDArray[Any]) -> NDArray[Any]:
    """Labels with -1 where OGB has none: it leaves the field empty, which reads as NaN."""
    return np.where(np.isnan(labels), -1, labels) if labels.dtype.kind == "f" else labels


def _masks(folder: Path, num_nodes: int) -> Masks:
    masks = []
    for part in _PARTS:
        path = folder / f"{part}.csv.gz"
        mask = np.zeros((1, num_nodes), dtype=np.bool_)
        with reading(path):
            ids = np.concatenate([block[:, 0] for block in _blocks(path, np.int64)])
            if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
                raise ValueError(f"a node beyond the {num_nodes} nodes")
            mask[0, ids] = True
        masks.append(mask)
    return Masks(*masks)


def _blocks(path: Path, dtype: Any) -> Iterator[NDArray[Any]]:
    """The table in blocks of rows [rows, columns]; nothing where it is empty."""
    import pandas

    rows = max(1, _BLOCK_ENTRIES // _columns(path))
    with pandas.read_csv(path, header=None, dtype=dtype, chunksize=rows) as reader:
        for block in reader:
            yield block.to_numpy()


def _columns(path: Path) -> int:
    import pandas

    return int(pandas.read_csv(path, header=None, nrows=1).shape[1])


def _count(path: Path) -> int:
    with reading(path):
        counts = np.concatenate(list(_blocks(path, np.int64)))
        if counts.shape != (1, 1) or counts[0, 0] < 0:
            raise ValueError("not one count")
        return int(counts[0, 0])


def _rows(path: Path, rows: int) -> Rows:
    """A table of float32 that is parsed when its blocks are asked for."""
    with reading(path):
        columns = _columns(path)
    return Rows((rows, columns), np.dtype(np.float32), lambda _scratch: _whole(path, rows, columns, np.float32))


def _whole(path: Path, rows: int, columns: int, dtype: Any) -> Iterator[NDArray[Any]]:
    """The blocks of a table of exactly so many rows and columns."""
    seen = 0
    with reading(path):
        for block in _blocks(path, dtype):
            seen += block.shape[0]
            if block.shape[1] != columns or seen > rows:
                raise ValueError(f"a table of {block.shape[1]} columns and more than {rows} rows")
            yield block
        if seen != rows:
            raise ValueError(f"{seen} rows instead of {rows}")


def _table(path: Path, rows: int, columns: int, parsed: Any, kept: Any, report: Report) -> NDArray[Any]:
    """A table of exactly ``rows`` rows, parsed as one type and kept as another."""
    with reading(path):
        table = np.empty((rows, columns), dtype=kept)
    filled = 0
    pace = Pace(report, f"reading {path.name}", rows, "rows")
    for block in _whole(path, rows, columns, parsed):
        if kept is np.int32 and block.size and (block.min() < 0 or block.max() > np.iinfo(np.int32).max):
            raise MgraphError(f"{path} has an edge to node {block.min()} or {block.max()}; it is not in the graph")
        table[filled : filled + block.shape[0]] = block
        filled += block.shape[0]
        pace.at(filled)
    return table
