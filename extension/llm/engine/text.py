"""An answer's text as its tokens come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token: int) -> str:
        """Return the text that a token completes, which may be none."""


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def stream(self) -> TextStream:
        """Return a decoder for one answer."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""


class AnswerText:
    """One answer's text. What may be the beginning of a stop string is held back until it is certain.

    Attributes:
        text: what has been given out.
        is_stopped: whether a stop string has ended it.
    """

    def __init__(self, tokenizer: Detokenizer | None, stop: Sequence[str], tokens: list[int]) -> None:
        """Begin an empty text; without a tokenizer it stays empty.

        Args:
            tokenizer: decodes the tokens.
            stop: strings that end the answer; none of them empty.
            tokens: the answer's, to which each new one is appended before it is given to ``push``.
        """
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream() if tokenizer is not None else None
        self._tokens = tokens
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """Take the answer's last token; return the text that is certain now."""
        if self._tokenizer is None or self._stream is None:
            return ""
        try:
            self._held += self._stream.push(token)
        except Exception:  # a decoder raises what it likes for a token that does not follow the ones before
            self._held = self._rest(self._tokenizer).rstrip("\N{REPLACEMENT CHARACTER}")
            self._stream = self._tokenizer.stream()
        return self._give_certain()

    def finish(self) -> str:
        """End the answer; return the rest of its text."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        # The whole text also shows a character whose last bytes never came.
        self._held = self._rest(self._tokenizer)
        text = self._give_certain()
        return text if self.is_stopped else text + self._give(len(self._held))

    def _rest(self, tokenizer: Detokenizer) -> str:
        """Return what has not been given out of the text of all tokens."""
        whole = tokenizer.decode(self._tokens)
        return whole[len(self.text) :] if whole.startswith(self.text) else self._held

    def _give_certain(self) -> str:
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        self.is_stopped = bool(ends)
        return self._give(min(ends) if ends else len(self._held) - self._uncertain())

    def _uncertain(self) -> int:
        """Return how many last characters may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self.text += given
        return given
