"""What every artifact shares: versioned schema, provenance, digest, atomic writing and careful reading."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megagraph_cli import __version__
from megagraph_cli.errors import EXIT_STALE, EXIT_USAGE, MgraphError

WITH_OUT = "give a writable place with --out"


class Part(BaseModel):
    """A table inside an artifact: frozen, strictly typed, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class InputReference(Part):
    """One file that an artifact was made from."""

    name: str
    sha256: str


class Artifact(Part):
    """A JSON file that one command writes and the next reads (contracts.md, "Artifacts")."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        serialize_by_alias=True,
    )
    SCHEMA: ClassVar[str]
    MADE_BY: ClassVar[str]
    """The command that writes it, named in error messages."""
    WAY_OUT: ClassVar[str] = WITH_OUT
    """What to do when it cannot be written."""

    schema_version: str = Field(alias="schema")
    mgraph_version: str = __version__
    inputs: list[InputReference] = []
    digest: str | None = None

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values by their file names, without the digest."""
        values: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        values.pop("digest")
        return values

    def sealed(self) -> Self:
        """The same artifact with the right digest."""
        return self.model_copy(update={"digest": digest_of(self.canonical())})

    def save(self, path: Path, way_out: str | None = None) -> Self:
        """Write atomically with a right digest; nothing half-written is ever seen under ``path``.

        Raises MgraphError (exit 2) that advises ``way_out`` when the folder refuses.
        """
        sealed = self.sealed()
        values = sealed.canonical() | {"digest": sealed.digest}
        write_text(
            path, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", way_out or self.WAY_OUT
        )
        return sealed

    def digest_matches(self) -> bool:
        return self.digest is not None and self.digest == digest_of(self.canonical())

    @classmethod
    def load(cls, path: Path, *, force: bool = False) -> Self:
        """Read and check: whole JSON (2), schema version (4), fields and sums (2), digest (4, unless ``force``)."""
        values = read_json(path, cls.MADE_BY)
        cls._check_schema(values, path)
        try:
            artifact = cls.model_validate(values)
        except ValidationError as error:
            raise MgraphError(f"{path}: {first_complaint(error)}; mend it or run {cls.MADE_BY} again") from error
        except MgraphError as error:
            raise MgraphError(f"{path}: {error.message}", error.exit_code) from error
        # Of what stands in the file: a key that is left out takes its default, and that too is a change.
        written = {name: value for name, value in values.items() if name != "digest"}
        if not force and artifact.digest is not None and artifact.digest != digest_of(written):
            raise artifact.changed(path)
        artifact.check_digest(path, force=force)
        return artifact

    @classmethod
    def _check_schema(cls, values: Any, path: Path) -> None:
        if not isinstance(values, dict):
            raise MgraphError(f"{path} holds no JSON object; make it again with {cls.MADE_BY}")
        found = values.get("schema")
        if found != cls.SCHEMA:
            said = "no schema" if found is None else f"schema {found!r}"
            raise MgraphError(
                f"{path} has {said} but this mgraph reads {cls.SCHEMA!r}; make it again with {cls.MADE_BY}",
                EXIT_STALE,
            )

    def check_digest(self, path: Path, *, force: bool) -> None:
        if not force and not self.digest_matches():
            raise self.changed(path)

    def changed(self, path: Path) -> MgraphError:
        """The error of a file that is not as it was written."""
        return MgraphError(
            f"{path} was changed after it was written (its digest does not match); make it again with {self.MADE_BY}",
            EXIT_STALE,
        )


def digest_of(values: dict[str, Any]) -> str:
    """sha256 of canonical JSON: sorted keys, no spaces, UTF-8."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path, made_by: str) -> Any:
    """Parsed JSON of a file; one sentence (exit 2) when it is missing, unreadable or cut."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MgraphError(f"there is no {path}; make it with {made_by}, or name another file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise MgraphError(f"{path} cannot be read ({reason}); name a readable file") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise MgraphError(f"{path} is not whole JSON ({error}); make it again with {made_by}") from error


def write_text(path: Path, text: str, way_out: str = WITH_OUT) -> None:
    """Write ``text`` to a temporary sibling and rename it.

    Raises MgraphError (exit 2) that advises ``way_out`` when the folder refuses.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise MgraphError(f"{path} cannot be written ({error.strerror}); {way_out}", EXIT_USAGE) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reference_to(path: Path) -> InputReference:
    """Name and sha256 of an input file as it lies on disk."""
    return InputReference(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def first_complaint(error: ValidationError) -> str:
    """The first of pydantic's complaints as ``section.key: what is wrong (got value)``."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "extra_forbidden":
        return f"{where} is no known key"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "value_error":
        return f"{where}: {what}" if where else what
    got = repr(first.get("input"))
    return f"{where}: {what[:1].lower()}{what[1:]} (got {got if len(got) < 60 else got[:57] + '...'})"
