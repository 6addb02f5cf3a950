"""What people see: tables and progress on stderr, one JSON object on stdout. The only place commands print."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from megagraph_cli.errors import EXIT_UNEXPECTED, MgraphError

_WIDTH_OFF_TERMINAL = 200


class Bar(Protocol):
    """A running bar: ``at(done, what)`` moves it, ``total`` may become known on the way.

    ``left_s``: the seconds left where the work itself knows; else they follow from how fast it went.
    """

    def at(
        self, done: float, what: str | None = None, total: float | None = None, left_s: float | None = None
    ) -> None: ...


@dataclass
class _RichBar:
    progress: Progress
    task: TaskID
    _first: tuple[float, float] | None = None
    """When the bar was first moved and to where: what was done before (by a run that is resumed) took other time."""

    def at(self, done: float, what: str | None = None, total: float | None = None, left_s: float | None = None) -> None:
        self.progress.update(self.task, completed=done, total=total, description=None if what is None else escape(what))
        now_s, known = self.progress.get_time(), self.progress.tasks[self.progress.task_ids.index(self.task)].total
        if self._first is None:
            self._first = now_s, done
        begin_s, begin = self._first
        if left_s is None and known is not None and done > begin:
            left_s = (now_s - begin_s) / (done - begin) * (known - done)
        if left_s is not None:
            self.progress.update(self.task, ends_s=now_s + left_s)


class _TimeLeft(ProgressColumn):
    """How long it will take yet; goes down between two moves of the bar."""

    def render(self, task: Task) -> Text:
        ends_s = task.fields.get("ends_s")
        if ends_s is None:
            return Text("")
        left_s = max(0, math.ceil(ends_s - task.get_time()))
        return Text(f"{timedelta(seconds=left_s)} left", style="progress.remaining")


class _Console(Console):
    """A console whose reader may go away (``2>&1 | head``): what is printed then goes nowhere."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


@dataclass(frozen=True)
class Screen:
    """Where a command shows what it does. Progress is quiet where stderr is no terminal; tables never are."""

    console: Console

    @classmethod
    def stderr(cls) -> Screen:
        """The screen of the command line."""
        # Off a terminal rich assumes 80 columns and would fold cells that scripts look for.
        width = None if sys.stderr.isatty() else _WIDTH_OFF_TERMINAL
        return cls(_Console(stderr=True, highlight=False, soft_wrap=True, width=width))

    def note(self, text: str) -> None:
        """One plain line."""
        self.console.print(escape(text))

    def warn(self, text: str) -> None:
        """One line that starts with ``warning:``."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}")

    def step(self, text: str) -> None:
        """What is being done now, for people who watch."""
        if self.console.is_terminal:
            self.console.print(f"[dim]{escape(text)}[/]")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; all columns but the first are right-aligned. Empty column names: no header."""
        headed = any(columns)
        style = box.SIMPLE_HEAD if headed else None
        table = Table(
            title=escape(title),
            box=style,
            title_justify="left",
            show_header=headed,
            pad_edge=False,
            collapse_padding=True,
        )
        for index, column in enumerate(columns):
            table.add_column(escape(column), justify="right" if index else "left")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.console.print(table, soft_wrap=False)

    @contextmanager
    def bar(self, what: str, total: float | None = None) -> Iterator[Bar]:
        """A progress bar with the time gone and the time left, which goes away when it is left."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            _TimeLeft(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as progress:
            yield _RichBar(progress, progress.add_task(escape(what), total=total))


def print_json(values: Mapping[str, Any]) -> None:
    """One JSON object on stdout, in ASCII: paths that are no UTF-8 and terminals of any encoding must not break it."""
    print_line(json.dumps(values, sort_keys=True))


def print_line(text: str) -> None:
    """One line on stdout. Raises MgraphError (exit 1) where stdout cannot be written."""
    _write(sys.stdout, text + "\n")


def print_error(text: str) -> None:
    """One sentence on stderr."""
    _write(sys.stderr, f"mgraph: {text}\n")


def flush_stdout() -> None:
    """Write what stdout still holds. Raises MgraphError (exit 1) where it cannot be written."""
    _write(sys.stdout, "")


def _write(stream: TextIO | None, text: str) -> None:
    """Text on ``stream``; a reader that is gone (``| head``) or a stream closed from the start changes nothing."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # The interpreter flushes once more at its end: what is left goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if stream is sys.stderr or isinstance(error, BrokenPipeError):
            return  # nobody is there to be told
        raise MgraphError(
            f"standard output cannot be written ({error.strerror}); make room, or send it elsewhere", EXIT_UNEXPECTED
        ) from error
