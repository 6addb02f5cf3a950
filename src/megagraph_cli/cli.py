"""The command line: six commands under one name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from megagraph_cli import __version__
from megagraph_cli.console import print_line
from megagraph_cli.edge import run_and_exit
from megagraph_cli.entry.data import data
from megagraph_cli.entry.fit import fit
from megagraph_cli.entry.profile import profile
from megagraph_cli.entry.search import search
from megagraph_cli.entry.train import train
from megagraph_cli.entry.validate import validate
from megagraph_cli.errors import MgraphError

app = typer.Typer(
    name="mgraph",
    help="Train graph transformers in parallel under a plan made for your machine: "
    "data, profile, fit, search, train, in this order; validate judges the cost model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print_line(f"mgraph {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise MgraphError("no command given; use data, profile, fit, search, train or validate, or see mgraph --help")


for command in (data, profile, fit, search, train, validate):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    run_and_exit(app, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
