"""What a store keeps of features, written and read again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.graph.coarsen import Coarse
from megagraph_cli.graph.featurestore import write_features
from megagraph_cli.graph.readers.features import checked
from megagraph_cli.graph.writer import ArrayWriter


def kept(
    given: Any,
    num_nodes: int,
    dtype: str = "float32",
    *,
    keep_sparse: bool = False,
    clusters: NDArray[np.int32] | None = None,
) -> NDArray[Any] | sparse.csr_matrix | None:
    """The rows of ``given`` and then those of super nodes, one a node without ``clusters``: an array, a CSR matrix (of
    float16 ones in float32: scipy has no others), or None where there are no features."""
    owner = np.arange(num_nodes, dtype=np.int32) if clusters is None else clusters
    nothing = np.zeros(0, np.int32)
    coarse = Coarse(owner, np.bincount(owner).astype(np.int32), np.zeros(owner.size + 1, np.int64), nothing)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        features = checked("file", given, num_nodes, dtype, keep_sparse=keep_sparse)
        write_features("file", features, coarse, dtype, ArrayWriter(folder))
        found = {path.stem.removeprefix("features_"): np.load(path) for path in folder.iterdir()}
    if not found or "x" in found:
        assert len(found) <= 1
        return found.get("x")
    assert found["data"].dtype == dtype
    shape = (found["indptr"].size - 1, given.shape[1])
    return sparse.csr_matrix((found["data"].astype(np.float32), found["indices"], found["indptr"]), shape=shape)
