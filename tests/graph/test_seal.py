"""The account of a store's files: kept where the folder may be written, done without where it may not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagraph_cli.graph.seal import SEAL, is_sealed, seal

FILES = {"a.npy": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(5))
    return tmp_path


def test_a_file_that_was_touched_breaks_the_seal(folder: Path) -> None:
    assert not is_sealed(folder, FILES)
    seal(folder, FILES)
    assert is_sealed(folder, FILES)
    assert {path.name for path in folder.iterdir()} == {"a.npy", SEAL}
    np.save(folder / "a.npy", np.arange(5))
    assert not is_sealed(folder, FILES)


def test_a_read_only_file_system_stays_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There even removing what does not exist is refused, as a read-only file system and not as a missing file."""
    refused = []

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        refused.append(path.name)
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("write_text", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    seal(folder, FILES)
    assert len(refused) == 2
    assert not is_sealed(folder, FILES)
