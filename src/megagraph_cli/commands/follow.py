"""Reading a file of JSON lines while a worker still writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Follower:
    """Gives each whole line of ``path`` once, as it appears; ``skip_existing`` passes over what is there already."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if skip_existing and path.exists() else 0

    def fresh(self) -> Iterator[dict[str, Any]]:
        """The lines that were completed since the last call; from the start again when the file was cut."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self._offset:
            self._offset = 0
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while line := file.readline():
                if not line.endswith(b"\n"):
                    return  # half a line: its rest comes with a later call
                self._offset += len(line)
                yield json.loads(line)
