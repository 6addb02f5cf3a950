"""The edge: frozen options, exit codes, one sentence for a failure, one JSON object, no torch where not needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from megagraph_cli import __version__, cli
from megagraph_cli.errors import EXIT_INFEASIBLE, EXIT_STALE, EXIT_UNEXPECTED, EXIT_USAGE, MgraphError
from tests.artifacts import examples

SHARED = {"--root", "--cache", "--json", "--yes", "--debug", "--recipe", "--dataset", "--set", "--device"}
HOSTS = {"--nnodes", "--node-rank", "--rdzv-endpoint"}
OPTIONS = {
    "data": SHARED | {"NAME"},
    "profile": SHARED | HOSTS | {"--gpus", "--quick", "--budget", "-o", "--out"},
    "fit": SHARED | {"PROFILE", "-o", "--out", "--force", "--with"},
    "validate": SHARED | HOSTS | {"--gpus", "--plans", "--steps", "--mem", "--cost-model", "-o", "--out", "--force"},
    "search": SHARED
    | {"--gpus", "--mem", "--cost-model", "-o", "--out", "--force", "--top"}
    | {"--pp", "--cp", "--dp", "--microbatches", "--schedule", "--layers", "--recompute", "--context"}
    | {"--explain", "--compare", "--report", "--trace"},
    "train": SHARED
    | HOSTS
    | {"--plan", "--epochs", "--max-steps", "--run-dir", "--resume", "--max-restarts"}
    | {"--dry-run", "--force", "--trace"},
}
"""The command line that users script against. It changes on purpose only, together with the contracts."""


@pytest.fixture(autouse=True)
def kept_environment() -> Iterator[None]:
    """The command line sets NUMBA_CACHE_DIR for its workers; other tests must not inherit it."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one call in this process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_the_command_line_is_frozen() -> None:
    group: Any = typer.main.get_command(cli.app)
    found = {}
    for name, command in group.commands.items():
        names: set[str] = set()
        for parameter in command.params:
            is_argument = parameter.param_type_name == "argument"
            names |= {str(parameter.metavar).strip("[]")} if is_argument else set(parameter.opts)
        found[name] = names
    assert found == OPTIONS


def test_version_and_help_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"mgraph {__version__}\n", "")
    for arguments in (["--help"], *([command, "--help"] for command in OPTIONS)):
        code, out, err = call(capsys, *arguments)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: mgraph")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], EXIT_USAGE, "no command given"),
        (["nonsense"], EXIT_USAGE, "nonsense"),
        (["data"], EXIT_USAGE, "NAME"),
        (["data", "nonsense"], EXIT_USAGE, "nonsense"),
        (["data", "demo", "--nonsense"], EXIT_USAGE, "--nonsense"),
        (["data", "demo", "--set", "nonsense"], EXIT_USAGE, "section.key=value"),
        (["data", "demo", "--dataset", "cora"], EXIT_USAGE, "--dataset says cora"),
        (["data", "demo", "--device", "tpu"], EXIT_USAGE, "--device"),
        (["profile"], EXIT_USAGE, "--dataset"),
        (["profile", "--dataset", "demo", "--gpus", "0"], EXIT_USAGE, "--gpus"),
        (["profile", "--dataset", "demo", "--gpus", "two"], EXIT_USAGE, "--gpus"),
        (["profile", "--dataset", "demo", "--gpus", "65", "--device", "cpu"], EXIT_USAGE, "64"),
        (["profile", "--dataset", "demo", "--device", "tpu"], EXIT_USAGE, "--device"),
        (["fit"], EXIT_USAGE, "profile.json"),
        (["fit", "none.json"], EXIT_USAGE, "mgraph profile"),
        (["search"], EXIT_USAGE, "cost_model.json"),
        (["search", "--mem", "0"], EXIT_USAGE, "--mem 0"),
        (["search", "--mem", "24"], EXIT_USAGE, "no unit"),
        (["search", "--layers", "3,x"], EXIT_USAGE, "--layers"),
        (["search", "--layers", "3,0"], EXIT_USAGE, "--layers"),
        (["search", "--schedule", "zigzag"], EXIT_USAGE, "--schedule"),
        (["search", "--explain", "pp=1", "--compare", "p.json"], EXIT_USAGE, "--explain and --compare"),
        (["search", "--explain", "pp=1", "--report", "r.html"], EXIT_USAGE, "--report r.html"),
        (["search", "--explain", "pp=1", "--trace", "t.json"], EXIT_USAGE, "--trace t.json"),
        (["search", "--compare", "p.json", "--report", "r.html"], EXIT_USAGE, "--report r.html"),
        (["search", "--compare", "p.json", "--trace", "t.json"], EXIT_USAGE, "--trace t.json"),
        (["search", "--cost-model", "fitted.json", "--dataset", "cora"], EXIT_STALE, "dataset.name"),
        (["search", "--cost-model", "fitted.json", "--device", "cuda"], EXIT_STALE, "cuda"),
        (["fit", "measured.json", "--device", "cuda"], EXIT_STALE, "cuda"),
        (["fit", "measured.json", "--recipe", "products"], EXIT_STALE, "products"),
        (["fit", "measured.json", "--set", "train.lr=0.75"], EXIT_STALE, "train.lr"),
        (["fit", "measured.json", "--set", "nonsense"], EXIT_USAGE, "section.key=value"),
        (["train"], EXIT_USAGE, "plan.json"),
        (["train", "--plan", "cut.json"], EXIT_USAGE, "whole JSON"),
        (["train", "--plan", "measured.json"], EXIT_STALE, "mgraph.plan/1"),
        (["train", "--epochs", "0"], EXIT_USAGE, "--epochs"),
    ],
)
def test_every_failure_is_one_sentence_with_its_code(
    arguments: list[str],
    code: int,
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    examples.profile().save(Path("measured.json"))
    examples.cost_model().save(Path("fitted.json"))
    Path("cut.json").write_text('{"schema": "mgra', encoding="utf-8")
    before = sorted(tmp_path.iterdir())

    found, out, err = call(capsys, *arguments)
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert err.startswith("mgraph: ")
    assert named in err

    found, out, err_again = call(capsys, *arguments, "--json")
    if arguments:  # the bare command has no --json of its own
        message = err.removeprefix("mgraph: ").removesuffix("\n")
        assert json.loads(out) == {"error": {"code": code, "message": message}}
        assert err_again == err
    assert sorted(tmp_path.iterdir()) == before


def test_details_of_an_error_stand_beside_its_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def infeasible(*_: object, **__: object) -> None:
        raise MgraphError("nothing fits; use --mem 187MiB", EXIT_INFEASIBLE, minimum_bytes=196083712)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megagraph_cli.commands.search.write", infeasible)
    code, out, _ = call(capsys, "search", "--json")
    assert code == EXIT_INFEASIBLE
    assert json.loads(out)["error"] == {
        "code": EXIT_INFEASIBLE,
        "message": "nothing fits; use --mem 187MiB",
        "minimum_bytes": 196083712,
    }


@pytest.mark.parametrize("debug", [False, True])
def test_an_unexpected_error_is_one_sentence_and_debug_shows_where(
    debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("megagraph_cli.recipes.resolve", broken)
    code, out, err = call(capsys, "data", "demo", *(["--debug"] if debug else []))
    assert (code, out) == (EXIT_UNEXPECTED, "")
    assert "unexpected ZeroDivisionError: two lines" in err
    assert "--debug" in err
    assert ("Traceback" in err) is debug
    assert debug or err.count("\n") == 1


def test_a_keyboard_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megagraph_cli.recipes.resolve", interrupt)
    code, out, err = call(capsys, "data", "demo", "--json")
    assert code == 130
    assert json.loads(out)["error"]["code"] == 130
    assert err.count("\n") == 1


def test_windows_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, err = call(capsys, "--version")
    assert code == EXIT_USAGE
    assert "Windows" in err


def test_data_prints_a_table_on_stderr_or_one_json_object_on_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = call(capsys, "data", "demo", "--cache", str(tmp_path))
    assert (code, out) == (0, "")
    assert "nodes" in err
    code, out, err = call(capsys, "data", "--dataset", "demo", "--cache", str(tmp_path), "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["train"] + facts["val"] + facts["test"] == facts["nodes"] - facts["unlabelled"]


def test_search_passes_on_what_it_was_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []

    def searched(request: object, out: Path, **places: Path | None) -> Any:
        told.extend([request, out, places])
        return SimpleNamespace(plan=examples.plan().save(out))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megagraph_cli.commands.search.write", searched)
    flags = "--gpus 4 --mem 24GB --cost-model c.json --pp 2 --cp 2 --dp 1 --microbatches 8 --schedule 1f1b"
    ways = "--recompute full --context allgather --report r.html --trace t.json"
    more = "--layers 3,5 --top 2 --set model.num_layers=8 --set batch.batch_size=64 --device cpu --json -o p.json"
    code, out, err = call(capsys, "search", *flags.split(), *ways.split(), *more.split())
    request, path, places = told
    assert (code, path) == (0, Path("p.json"))
    assert (request.gpus, request.mem_bytes, request.cost_model_path) == (4, 24 * 10**9, Path("c.json"))
    assert (request.pp, request.cp, request.dp, request.microbatches) == (2, 2, 1, 8)
    assert (request.schedule, request.layers, request.top, request.device) == ("1f1b", [3, 5], 2, "cpu")
    assert (request.recompute, request.context) == ("full", "allgather")
    assert places == {"report": Path("r.html"), "trace": Path("t.json")}
    assert request.overrides == {"model.num_layers": "8", "batch.batch_size": "64"}
    assert json.loads(out)["predicted"]["peak_bytes"] == 1000
    assert err.count("extrapolated") == 1


PEEK = """
import sys
from megagraph_cli import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    heavy = [name for name in ("torch", "numba", "torch_geometric", "pandas") if name in sys.modules]
    print("HEAVY", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--json"], ["search", "--json"], ["train", "--help"]])
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    # fit and search fail here for want of a file, after their modules were imported.
    done = subprocess.run(
        [sys.executable, "-c", PEEK, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "HEAVY []" in done.stderr


def test_a_reader_that_closes_the_pipe_is_met_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megagraph_cli.cli", "data", "demo", "--cache", str(tmp_path), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
