"""Parts of a kernel's call on several threads: each once, whoever runs it, and a part that fails is noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagraph_cli.model import threads
from megagraph_cli.model.entries import OWN, SHARED


def drop_nothing(parts: int, count: int) -> torch.Tensor:
    """Ones through the kernel that drops rows, with p = 0 and twice the scale, in ``parts`` parts."""
    x, out = torch.ones(parts, 3, 8), torch.zeros(parts, 3, 8)
    keys = torch.zeros(parts, dtype=torch.int64)
    shared = (x.data_ptr(), 0, out.data_ptr(), keys.data_ptr(), 3, 8, 0, -(2**31))
    threads.run("drop_rows", torch.float32, 2.0, shared, [(part, part + 1) for part in range(parts)], count)
    return out


@pytest.mark.parametrize("openmp", [True, False])
@pytest.mark.parametrize(("parts", "count"), [(1, 1), (5, 1), (2, 2), (7, 3), (2, 8)])
def test_every_part_is_done_once(parts: int, count: int, openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp and threads._openmp() is None:
        pytest.skip("torch runs on another OpenMP than GNU's here")
    if not openmp:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    assert torch.equal(drop_nothing(parts, count), torch.full((parts, 3, 8), 2.0))


def test_a_part_that_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, dtype: torch.dtype) -> Any:
        return SimpleNamespace(ctypes=id, address=0)

    monkeypatch.setattr(threads, "entry", entry)
    shared, part = [0] * SHARED["forward"], [0] * OWN["forward"]
    with pytest.raises(MemoryError, match="forward did 0 of 1 parts"):
        threads.run("forward", torch.float32, 1.0, shared, [part], 1)
