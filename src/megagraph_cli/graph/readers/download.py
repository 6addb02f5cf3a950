"""Fetching missing raw files: aside first, then moved into place whole."""

from __future__ import annotations

import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megagraph_cli.errors import MgraphError
from megagraph_cli.units import format_bytes

_TIMEOUT_S = 30.0
_BLOCK_BYTES = 1 << 20
_REPORT_BYTES = 64 << 20


@dataclass(frozen=True)
class Remote:
    """One address and the files it yields: pairs of (member of the zip archive, file relative to the dataset's
    folder). A member of "" means that the address is the file itself."""

    url: str
    members: tuple[tuple[str, str], ...]


def fetch(
    name: str, remotes: Sequence[Remote], folder: Path, missing: Sequence[str], progress: Callable[[str], None]
) -> None:
    """Downloads the ``missing`` files of dataset ``name`` into ``folder``.

    Raises MgraphError (exit 2) without a network, on a damaged archive, or where ``folder`` cannot be written;
    no part of a file is left behind.
    """
    wanted = set(missing)
    created = _first_missing(folder)
    aside: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".download-", dir=folder))
        for remote in remotes:
            if wanted.isdisjoint(file for _, file in remote.members):
                continue
            progress(f"{name}: downloading {remote.url}")
            _fetch_one(remote, aside, wanted, progress)
        for file in missing:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (aside / file).replace(folder / file)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise MgraphError(
            f"{name} could not be downloaded ({getattr(error, 'reason', None) or error}); check the network or put "
            f"{missing[0]} into {folder} yourself"
        ) from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise MgraphError(f"{name}: the downloaded archive is damaged ({error}); try again later") from error
    except OSError as error:
        raise MgraphError(
            f"{name} could not be stored in {folder} ({error.strerror or error}); choose a writable --root"
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if created is not None and not any(path.is_file() for path in created.rglob("*")):
            shutil.rmtree(created, ignore_errors=True)


def _first_missing(folder: Path) -> Path | None:
    """The topmost folder that making ``folder`` would create: what to remove when nothing arrives."""
    missing = None
    for path in (folder, *folder.parents):
        if path.exists():
            break
        missing = path
    return missing


def _fetch_one(remote: Remote, aside: Path, wanted: set[str], progress: Callable[[str], None]) -> None:
    whole = aside / "whole"
    _stream(remote.url, whole, progress)
    for member, file in remote.members:
        if file not in wanted:
            continue
        (aside / file).parent.mkdir(parents=True, exist_ok=True)
        if member:
            with zipfile.ZipFile(whole) as archive, archive.open(member) as packed, (aside / file).open("wb") as out:
                shutil.copyfileobj(packed, out, _BLOCK_BYTES)
        else:
            whole.replace(aside / file)
    whole.unlink(missing_ok=True)


def _stream(url: str, path: Path, progress: Callable[[str], None]) -> None:
    """Copies ``url`` to ``path``; a connection that ends early is an error, not a short file."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as out:
        if response.headers.get_content_type() == "text/html":
            raise urllib.error.URLError("the server answered with a web page instead of the file")
        expected = response.headers.get("Content-Length")
        done = 0
        while block := response.read(_BLOCK_BYTES):
            out.write(block)
            if done // _REPORT_BYTES != (done + len(block)) // _REPORT_BYTES:
                whole = f" of {format_bytes(int(expected))}" if expected else ""
                progress(f"{url}: {format_bytes(done + len(block))}{whole}")
            done += len(block)
    if expected is not None and done != int(expected):
        raise http.client.IncompleteRead(b"", int(expected) - done)
