"""What is asked of the engine, and what becomes of it."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .sampling import GREEDY, Sampling
from .statistics import timings


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: one or more tokens.
        max_new_tokens: the most tokens to generate, of each sample.
        sampling: how tokens are chosen.
        stop_ids: tokens that end an answer; they are not part of it.
        stop: strings that end an answer; its text ends before them. Needs an engine with a tokenizer.
        n: samples of the prompt, which is computed once. Sample ``i`` draws with ``seed + i``.

    Raises:
        ValueError: a field is out of range.
        TypeError: a token is no integer.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    n: int = 1

    def __post_init__(self) -> None:
        prompt = tuple(map(operator.index, self.prompt))
        if not prompt:
            raise ValueError("the prompt has no tokens")
        for name in ("max_new_tokens", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop: expected a list of texts that are not empty, got {self.stop!r}")
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))

    def sampling_of(self, sample: int) -> Sampling:
        """Return how the tokens of one of the samples are chosen."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + sample)


@dataclass(eq=False)
class Completion:
    """One answer, as far as it has come.

    Attributes:
        request: what it answers.
        sample: which of the request's samples it is, from 0.
        tokens: new tokens; of an answer that a stop string has ended all up to the one that completed the string.
        text: their text, where the engine has a tokenizer.
        finish_reason: None while it goes on; then "stop" (a stop token or string), "length" (as many tokens as were
            asked for, or the end of the context or the cache), "cancelled", "refused" (the cache was full and the
            engine does not preempt) or "error".
        error: why it was refused or failed.
        shared_tokens: tokens of the prompt that another sequence had computed.
        preemptions: how often it had to give its room to older ones.
        submitted, started, first_token, finished: when, in seconds of ``time.perf_counter``; None where it has not
            happened.
    """

    request: Request
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    shared_tokens: int = 0
    preemptions: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Ask for the end of this answer, from any thread; the engine's next step frees what it holds."""
        self.is_cancelled = True

    def timings(self) -> dict[str, float]:
        """Return counts, seconds and rates (tokens per second), all that has happened so far."""
        now = time.perf_counter() if self.finished is None else self.finished
        started = now if self.started is None else self.started
        first_token = now if self.first_token is None else self.first_token
        later = max(len(self.tokens) - 1, 0)
        return {
            **timings(len(self.request.prompt), first_token - started, later, now - first_token),
            "shared_tokens": self.shared_tokens,
            "queued_s": round(started - self.submitted, 4),
            "preemptions": self.preemptions,
        }
