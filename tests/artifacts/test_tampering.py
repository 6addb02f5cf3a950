"""Artifacts that cannot lie: any single field changed is noticed when the next command reads it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megagraph_cli.artifacts.base import Artifact
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError
from tests.artifacts import examples

EXAMPLES = {
    "profile": examples.profile,
    "cost_model": examples.cost_model,
    "plan": examples.plan,
    "validation": examples.validation,
    "run": examples.run,
}


def changes_of(value: Any) -> Iterator[Any]:
    """Other values that a field could be given: of its own type, of none, and of a wrong one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, -1 - value)
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.25, value + 1e-9)
    elif isinstance(value, str):
        yield from (value + "x", "")
    elif isinstance(value, list):
        yield [*value, *value[:1]] if value else ["more"]
        if value:
            yield value[:-1]
    elif isinstance(value, dict):
        yield value | {"more": 1}
        if value:
            yield {key: kept for key, kept in value.items() if key != min(value)}
    yield "null" if value is None else None


def tampered(values: Any) -> Iterator[tuple[str, Any]]:
    """(where, the whole with one thing changed) for every field at any depth."""
    inside = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in inside:
        for change in changes_of(value):
            other = copy.copy(values)
            other[key] = change
            yield f"{key}: {change!r}"[:60], other
        if isinstance(value, dict | list):
            for where, changed in tampered(value):
                other = copy.copy(values)
                other[key] = changed
                yield f"{key}.{where}", other


def loading(kind: type[Artifact], path: Path) -> int | None:
    """The exit code with which loading fails; None where nothing is noticed."""
    try:
        kind.load(path)
    except MgraphError as error:
        return error.exit_code
    return None


def expected_code(kind: type[Artifact], values: dict[str, Any]) -> int:
    """In the order of the checks: schema (4), fields, types and sums (2), digest (4)."""
    if values.get("schema") != kind.SCHEMA:
        return EXIT_STALE
    try:
        kind.model_validate(values)
    except (ValidationError, MgraphError):
        return EXIT_USAGE
    return EXIT_STALE


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_single_field_changed_is_noticed(name: str, tmp_path: Path) -> None:
    artifact = EXAMPLES[name]()
    path = tmp_path / f"{name}.json"
    artifact.save(path)
    original = json.loads(path.read_text())
    seen: set[int | None] = set()
    for where, values in tampered(original):
        path.write_text(json.dumps(values))
        code = loading(type(artifact), path)
        assert code == expected_code(type(artifact), values), where
        seen.add(code)
    assert seen == {EXIT_USAGE, EXIT_STALE}
    path.write_text(json.dumps(original))
    type(artifact).load(path)


@pytest.mark.parametrize(
    ("name", "command", "field", "change"),
    [
        ("profile", ["fit", "profile.json"], ("machine", "overhead_bytes"), 1),
        ("cost_model", ["search", "--cost-model", "cost_model.json"], ("quality", "memory", "num_fit"), 99),
        ("cost_model", ["validate", "--cost-model", "cost_model.json"], ("quality", "memory", "num_fit"), 99),
        ("plan", ["train", "--plan", "plan.json", "--dry-run"], ("predicted", "peak_bytes"), 1),
        ("plan", ["train", "--plan", "plan.json", "--dry-run"], ("workload", "model", "hidden_dim"), 128),
        ("validation", ["fit", "--with", "validation.json"], ("plans", 0, "measured", "step_s"), 0.1),
    ],
)
def test_the_next_command_exits_4(
    name: str, command: list[str], field: tuple[Any, ...], change: Any, tmp_path: Path
) -> None:
    from tests.cost import planted

    planted.profile().save(tmp_path / "profile.json")
    path = tmp_path / f"{name}.json"
    if name != "profile":
        EXAMPLES[name]().save(path)
    values = json.loads(path.read_text())
    part = values
    for key in field[:-1]:
        part = part[key]
    assert part[field[-1]] != change
    part[field[-1]] = change
    path.write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, "-m", "megagraph_cli.cli", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_STALE, done.stderr
    assert f"{name}.json was changed after it was written" in done.stderr
