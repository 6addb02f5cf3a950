"""Feature rows in the form the store keeps: float32 or float16, sparse where that is smaller. A user's own CSR stays
CSR.

Legend: V nodes, Q clusters, F input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.rows import Rows, cuts, rows_of

SPARSE_BELOW = 0.25
"""Fraction of non-zero entries below which CSR rows are kept instead of dense ones: 8 bytes a non-zero entry against 4
an entry in float32, 6 against 2 in float16."""


def checked(
    origin: str,
    features: Rows | NDArray[Any] | sparse.csr_matrix | None,
    num_nodes: int,
    dtype: str = "float32",
    *,
    keep_sparse: bool = False,
) -> Rows | sparse.csr_matrix | None:
    """Features [V, F] whose shape and type are right; None where there are no columns. CSR is ``dtype``, float32 or
    float16, from here on, and stays CSR below 25 % density or with ``keep_sparse``. CSR features of float16 are float16
    numbers in a float32 array: scipy has no sparse float16. What is dense is read later (``finite_blocks``).

    Raises MgraphError (exit 2) on values that are not numbers, a wrong row count, or CSR with NaN or infinite values.
    """
    if features is None or (features.ndim == 2 and features.shape[1] == 0):
        return None
    if features.ndim != 2 or features.shape[0] != num_nodes:
        raise MgraphError(
            f"{origin} has features of shape {list(features.shape)} for {num_nodes} nodes; give one row a node"
        )
    if features.dtype.kind not in "fiub":
        raise MgraphError(f"{origin} has features of type {features.dtype}; store them as real numbers")
    if isinstance(features, Rows):
        return features
    if not sparse.issparse(features):
        return rows_of(features)
    result = _canonical_sparse(origin, features, dtype)
    keeps = keep_sparse or is_sparse(result.nnz, result.shape)
    return result if keeps else rows_of(result)


def is_sparse(nonzero: int, shape: tuple[int, ...]) -> bool:
    """Whether so many non-zero entries of a table are kept as CSR."""
    return nonzero < SPARSE_BELOW * shape[0] * shape[1]


def finite_blocks(origin: str, features: Rows, dtype: str, scratch: Path) -> Iterator[NDArray[Any]]:
    """Blocks of dense rows as ``dtype``, float32 or float16.

    Raises MgraphError (exit 2) on NaN or infinite values, and where the file turns out to be damaged.
    """
    first = 0
    for read in features.blocks(scratch):
        block = _rounded(read, dtype)
        _refuse_unless_finite(origin, block, first)
        first += block.shape[0]
        yield block
    assert first == features.shape[0], "readers yield all rows or raise"


def _refuse_unless_finite(origin: str, values: NDArray[Any], first_row: int | None) -> None:
    finite = np.isfinite(values)
    if bool(finite.all()):
        return
    where = "" if first_row is None else f" at node {first_row + int(np.argwhere(~finite)[0, 0])}"
    wider = " or set dataset.feature_dtype=float32" if values.dtype == np.float16 and np.isinf(values).any() else ""
    raise MgraphError(
        f"{origin} has a feature that is NaN or beyond {values.dtype}{where}; replace it with a finite number{wider}"
    )


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # what overflows becomes inf and is refused by name
        return values.astype(dtype, copy=False)


def _canonical_sparse(origin: str, features: sparse.csr_matrix, dtype: str) -> sparse.csr_matrix:
    data = _rounded(features.data, "float32")
    # A copy of the structure: sorting and summing below work in place and the caller's arrays may be mapped.
    result = sparse.csr_matrix((data, features.indices, features.indptr), shape=features.shape, copy=True)
    result.sum_duplicates()
    data = _rounded(result.data, dtype)
    _refuse_unless_finite(origin, data, None)
    result.data = data.astype(np.float32, copy=False)
    result.eliminate_zeros()
    return result


def super_blocks(
    features: sparse.csr_matrix, clusters: NDArray[np.int32], sizes: NDArray[np.int32]
) -> Iterator[sparse.csr_matrix]:
    """The mean of each cluster's CSR rows, float32 [Q, F] (paper: Coarsening), as sparse matrix products of some
    clusters each.

    Summed in float64, members in ascending order.
    """
    members = np.argsort(clusters, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    entries = np.concatenate([[0], np.cumsum(np.diff(features.indptr)[members], dtype=np.int64)])[starts]
    for first, last in cuts(entries):
        # Rows of their own: scipy widens all of what it multiplies to float64.
        rows = features[members[starts[first] : starts[last]]]
        weights = np.repeat(1.0 / sizes[first:last], sizes[first:last])
        places = (np.arange(rows.shape[0]), starts[first : last + 1] - starts[first])
        mean = sparse.csr_matrix((weights, *places), shape=(last - first, rows.shape[0])) @ rows
        mean.sort_indices()
        yield mean.astype(np.float32)
