"""What an earlier run left in its directory, whole or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagraph_cli.commands import rundir
from megagraph_cli.errors import EXIT_USAGE, MgraphError


@pytest.mark.parametrize("content", [b"[]", b'{"overrides": 1}', b"\xff\xfe", b'{"overrides": '])
def test_a_damaged_job_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / rundir.JOB).write_bytes(content)
    with pytest.raises(MgraphError, match=r"job\.json") as caught:
        rundir.overrides_of(tmp_path)
    assert caught.value.exit_code == EXIT_USAGE


def test_the_overrides_of_a_run_are_found_again(tmp_path: Path) -> None:
    assert rundir.overrides_of(tmp_path) == {}
    rundir.put_job(tmp_path, {"overrides": {"train.lr": 0.5}})
    assert rundir.overrides_of(tmp_path) == {"train.lr": 0.5}


def test_two_trainings_do_not_share_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / rundir.STOP).touch()
    with rundir.held(tmp_path):
        assert not (tmp_path / rundir.STOP).exists()
        (tmp_path / rundir.STOP).touch()
        with pytest.raises(MgraphError, match=str(tmp_path)) as caught, rundir.held(tmp_path):
            pytest.fail("a second training went on")
        assert caught.value.exit_code == EXIT_USAGE
        assert (tmp_path / rundir.STOP).exists()  # the first one's stop is not the second's to remove
    with rundir.held(tmp_path):
        assert not (tmp_path / rundir.STOP).exists()
