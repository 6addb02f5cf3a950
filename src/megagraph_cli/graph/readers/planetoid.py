"""The planetoid files of Cora, Citeseer and PubMed: Python-2 pickles, read with an allow-list and nothing else.

Layout (github.com/kimiyoung/planetoid): ``ind.NAME.x/y`` the training nodes, ``allx/ally`` all nodes but the test
ones, ``tx/ty`` the test nodes in the order of ``test.index``, ``graph`` a dict of neighbour lists. Test ids that
``test.index`` leaves out (15 in Citeseer) have neighbours but neither features nor label: they keep label -1.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Masks
from megagraph_cli.graph.readers.files import reading
from megagraph_cli.graph.readers.raw import RawGraph

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_NUM_VAL = 500


class _PickledCsr:
    """Stands in for scipy's csr_matrix of any age: keeps the pickled state, runs no code of its own."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def matrix(self) -> sparse.csr_matrix:
        shape = self.state.get("_shape", self.state.get("shape"))
        data, indices, indptr = (self.state[key] for key in ("data", "indices", "indptr"))
        for array in (data, indices, indptr):
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iufb":
                raise ValueError("a sparse matrix without plain arrays")
        return checked_csr(data, indices, indptr, shape)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("scipy.sparse.csr", "csr_matrix"): _PickledCsr,
    ("scipy.sparse._csr", "csr_matrix"): _PickledCsr,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as Python 3 writes them into a pickle of protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding}")
    return text.encode("latin1")


_ALLOWED["_codecs", "encode"] = _encode


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file, encoding="latin1")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]
        if (module, name) not in _ALLOWED:
            raise MgraphError(
                f"{self._path} asks to load {module}.{name}, which no planetoid file needs, and is refused; "
                "replace it with a copy from a source you trust"
            )
        return _ALLOWED[module, name]


def checked_csr(data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], shape: Any) -> sparse.csr_matrix:
    """A CSR matrix whose arrays are known to fit each other. Raises ValueError saying what does not."""
    rows, columns = (int(size) for size in shape)
    if data.ndim != 1 or data.shape != indices.shape:
        raise ValueError(f"{data.size} values for {indices.size} column indices")
    if indices.dtype.kind not in "iu" or indptr.dtype.kind not in "iu":
        raise ValueError("row pointers or column indices that are not whole numbers")
    if indptr.shape != (rows + 1,) or int(indptr[0]) != 0 or int(indptr[-1]) != data.size:
        raise ValueError(f"row pointers that do not fit {rows} rows and {data.size} values")
    if bool((np.diff(indptr.astype(np.int64)) < 0).any()):
        raise ValueError("row pointers that decrease")
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= columns):
        raise ValueError(f"a column index beyond the {columns} columns")
    return sparse.csr_matrix((data, indices, indptr), shape=(rows, columns))


def _load(folder: Path, name: str, part: str) -> Any:
    path = folder / f"ind.{name}.{part}"
    with reading(path):
        if part == "test.index":
            return np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
        with path.open("rb") as file:
            value = _Unpickler(path, file).load()
        if part == "graph":
            return _entries(value)
        if isinstance(value, _PickledCsr):
            return value.matrix()
        if not isinstance(value, np.ndarray) or value.ndim != 2 or value.dtype.kind not in "iufb":
            raise ValueError("not a table of one-hot labels")
        return value


def _entries(neighbours: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The dict of neighbour lists as (tails, heads)."""
    if not isinstance(neighbours, dict):
        raise ValueError("not a dict of neighbour lists")
    nodes = np.array(list(neighbours), dtype=np.int64)
    lengths = [len(row) for row in neighbours.values()]
    heads = np.array(list(chain.from_iterable(neighbours.values())), dtype=np.int64)
    return np.repeat(nodes, lengths), heads


def read_planetoid(folder: Path, name: str) -> RawGraph:
    """The raw graph of ``folder/ind.NAME.*`` with its public split.

    Train = the first rows (``x``), validation = the next 500, test = the ids of ``test.index``.
    Raises MgraphError (exit 2) on a damaged or hostile file or parts that do not fit each other.
    """
    parts = {part: _load(folder, name, part) for part in PARTS}
    allx, tx, ally, ty, test = (parts[key] for key in ("allx", "tx", "ally", "ty", "test.index"))
    tails, heads = parts["graph"]
    origin = f"{folder}/ind.{name}.*"
    first = allx.shape[0]
    if not sparse.issparse(allx) or not sparse.issparse(tx) or tx.shape != (test.size, allx.shape[1]):
        raise MgraphError(f"{origin}: tx does not fit allx and test.index; replace the files with a whole copy")
    if ally.shape[0] != first or ty.shape != (test.size, ally.shape[1]):
        raise MgraphError(f"{origin}: ally and ty do not fit allx and test.index; replace the files with a whole copy")
    if test.size == 0 or int(test.min()) < first or np.unique(test).size != test.size:
        raise MgraphError(f"{origin}: test.index repeats an id or overlaps allx; replace the files with a whole copy")
    num_nodes = int(test.max()) + 1
    labels = np.full(num_nodes, -1, dtype=np.int64)
    labels[:first] = ally.argmax(axis=1)
    labels[test] = ty.argmax(axis=1)
    train, val, masked = (np.zeros((1, num_nodes), dtype=np.bool_) for _ in range(3))
    train[0, : parts["y"].shape[0]] = True
    val[0, parts["y"].shape[0] : min(parts["y"].shape[0] + _NUM_VAL, first)] = True
    masked[0, test] = True
    features = _place_rows(allx, tx, test, num_nodes)
    return RawGraph(origin, num_nodes, tails, heads, labels, features, Masks(train, val, masked))


def _place_rows(
    allx: sparse.csr_matrix, tx: sparse.csr_matrix, test: NDArray[np.int64], num_nodes: int
) -> sparse.csr_matrix:
    """Rows of ``allx`` first, then row i of ``tx`` at id ``test[i]``; ids in neither get an empty row."""
    order = np.argsort(test)
    lengths = np.zeros(num_nodes, dtype=np.int64)
    lengths[: allx.shape[0]] = np.diff(allx.indptr)
    lengths[test] = np.diff(tx.indptr)
    by_id = tx[order]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    data = np.concatenate([allx.data, by_id.data])
    indices = np.concatenate([allx.indices, by_id.indices])
    return sparse.csr_matrix((data, indices, indptr), shape=(num_nodes, allx.shape[1]))
