"""The one exception type for mistakes a user can mend, and the exit codes of every command."""

from __future__ import annotations

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_INFEASIBLE = 3
EXIT_STALE = 4
EXIT_WORKER = 5
EXIT_INTERRUPTED = 130


class MgraphError(Exception):
    """A failure the user can act on: one sentence that names the thing at fault and the way out.

    Raised anywhere, handled once in ``edge.py``. ``details`` are extra fields for the ``--json`` error
    object (for example ``minimum_bytes`` of an infeasible search).
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.details = details
