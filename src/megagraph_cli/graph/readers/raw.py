"""What every reader hands over, and the checks that all of them share.

Legend: V nodes, N raw directed edge entries, F input features, P published splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Masks
from megagraph_cli.graph.readers.rows import Rows

MAX_NODES = 2**31 - 1


@dataclass(frozen=True)
class RawGraph:
    """A graph as its files hold it: edges as listed, labels as numbered, nothing removed yet.

    ``origin`` names the file (or dataset) in messages. ``tails`` and ``heads`` [N] are the ends of the directed
    entries; ``labels`` [V]; ``features`` [V, F] dense, to be read in blocks, or scipy CSR, None where there are
    none. ``keep_sparse``: CSR stays CSR however dense it is.
    """

    origin: str
    num_nodes: int
    tails: NDArray[Any]
    heads: NDArray[Any]
    labels: NDArray[Any]
    features: Rows | NDArray[Any] | sparse.csr_matrix | None
    masks: Masks | None
    keep_sparse: bool = False


def check_edges(
    origin: str, tails: NDArray[Any], heads: NDArray[Any], num_nodes: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Both ends of the raw entries as int32 [N].

    Raises MgraphError (exit 2) on ends that are not whole numbers, of unequal length, negative, or beyond the
    node count.
    """
    if tails.shape != heads.shape or tails.ndim != 1:
        raise MgraphError(
            f"{origin} lists {tails.size} edge starts but {heads.size} edge ends; give both the same length"
        )
    if num_nodes > MAX_NODES:
        raise MgraphError(f"{origin} has {num_nodes} nodes; at most {MAX_NODES} are supported")
    for ends in (tails, heads):
        if ends.dtype.kind not in "iu":
            raise MgraphError(f"{origin} numbers its edges' nodes as {ends.dtype}; store them as whole numbers")
        if ends.size and int(ends.min()) < 0:
            raise MgraphError(f"{origin} has an edge to node {int(ends.min())}; node numbers start at 0")
        if ends.size and int(ends.max()) >= num_nodes:
            raise MgraphError(
                f"{origin} has an edge to node {int(ends.max())} but only {num_nodes} nodes (0 to {num_nodes - 1}); "
                "mend the edges or add the missing nodes"
            )
    return tails.astype(np.int32, copy=False), heads.astype(np.int32, copy=False)


def compact_labels(origin: str, labels: NDArray[Any], num_nodes: int) -> tuple[NDArray[np.int64], int]:
    """Labels int64 [V] compacted to 0..C-1 in ascending order of the raw labels, -1 kept; and C.

    Raises MgraphError (exit 2) on a label below -1, one that is not whole, or a wrong number of labels.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (num_nodes,):
        raise MgraphError(
            f"{origin} has labels of shape {list(labels.shape)} for {num_nodes} nodes; give one label a node"
        )
    if labels.dtype.kind not in "iufb":
        raise MgraphError(f"{origin} has labels of type {labels.dtype}; store them as whole numbers, -1 for none")
    with np.errstate(invalid="ignore"):  # NaN casts to something that differs from it, and is refused below
        whole = labels.astype(np.int64)
    if labels.dtype.kind == "f" and not np.array_equal(whole, labels):
        raise MgraphError(f"{origin} has a label that is not a whole number; number the classes from 0, -1 for none")
    if whole.size and int(whole.min()) < -1:
        raise MgraphError(f"{origin} has the label {int(whole.min())}; use 0 and above for classes, -1 for none")
    labelled = whole >= 0
    values, compact = np.unique(whole[labelled], return_inverse=True)
    result = np.full(num_nodes, -1, dtype=np.int64)
    result[labelled] = compact
    return result, int(values.size)


def stack_masks(
    origin: str, num_nodes: int, train: NDArray[Any] | None, val: NDArray[Any] | None, test: NDArray[Any] | None
) -> Masks | None:
    """Three masks of shape [V], [V, P] or [P, V] as bool [P, V]; None where no mask is given.

    Raises MgraphError (exit 2) when only some are given, on a shape that does not fit, or values besides 0 and 1.
    """
    given = {"train": train, "val": val, "test": test}
    present = {part: mask for part, mask in given.items() if mask is not None}
    if not present:
        return None
    if len(present) < 3:
        missing = next(part for part in given if part not in present)
        raise MgraphError(f"{origin} has a {next(iter(present))} mask but no {missing} mask; give all three or none")
    stacked = {part: _mask_rows(origin, part, mask, num_nodes) for part, mask in present.items()}
    if len({mask.shape for mask in stacked.values()}) > 1:
        raise MgraphError(f"{origin} has train, val and test masks of different shapes; give all three the same shape")
    return Masks(**stacked)


def _mask_rows(origin: str, part: str, mask: NDArray[Any], num_nodes: int) -> NDArray[np.bool_]:
    if mask.ndim == 1:
        mask = mask[None, :]
    elif mask.ndim == 2 and mask.shape[1] != num_nodes:
        mask = mask.T
    if mask.ndim != 2 or mask.shape[1] != num_nodes:
        raise MgraphError(
            f"{origin} has a {part} mask of shape {list(mask.shape)} for {num_nodes} nodes; give one value a node"
        )
    if mask.dtype.kind not in "biu" or bool(((mask != 0) & (mask != 1)).any()):
        raise MgraphError(f"{origin} has a {part} mask with values besides 0 and 1; store it as booleans")
    return np.ascontiguousarray(mask.astype(np.bool_))
