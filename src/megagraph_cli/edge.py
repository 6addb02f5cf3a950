"""The edge of the command line: whatever happens becomes one sentence and an exit code. The only place that exits."""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import typer

from megagraph_cli.console import flush_stdout, print_error, print_json
from megagraph_cli.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNEXPECTED, EXIT_USAGE, MgraphError


def run_and_exit(app: typer.Typer, arguments: Sequence[str]) -> NoReturn:
    """Run one command of ``app`` and exit with its code: 0, 1, 2, 3, 4, 5 or 130."""
    arguments = list(arguments)
    sys.exit(_guarded(app, arguments, as_json="--json" in arguments, debug="--debug" in arguments))


def _guarded(app: typer.Typer, arguments: list[str], *, as_json: bool, debug: bool) -> int:
    if not debug:  # one sentence on stderr, not a library's remarks
        warnings.simplefilter("ignore")
    try:
        code = _run(app, arguments)
        flush_stdout()
        return code
    except MgraphError as error:
        failure = error
    except (KeyboardInterrupt, typer.Abort):
        failure = MgraphError("interrupted; run the command again", EXIT_INTERRUPTED)
    except Exception as error:
        failure = _as_failure(error)
        if debug:
            traceback.print_exc()
    if debug and failure.exit_code != EXIT_UNEXPECTED:
        traceback.print_exception(failure)
    print_error(failure.message)
    if as_json:
        # Where stdout cannot be written, stderr has the sentence and the exit code stays the failure's own.
        with suppress(MgraphError):
            print_json({"error": {"code": failure.exit_code, "message": failure.message, **failure.details}})
    return failure.exit_code


def _run(app: typer.Typer, arguments: list[str]) -> int:
    if sys.platform == "win32":
        raise MgraphError("mgraph runs on Linux and macOS, not on Windows; use WSL or a container")
    signal.signal(signal.SIGTERM, _interrupt)
    result = typer.main.get_command(app).main(args=arguments, prog_name="mgraph", standalone_mode=False)
    if result == EXIT_INTERRUPTED:  # typer turned a KeyboardInterrupt into its own exit
        raise KeyboardInterrupt
    return result if isinstance(result, int) else EXIT_OK


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def _as_failure(error: Exception) -> MgraphError:
    """The sentence for an error that is not ours: typer's usage errors (exit 2), else an unexpected one (exit 1)."""
    format_message: Any = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own copy of click keeps its classes private
        said = " ".join(str(format_message()).replace("Value error, ", "").split()).rstrip(".")
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "mgraph"
        return MgraphError(f"{said[:1].lower()}{said[1:]}; see {command} --help", EXIT_USAGE)
    try:
        flush_stdout()  # what typer could not print there is still held
    except MgraphError as unwritable:
        return unwritable
    said = " ".join(str(error).split()) or "no message"
    return MgraphError(
        f"unexpected {type(error).__name__}: {said}; run it again with --debug to see the traceback", EXIT_UNEXPECTED
    )
