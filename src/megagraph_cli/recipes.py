"""Recipes: found by name or file, changed with ``--set``, typed as artifacts.workload.Recipe."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megagraph_cli.artifacts.base import first_complaint
from megagraph_cli.artifacts.workload import Recipe, Workload
from megagraph_cli.errors import EXIT_STALE, MgraphError

DEFAULT = "default"
_LONGEST, _LONGEST_PART = 4000, 255
"""Characters of a path and bytes of one of its parts; a little below what Linux and macOS take."""
Overrides = Mapping[str, Any]
"""``section.key`` -> value."""


def recipe_folder() -> Path:
    """The recipes that ship: package data of a wheel, the repository's own in an editable install."""
    package = Path(__file__).parent
    shipped = package / "recipes"
    return shipped if shipped.is_dir() else package.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the recipes that ship."""
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))


def resolve(dataset: str | None, recipe: str | None, sets: Sequence[str]) -> Recipe:
    """The recipe of one call.

    ``recipe`` is a name or a file; ``dataset`` alone picks the recipe of that name or the default one, and beside
    ``recipe`` replaces its dataset. ``sets`` are ``section.key=value`` texts, applied last.
    Raises MgraphError (exit 2) naming file, key and the way out.
    """
    if dataset is None and recipe is None and not _names_dataset(sets):
        raise MgraphError("nothing says which graph; name one with --dataset or a recipe with --recipe")
    path = _find(recipe) if recipe is not None else _shipped(dataset if dataset in recipe_names() else DEFAULT)
    tables = _read(path)
    _refuse_odd_tables(tables, path)
    if dataset is not None:
        tables.setdefault("dataset", {})["name"] = _sayable(dataset)
    overrides = parse_sets(sets)
    for key, value in overrides.items():
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = value
    result = _typed(tables, path, overrides)
    name = absolute_dataset(result.dataset.name)
    return result.model_copy(update={"dataset": result.dataset.model_copy(update={"name": name})})


def _names_dataset(sets: Sequence[str]) -> bool:
    return any(text.strip().startswith("dataset.name=") for text in sets)


def absolute_dataset(name: str) -> str:
    """A dataset name as it is; the path of a user's own graph made absolute, so that later commands find it.

    Raises MgraphError (exit 2) where that path is no UTF-8 or longer than paths can be.
    """
    is_path = not name.startswith("synthetic:") and (name.endswith((".npz", ".pt")) or os.sep in name)
    return _sayable(str(Path(_sayable(name)).expanduser().resolve())) if is_path else name


def _sayable(name: str) -> str:
    """``name``, where it is UTF-8, as the artifacts that hold it are, and no longer than a path can be (exit 2)."""
    if len(name) > _LONGEST or max(map(_part_bytes, Path(name).parts), default=0) > _LONGEST_PART:
        raise MgraphError(f"dataset {name[:40]!r}... is too long for a name or a path; check it")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = name.encode("utf-8", "backslashreplace").decode("utf-8")
        raise MgraphError(f"dataset '{shown}' is not UTF-8, as artifacts must be; rename the file or folder") from error
    return name


def _part_bytes(part: str) -> int:
    return len(part.encode("utf-8", "surrogatepass"))


def parse_sets(sets: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """``section.key=value`` texts as ``{"section.key": value}``, the last of a key winning.

    Values are TOML; what is no TOML value is a string as it stands. Raises MgraphError (exit 2) on another form.
    """
    return {key: _value(value) for key, value in split_sets(sets, flag).items()}


def split_sets(sets: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """``section.key=value`` texts as ``{"section.key": "value"}``, values untouched. Raises as ``parse_sets``."""
    overrides: dict[str, str] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or key.count(".") != 1 or not all(key.split(".")):
            raise MgraphError(f"{flag} {text!r} is not section.key=value; write for example {flag} model.num_layers=16")
        section, name = key.split(".")
        if section not in Recipe.model_fields:
            raise MgraphError(f"{flag} {text!r}: a recipe has no section {section!r}; {_known(Recipe, section)}")
        if name not in _section(section).model_fields:
            raise MgraphError(f"{flag} {text!r}: {key} is no known key; {_known(_section(section), name)}")
        overrides[key] = value.strip()
    return overrides


def apply(recipe: Recipe, overrides: Overrides) -> Recipe:
    """``recipe`` with some keys changed. Raises MgraphError (exit 2) naming the key that cannot be so."""
    values = recipe.model_dump()
    for key, value in overrides.items():
        section, name = key.split(".")
        values[section][name] = value
    return _typed(values, None, overrides)


def sets_for(recipe: Recipe) -> tuple[str, ...]:
    """The ``--set`` texts that make ``--dataset NAME`` alone come to ``recipe``."""
    plain = _flat(resolve(recipe.dataset.name, None, ()))
    return tuple(f"{key}={value}" for key, value in _flat(recipe).items() if plain[key] != value)


def check_matches(
    workload: Workload, artifact: Path, *, dataset: str | None, recipe: str | None, sets: Sequence[str]
) -> None:
    """That what a later command was told agrees with the workload of the artifact it reads.

    ``dataset`` alone is compared by name, ``recipe`` as a whole, ``sets`` key by key; nothing told, nothing checked.
    Raises MgraphError (exit 4) naming the first key that differs.
    """
    asked: dict[str, Any] = dict(parse_sets(sets))
    if recipe is not None:
        asked = _flat(resolve(dataset, recipe, sets))
    elif dataset is not None:
        asked["dataset.name"] = dataset
    if "dataset.name" in asked:
        asked["dataset.name"] = absolute_dataset(str(asked["dataset.name"]))
    found = _flat(workload.recipe())
    for key, value in asked.items():
        if found[key] != value:
            raise MgraphError(
                f"{artifact} was made for {key} = {found[key]!r}, not {value!r}; run mgraph profile with the recipe "
                "you mean, or pass --force",
                EXIT_STALE,
            )


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in recipe.model_dump().items() for key, value in keys.items()}


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _find(recipe: str) -> Path:
    if recipe in recipe_names():
        return _shipped(recipe)
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    if recipe.endswith(".toml") or os.sep in recipe:
        raise MgraphError(f"there is no recipe file {recipe}; name a TOML file or one of {', '.join(recipe_names())}")
    close = difflib.get_close_matches(recipe, recipe_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"use a TOML file or one of {', '.join(recipe_names())}"
    raise MgraphError(f"there is no recipe {recipe!r}; {hint}")


def _shipped(name: str | None) -> Path:
    return recipe_folder() / f"{name}.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise MgraphError(f"recipe {path} is not TOML ({error}); mend it or copy one of {recipe_folder()}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise MgraphError(f"recipe {path} cannot be read ({reason}); name a readable TOML file") from error


def _refuse_odd_tables(tables: dict[str, Any], path: Path) -> None:
    for section, keys in tables.items():
        if section not in Recipe.model_fields:
            raise MgraphError(f"recipe {path}: {section} is no known section; {_known(Recipe, section)}")
        if not isinstance(keys, dict):
            raise MgraphError(f"recipe {path}: {section} is not a table; write [{section}] and its keys below")


def _typed(tables: dict[str, Any], path: Path | None, overrides: Overrides) -> Recipe:
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        raise MgraphError(_sentence(error, path, overrides)) from error


def _sentence(error: ValidationError, path: Path | None, overrides: Overrides) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    complaint = first_complaint(error)
    # A rule over several keys complains of the section; blame --set when it touched that section.
    from_flag = key in overrides or any(name.startswith(f"{key}.") for name in overrides)
    where = "--set " if from_flag else f"recipe {path}: "
    if key == "dataset" or (key == "dataset.name" and first["type"] == "missing"):
        return f"recipe {path} names no dataset; add --dataset NAME"
    if first["type"] == "extra_forbidden":
        section, _, name = key.partition(".")
        return f"{where}{complaint}; {_known(_section(section), name)}"
    if first["type"] == "value_error":  # our own sentences carry the way out
        return f"{where}{complaint}"
    return f"{where}{complaint}; change it {'there' if not from_flag else 'in the flag'}"


def _section(name: str) -> type[BaseModel]:
    annotation = Recipe.model_fields[name].annotation
    assert isinstance(annotation, type), name
    assert issubclass(annotation, BaseModel), name
    return annotation


def _known(table: type[BaseModel], name: str) -> str:
    close = difflib.get_close_matches(name, table.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(table.model_fields)}"
