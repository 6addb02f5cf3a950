"""``mgraph fit`` as a function: file in, file out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.commands import fit
from megagraph_cli.errors import MgraphError
from tests.cost import planted


def test_writes_what_it_returns_and_the_same_bytes_twice(tmp_path: Path) -> None:
    planted.profile().save(tmp_path / "profile.json")
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    returned = fit.run(tmp_path / "profile.json", first, force=False)
    fit.run(tmp_path / "profile.json", second, force=False)
    assert first.read_bytes() == second.read_bytes()
    assert CostModel.load(first) == returned
    assert [reference.name for reference in returned.inputs] == ["profile.json"]


def test_a_tampered_profile_is_stale_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    planted.profile().save(path)
    path.write_text(path.read_text().replace('"overhead_bytes": 200000000', '"overhead_bytes": 200000001'))
    with pytest.raises(MgraphError) as caught:
        fit.run(path, tmp_path / "out.json", force=False)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "out.json").exists()
    assert fit.run(path, tmp_path / "out.json", force=True).machine.overhead_bytes == 200_000_001


def test_fit_and_search_never_import_torch() -> None:
    code = (
        "import sys; import megagraph_cli.commands.fit, megagraph_cli.commands.search; "
        "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
