"""A conversation at the terminal, or by lines from a file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from . import command
from .conversation import Conversation

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives `input` line editing and history

HELP = """\
/undo [N]   forget the last question and its answer, or the last N
/reset      forget everything
/stats      say how long the conversation is and what the cache holds
/help       print this
/quit       end; so does the end of the input (Ctrl-D)
Ctrl-C stops an answer; what came of it is kept."""


def converse(
    conversation: Conversation,
    answer: Callable[[str], None],
    stats: Callable[[], str],
    *,
    prompt: str = "> ",
) -> None:
    """Answer lines of the standard input until it ends.

    Args:
        conversation: what the commands act on.
        answer: asks the conversation a line and prints the answer.
        stats: describes the cache.
        prompt: shown before each line, where the input is a terminal.
    """
    if sys.stdin.isatty():
        command.console.print("/help lists the commands", style="dim")
    for line in _lines(prompt if sys.stdin.isatty() else ""):
        try:
            if not line.startswith("/"):
                answer(line)
            elif not _obey(line.split(), conversation, stats):
                return
        except command.EXPECTED_ERRORS as error:
            command.show_error(error)


def _obey(words: list[str], conversation: Conversation, stats: Callable[[], str]) -> bool:
    """Carry out a command; return False if it ends the conversation."""
    match words:
        case ["/undo", *rest] if len(rest) <= 1 and all(word.isdecimal() for word in rest):
            conversation.undo(int(rest[0]) if rest else 1)
        case ["/reset"]:
            conversation.reset()
        case ["/stats"]:
            command.console.print(f"turns: {conversation.num_turns}; {stats()}", markup=False, soft_wrap=True)
        case ["/help"]:
            command.console.print(HELP, markup=False)
        case ["/quit"]:
            return False
        case _:
            raise ValueError(f"unknown command {' '.join(words)!r}; /help lists them")
    return True


def _lines(prompt: str) -> Iterator[str]:
    """Yield what is entered, without empty lines."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            command.console.print("\n(/quit ends the conversation)", style="dim")
            continue
        if line:
            yield line
