"""The house: imports point down only, the environment is read at its two doors, printing has one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "megagraph_cli"
FILES = sorted(SOURCE.rglob("*.py"))
BASE = {"errors", "units", "__init__"}
SHARED = BASE | {"layout", "artifacts"}
FLOORS = {
    # part: what it may import besides itself
    "errors": set(),
    "units": {"errors"},
    "cgroups": set(),
    "hostmemory": {"cgroups"},
    "__init__": set(),
    "layout": BASE,
    "artifacts": BASE | {"layout"},
    "cost": SHARED,
    "graph": SHARED | {"hostmemory"},
    "backward": set(),
    "model": SHARED | {"backward"},
    "parallel": SHARED | {"backward"},
    "runtime": SHARED | {"hostmemory", "parallel", "model", "graph"},
    "machine": SHARED | {"cgroups"},
    "console": SHARED,
    "failures": SHARED,
    "processes": set(),
    "tether": set(),
    "hosts": SHARED | {"failures"},
    "launch": SHARED | {"failures", "hosts", "machine", "processes", "tether"},
    "recipes": SHARED,
    "options": set(),
    "kernelcache": set(),
    "commands": SHARED | {"cost", "graph", "launch", "console", "hosts", "machine", "failures", "recipes"},
    "edge": SHARED | {"console"},
    "folders": SHARED | {"commands", "kernelcache"},
    "entry": SHARED | {"commands", "console", "hosts", "recipes", "options", "folders"},
    "cli": SHARED | {"console", "edge", "entry"},
}


def part_of(path: Path) -> str:
    """The floor a file stands on: its folder, or its own name at the top."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file, inside functions and for types too."""
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(found, ast.Import):
            yield from ((found.lineno, alias.name) for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"{path}:{found.lineno}: relative imports hide the floor"
            module = found.module or ""
            yield found.lineno, module
            yield from ((found.lineno, f"{module}.{alias.name}") for alias in found.names)


def ours(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of the package's own parts that a file imports."""
    parts = {part_of(each) for each in FILES}
    for line, module in imports_of(path):
        names = module.split(".")
        if names[0] == "megagraph_cli" and len(names) > 1 and names[1] in parts:
            yield line, names[1]


def test_every_part_has_its_floor() -> None:
    assert {part_of(path) for path in FILES} <= set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down_only(path: Path) -> None:
    part = part_of(path)
    allowed = FLOORS[part] | {part}
    wrong = [f"line {line}: {part} must not import {other}" for line, other in ours(path) if other not in allowed]
    assert wrong == []


@pytest.mark.parametrize("part", ["cost", "graph", "artifacts", "layout", "commands"])
def test_torch_is_no_module_level_import_below_the_runtime(part: str) -> None:
    for path in (SOURCE / part).rglob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            heavy = [name for name in names if name.split(".")[0] in ("torch", "torch_geometric", "pandas")]
            assert heavy == [], path


def test_the_environment_is_read_at_its_doors_alone() -> None:
    # launch.py hands the caller's environment on to the workers; it looks nothing up.
    doors = {"folders.py", "launch.py", "processes.py", "runtime/setup.py"}
    found = set()
    for path in FILES:
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_environ = isinstance(each, ast.Attribute) and each.attr in ("environ", "getenv")
            if is_environ and isinstance(each.value, ast.Name) and each.value.id == "os":
                found.add(str(path.relative_to(SOURCE)))
    assert found <= doors


def test_only_the_console_prints() -> None:
    for path in FILES:
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "print":
                assert path.name == "console.py", f"{path}:{each.lineno}"


def test_only_the_edge_exits() -> None:
    for path in FILES:
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Attribute) and each.attr == "exit" and isinstance(each.value, ast.Name):
                assert (each.value.id, path.name) == ("sys", "edge.py"), f"{path}:{each.lineno}"


SPEAKS_FOR_ITSELF = 8
"""A public function of so few lines may do without a docstring when its name and types say all."""


def lines_of(function: ast.FunctionDef) -> int:
    """Lines of a function, signature included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and not each.name.startswith("_"):
            yield each


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_public_functions_say_what_they_do(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body
    silent = [
        each.name
        for each in public_functions(tree)
        if isinstance(each, ast.FunctionDef) and not ast.get_docstring(each) and lines_of(each) > SPEAKS_FOR_ITSELF
    ]
    assert silent == []


def test_the_runtime_is_named_as_a_string_alone() -> None:
    """The process boundary: nothing above imports a worker, it names the module for torchrun."""
    workers = {f"megagraph_cli.runtime.{name}" for name in ("train", "profile", "validate")}
    named = {
        each.value
        for path in (SOURCE / "commands").rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.startswith("megagraph_cli.r")
    }
    assert named == workers
    for worker in workers:
        assert (SOURCE / "runtime" / f"{worker.rpartition('.')[2]}.py").exists()
