"""Continuous batching: every step is one flat forward over the tokens of all running sequences."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from executorch_mlx.extension.llm.cache import BatchControl, CacheSession

from .request import Completion, Request
from .sampling import Sampler
from .scheduler import Chunk, Job, Scheduler
from .statistics import Statistics
from .text import AnswerText, Detokenizer

WHEN_FULL = ("preempt", "refuse")


class Model(Protocol):
    """A language model whose attention uses the active session's cache.

    Attributes:
        max_context: the longest sequence.
        max_step: the most tokens of one step.
        vocab_size: tokens are from 0 on, below it.
    """

    max_context: int
    max_step: int
    vocab_size: int

    def step(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Any:
        """Run one step; return the logits of the wanted rows, an array [rows, vocabulary] that numpy can read."""

    def step_greedy(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Run one step; return the likeliest next token of each wanted row (any, where its logits are NaN)."""


@dataclass(frozen=True)
class Update:
    """What a step has brought for one answer.

    Attributes:
        completion: the answer.
        token: a new token, or None where it ended without one.
        text: text that is certain now.
        finish_reason: why this is its last update; None where it is not.
    """

    completion: Completion
    token: int | None
    text: str
    finish_reason: str | None = None


@dataclass(eq=False)
class _Answer:
    """What the engine knows of an answer under way."""

    completion: Completion
    job: Job
    sampler: Sampler
    text: AnswerText


class Engine:
    """Answers requests, many in each step.

    ``submit``, ``keep`` and ``Completion.cancel`` may be called from any thread, at any moment; they take effect when
    the next step begins. ``step`` may, too; calls take turns. Where the model's step raises, or is interrupted, nothing
    is lost: the same tokens are computed when ``step`` is called again, and what had ended before is reported then.
    """

    def __init__(
        self,
        model: Model,
        cache: BatchControl,
        *,
        tokenizer: Detokenizer | None = None,
        step_tokens: int | None = None,
        max_running: int | None = None,
        when_full: str = "preempt",
    ) -> None:
        """Begin with nothing to do.

        Args:
            model: computes the steps.
            cache: an empty cache with the model's layers; nothing else may use it.
            tokenizer: gives answers their text; None leaves it empty.
            step_tokens: the most tokens of a step; None for the model's own limit. Fewer make those steps shorter in
                which prompts arrive.
            max_running: the most sequences that run at once; None for as many as a step and the cache take.
            when_full: what becomes of the newest sequence when the cache is full: "preempt" computes it again later,
                "refuse" ends it.

        Raises:
            TypeError: the cache is not one for many sequences.
            ValueError: an unknown policy, a number out of range, or a cache that holds something.
        """
        if not isinstance(cache, BatchControl):
            raise TypeError(f"expected a cache of a batched kind, got {type(cache).__name__}")
        if cache.free != cache.capacity:
            raise ValueError(f"expected an empty cache, got one that holds {cache.capacity - cache.free} tokens")
        most = model.max_step
        step_tokens = most if step_tokens is None else step_tokens
        if not 1 <= step_tokens <= most:
            raise ValueError(f"step_tokens: expected 1 to {most}, the model's limit, got {step_tokens}")
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running: expected 1 or more, got {max_running}")
        if when_full not in WHEN_FULL:
            raise ValueError(f"when_full: expected one of {', '.join(WHEN_FULL)}, got {when_full!r}")
        self.statistics = Statistics()
        self._model = model
        self._cache = cache
        self._tokenizer = tokenizer
        self._refuses = when_full == "refuse"
        self._scheduler = Scheduler(cache, step_tokens, min(step_tokens, max_running or step_tokens))
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._inbox: deque[_Answer | Job] = deque()
        self._answers: dict[Job, _Answer] = {}
        self._updates: list[Update] = []

    # -- requests ----------------------------------------------------------

    def submit(self, request: Request) -> tuple[Completion, ...]:
        """Take a request; return its answers, one per sample, which the next steps fill.

        Raises:
            ValueError: it can never be answered: the prompt is longer than the model's context or the cache, a token
                lies outside the vocabulary, or there are stop strings and no tokenizer.
        """
        room = self._check(request.prompt, "prompt")
        if request.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the engine one")
        # The last new token is never fed back, so that it needs no room.
        budget = min(request.max_new_tokens, room - len(request.prompt) + 1)
        limit = len(request.prompt) + budget - 1
        completions = tuple(Completion(request, sample) for sample in range(request.n))
        self._inbox.extend(
            _Answer(
                completion,
                Job((1, next(self._numbers)), request.prompt, limit, completion.tokens),
                Sampler(request.sampling_of(completion.sample)),
                AnswerText(self._tokenizer, request.stop, completion.tokens),
            )
            for completion in completions
        )
        return completions

    def keep(self, prefix: Sequence[int]) -> None:
        """Compute a common beginning of prompts once, and keep it in the cache for all requests that begin with it.

        Running sequences share their beginnings without being asked to; a prefix outlives them. It is older than any
        request, takes its tokens of the cache's capacity, and is given up where a sequence that runs alone needs them.

        Raises:
            ValueError: it is empty, too long, or a token lies outside the vocabulary.
        """
        tokens = tuple(prefix)
        if not tokens:
            raise ValueError("the prefix has no tokens")
        self._check(tokens, "prefix")
        self._inbox.append(Job((0, next(self._numbers)), tokens, len(tokens), is_prefix=True))

    @property
    def num_running(self) -> int:
        """Answers that the next step will advance."""
        return sum(not job.is_prefix for job in self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait for room."""
        return len(self._inbox) + sum(not job.is_prefix for job in self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._updates or self._scheduler.waiting or self._scheduler.running)

    def close(self) -> None:
        """Cancel everything and free the cache; the engine may be used again."""
        with self._lock:
            self._receive()
            for answer in list(self._answers.values()):
                self._finish(answer, "cancelled")
            self._scheduler.clear()
            self._updates = []

    # -- steps -------------------------------------------------------------

    def run(self) -> Iterator[Update]:
        """Step until nothing is left to do; yield what comes."""
        while self.has_work:
            yield from self.step()

    def step(self) -> list[Update]:
        """Run one forward; return what it has brought, and what ended before it.

        Raises:
            CacheFullError: something else uses the engine's cache.
            Exception: whatever the model's step raises.
        """
        with self._lock:
            self._receive()
            for answer in list(self._answers.values()):
                if answer.completion.is_cancelled:
                    self._finish(answer, "cancelled")
            plan = self._scheduler.plan()
            for job in plan.begun:
                self._note_begun(job)
            for job in plan.preempted:
                self._note_preempted(job)
            if plan.chunks:
                self._forward(plan.chunks)
            updates, self._updates = self._updates, []
            return updates

    def _receive(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Answer):
                self._answers[item.job] = item
                self._scheduler.add(item.job)
            elif all(item.prompt != job.prompt for job in self._prefixes()):
                self._scheduler.add(item)

    def _prefixes(self) -> list[Job]:
        scheduler = self._scheduler
        return [job for job in (*scheduler.kept, *scheduler.running, *scheduler.waiting) if job.is_prefix]

    def _forward(self, chunks: Sequence[Chunk]) -> None:
        began = time.perf_counter()
        chosen = self._compute(chunks)
        self._count(chunks, len(chosen), time.perf_counter() - began)
        self._scheduler.commit(chunks)
        for answer, token in chosen:
            self._accept(answer, token)

    def _compute(self, chunks: Sequence[Chunk]) -> list[tuple[_Answer, int | ValueError]]:
        """Run a step; return each answer whose next token is due, with the token or with why there is none."""
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in chunk.positions]
        ends = itertools.accumulate(chunk.size for chunk in chunks)
        due = {
            end - 1: self._answers[chunk.job]
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.is_last and not chunk.job.is_prefix
        }
        if not self._cache.declare_step([seq_id for chunk in chunks for seq_id in chunk.seq_ids]):
            raise RuntimeError("the cache refused a step that it could have taken: something else has changed it")
        # Where no token is due, any method will do: one that is used anyway.
        is_greedy = all(answer.sampler.is_greedy for answer in (due or self._answers).values())
        run = self._model.step_greedy if is_greedy else self._model.step
        with CacheSession(self._cache):
            # A step has one row at least.
            outputs = run(tokens, positions, list(due) or [0])
        if is_greedy:
            return list(zip(due.values(), outputs, strict=False))
        return [(answer, _choose(answer, row)) for answer, row in zip(due.values(), np.asarray(outputs), strict=False)]

    def _num_prefill(self, chunk: Chunk) -> int:
        """Return how many of a chunk's tokens were not just generated."""
        is_generated = chunk.is_last and chunk.job in self._answers and bool(self._answers[chunk.job].completion.tokens)
        return chunk.size - is_generated

    # -- answers -----------------------------------------------------------

    def _accept(self, answer: _Answer, token: int | ValueError) -> None:
        """Add a token to an answer, which it may end."""
        completion = answer.completion
        if completion.is_cancelled:
            self._finish(answer, "cancelled")
            return
        if isinstance(token, ValueError):
            self._finish(answer, "error", error=str(token))
            return
        if completion.first_token is None:
            completion.first_token = time.perf_counter()
        if token in completion.request.stop_ids:
            self._finish(answer, "stop")
            return
        completion.tokens.append(token)
        text = answer.text.push(token)
        if answer.text.is_stopped or answer.job.is_full:
            self._finish(answer, "length", token, text)
        else:
            completion.text = answer.text.text
            self._updates.append(Update(completion, token, text))

    def _finish(
        self,
        answer: _Answer,
        reason: str,
        token: int | None = None,
        text: str = "",
        *,
        error: str | None = None,
    ) -> None:
        """End an answer and free its sequence; one that has all its tokens may yet be ended by a stop string."""
        completion = answer.completion
        rest = answer.text.finish()
        reason = "stop" if answer.text.is_stopped and reason == "length" else reason
        self._scheduler.remove(answer.job)
        del self._answers[answer.job]
        completion.text = answer.text.text
        completion.error = error
        completion.finished = time.perf_counter()
        completion.finish_reason = reason
        self._updates.append(Update(completion, token, text + rest, reason))

    def _note_begun(self, job: Job) -> None:
        self.statistics.shared_tokens += job.position
        if job in self._answers:
            completion = self._answers[job].completion
            completion.started = completion.started or time.perf_counter()
            completion.shared_tokens = max(completion.shared_tokens, min(job.position, len(completion.request.prompt)))

    def _note_preempted(self, job: Job) -> None:
        if job not in self._answers:
            return
        answer = self._answers[job]
        if self._refuses:
            self._finish(
                answer,
                "refused",
                error=f"the cache of {self._cache.capacity} tokens was full: raise its capacity, or ask for less",
            )
        else:
            answer.completion.preemptions += 1
            self.statistics.preemptions += 1

    # -- inside ------------------------------------------------------------

    def _check(self, tokens: Sequence[int], what: str) -> int:
        """Raise ValueError for tokens that can never be computed; return the longest sequence there can be."""
        room = min(self._model.max_context, self._cache.capacity)
        if len(tokens) > room:
            raise ValueError(
                f"the {what} has {len(tokens)} tokens and there is room for {room}: shorten it, or raise the cache's"
                f" capacity of {self._cache.capacity} (the model's context is {self._model.max_context})"
            )
        wrong = [token for token in tokens if not 0 <= token < self._model.vocab_size]
        if wrong:
            raise ValueError(f"token {wrong[0]}: the model's vocabulary has 0 to {self._model.vocab_size - 1}")
        return room

    def _count(self, chunks: Sequence[Chunk], num_new: int, seconds: float) -> None:
        statistics = self.statistics
        num_prefill = sum(self._num_prefill(chunk) for chunk in chunks)
        statistics.steps += 1
        statistics.prefill_tokens += num_prefill
        statistics.new_tokens += num_new
        statistics.most_running = max(statistics.most_running, len(chunks))
        statistics.most_held = max(statistics.most_held, self._cache.capacity - self._cache.free)
        if num_prefill:
            statistics.prefill_s += seconds
        else:
            statistics.decode_steps += 1
            statistics.decode_tokens += num_new
            statistics.decode_s += seconds


def _choose(answer: _Answer, logits: Any) -> int | ValueError:
    try:
        return answer.sampler.choose(logits, len(answer.completion.tokens))
    except ValueError as error:
        return error
