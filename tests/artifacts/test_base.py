"""What every artifact promises: careful reading in a fixed order, a digest that sees any change, atomic writing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megagraph_cli.artifacts.base import Artifact, reference_to, write_text
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError
from tests.artifacts import examples

MAKERS: list[Callable[[], Artifact]] = [examples.profile, examples.cost_model, examples.plan, examples.run]
every_artifact = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def saved(make: Callable[[], Artifact], folder: Path) -> tuple[Artifact, Path]:
    path = folder / "artifact.json"
    return make().save(path), path


def load_fails(kind: type[Artifact], path: Path, *, force: bool = False) -> MgraphError:
    with pytest.raises(MgraphError) as caught:
        kind.load(path, force=force)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


@every_artifact
def test_what_is_saved_is_loaded_again(make: Callable[[], Artifact], tmp_path: Path) -> None:
    artifact, path = saved(make, tmp_path)
    assert type(artifact).load(path) == artifact
    first = path.read_bytes()
    type(artifact).load(path).save(path)
    assert path.read_bytes() == first


@every_artifact
def test_the_file_is_sorted_json_with_schema_version_inputs_and_digest(
    make: Callable[[], Artifact], tmp_path: Path
) -> None:
    artifact, path = saved(make, tmp_path)
    values = json.loads(path.read_text(encoding="utf-8"))
    assert list(values) == sorted(values)
    assert values["schema"] == artifact.SCHEMA
    assert {"mgraph_version", "inputs", "digest"} <= set(values)
    assert values["digest"] == artifact.digest


def leaves(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON tree that are no containers."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves(value, (*at, key))
    else:
        yield at


def changed(value: Any) -> Any:
    """Another value of the same type, valid almost everywhere."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value + 1
    return value / 2 if isinstance(value, float) else value + "x"


@every_artifact
def test_a_change_of_any_single_field_is_noticed(make: Callable[[], Artifact], tmp_path: Path) -> None:
    artifact, path = saved(make, tmp_path)
    original = path.read_text(encoding="utf-8")
    tampered = 0
    for at in leaves(json.loads(original)):
        values = json.loads(original)
        holder = values
        for key in at[:-1]:
            holder = holder[key]
        new = changed(holder[at[-1]])
        if new == holder[at[-1]]:
            continue
        holder[at[-1]] = new
        path.write_text(json.dumps(values), encoding="utf-8")
        # Fields and sums are checked first, so a change that makes nonsense exits 2, any other 4.
        assert load_fails(type(artifact), path).exit_code in (EXIT_USAGE, EXIT_STALE), at
        tampered += 1
    assert tampered > 20


@every_artifact
def test_checks_come_in_order_json_schema_fields_digest(make: Callable[[], Artifact], tmp_path: Path) -> None:
    artifact, path = saved(make, tmp_path)
    kind = type(artifact)
    good = json.loads(path.read_text(encoding="utf-8"))

    path.write_text(json.dumps(good)[:-5], encoding="utf-8")
    assert load_fails(kind, path).exit_code == EXIT_USAGE
    path.write_text(json.dumps(good | {"schema": "mgraph.other/9", "nonsense": 1, "digest": "x"}), encoding="utf-8")
    error = load_fails(kind, path)
    assert (error.exit_code, "mgraph.other/9" in error.message) == (EXIT_STALE, True)
    path.write_text(json.dumps(good | {"nonsense": 1, "digest": "x"}), encoding="utf-8")
    error = load_fails(kind, path, force=True)
    assert (error.exit_code, "nonsense" in error.message) == (EXIT_USAGE, True)
    path.write_text(json.dumps(good | {"digest": "0" * 64}), encoding="utf-8")
    assert load_fails(kind, path).exit_code == EXIT_STALE
    assert kind.load(path, force=True).canonical() == artifact.canonical()


@pytest.mark.parametrize("text", ["", "[1, 2]", "null", '"text"', "{", "[" * 100_000, "9" * 5000])
def test_what_is_no_artifact_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    assert load_fails(type(examples.plan()), path).exit_code == EXIT_USAGE


def test_missing_binary_and_folder_are_one_sentence(tmp_path: Path) -> None:
    kind = type(examples.profile())
    assert "mgraph profile" in load_fails(kind, tmp_path / "none.json").message
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in load_fails(kind, tmp_path / "binary.json").message
    assert load_fails(kind, tmp_path).exit_code == EXIT_USAGE


def test_a_type_that_is_wrong_names_field_and_value(tmp_path: Path) -> None:
    _, path = saved(examples.profile, tmp_path)
    values = json.loads(path.read_text(encoding="utf-8"))
    values["machine"]["num_devices"] = "two"
    path.write_text(json.dumps(values), encoding="utf-8")
    message = load_fails(type(examples.profile()), path).message
    assert "machine.num_devices" in message
    assert "'two'" in message


def test_a_write_that_cannot_be_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(MgraphError, match="cannot be written") as caught:
        examples.plan().save(tmp_path / "missing" / "plan.json")
    assert caught.value.exit_code == EXIT_USAGE
    (tmp_path / "plan.json").mkdir()  # the rename onto a folder fails after the temporary file was written
    with pytest.raises(MgraphError, match="cannot be written"):
        examples.plan().save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_read_only_folder_is_one_sentence_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the refusal is made rather than mounted.
    path = tmp_path / "plan.json"
    path.write_text("before", encoding="utf-8")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(MgraphError, match="Read-only file system"):
        examples.plan().save(path)
    assert path.read_text(encoding="utf-8") == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_new_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "text")
    (tmp_path / "b.txt").write_text("text", encoding="utf-8")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "b.txt").stat().st_mode


def test_an_input_is_referred_to_by_name_and_content(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"abc")
    reference = reference_to(path)
    assert reference.name == "profile.json"
    assert reference.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_model_with_an_impossible_coefficient_is_refused_and_named(value: float, tmp_path: Path) -> None:
    model = examples.cost_model()
    name, term = next(iter(model.terms.items()))
    broken = model.model_copy(update={"terms": {**model.terms, name: dict.fromkeys(term, value)}})
    path = tmp_path / "cost_model.json"
    path.write_text(broken.model_dump_json(by_alias=True), encoding="utf-8")
    with pytest.raises(MgraphError, match="terms") as caught:
        type(model).load(path, force=True)
    assert caught.value.exit_code == EXIT_USAGE
