"""PyG Data saved as .pt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph.readers.pyg import read_pt

torch = pytest.importorskip("torch")
Data = pytest.importorskip("torch_geometric.data").Data

EDGE_INDEX = torch.randint(0, 20, (2, 50), generator=torch.Generator().manual_seed(0))
X = (torch.arange(100).reshape(20, 5) % 3).float()
Y = torch.arange(20) % 4


@pytest.mark.parametrize("kind", ["dense", "csr", "coo", "none", "dict"])
def test_data_is_read(kind: str, tmp_path: Path) -> None:
    masks = {f"{part}_mask": torch.arange(20) % 3 == at for at, part in enumerate(("train", "val", "test"))}
    x = {"csr": X.to_sparse_csr(), "coo": X.to_sparse_coo(), "none": None}.get(kind, X)
    data: Any = {"x": x, "edge_index": EDGE_INDEX, "y": Y, **masks}
    torch.save(data if kind == "dict" else Data(**data), tmp_path / "g.pt")
    raw = read_pt(tmp_path / "g.pt")
    assert raw.num_nodes == 20
    np.testing.assert_array_equal(np.stack([raw.tails, raw.heads]), EDGE_INDEX.numpy())
    np.testing.assert_array_equal(raw.labels, Y.numpy())
    assert raw.masks is not None
    np.testing.assert_array_equal(raw.masks.val[0], masks["val_mask"].numpy())
    if kind == "none":
        assert raw.features is None
    elif kind in ("csr", "coo"):
        np.testing.assert_array_equal(raw.features.toarray(), X.numpy())
    else:
        np.testing.assert_array_equal(raw.features, X.numpy())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"edge_index": EDGE_INDEX}, "lacks edge_index"),
        ({"edge_index": EDGE_INDEX.T, "y": Y}, "lacks edge_index"),
        ({"edge_index": EDGE_INDEX, "y": [0, 1]}, "y that is not a dense tensor"),
        ([1, 2], "holds a list"),
        ({"edge_index": EDGE_INDEX, "y": Y, "fn": Path("x")}, "refused"),
    ],
)
def test_other_content_is_one_sentence(value: Any, expected: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "g.pt")
    with pytest.raises(MgraphError, match=expected) as caught:
        read_pt(tmp_path / "g.pt")
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.99])
def test_truncated_file_is_one_sentence(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "g.pt"
    torch.save(Data(x=X, edge_index=EDGE_INDEX, y=Y), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(MgraphError, match=r"g\.pt") as caught:
        read_pt(path)
    assert "\n" not in caught.value.message


def test_a_file_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "g.pt").write_text("hello", encoding="utf-8")
    with pytest.raises(MgraphError, match=r"g\.pt is truncated or damaged \(no entry 101\)"):
        read_pt(tmp_path / "g.pt")
