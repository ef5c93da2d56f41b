"""Writes docs/cli.md from the commands' own argument parsers: ``python tools/cli_docs.py``."""

from __future__ import annotations

import argparse
from pathlib import Path

from executorch_mlx.backends.mlx import inspect_pte
from executorch_mlx.examples.llm import bench_llm, export_llm, run_llm, run_llm_batched

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
COMMANDS = (export_llm.parser, run_llm.parser, run_llm_batched.parser, bench_llm.parser, inspect_pte.parser)
HEAD = """# Commands

Errors are one line on the standard error, with exit status 2 (a wrong flag prints the usage too). Ctrl-C ends a command
with status 130; in a conversation it ends the answer. This page is written by `tools/cli_docs.py` from what `--help`
prints.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(section(make()) for make in COMMANDS)])


def section(parser: argparse.ArgumentParser) -> str:
    """Return one command's description and the table of its flags."""
    rows = [row(parser, action) for action in parser._actions if "--help" not in action.option_strings]
    return "\n".join([f"## `{parser.prog}`", "", parser.description or "", "", "| flag | |", "|---|---|", *rows, ""])


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return a flag's line: how it is written, and its help."""
    if action.nargs == 0:
        value = ""
    elif action.choices:
        value = f" {{{','.join(map(str, action.choices))}}}"
    else:
        value = f" {action.metavar or action.dest.upper()}"
    flags = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{action.dest.upper()}`"
    text = (action.help or "") % {"default": action.default, "prog": parser.prog}
    required = " (required)" if action.required and action.option_strings else ""
    return f"| {flags} | {text}{required} |"


if __name__ == "__main__":
    PAGE.write_text(page())
