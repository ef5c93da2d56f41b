"""What the batched command shows: answers in the prompts' order, and how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from executorch_mlx.extension.llm.cache import BatchControl
from executorch_mlx.extension.llm.engine import Completion, Engine, Statistics

from . import command

LINE_EVERY_S = 2.0
"""Seconds between two lines of progress where there is no terminal."""


class Answers:
    """All answers, in the prompts' order; each is printed when it and all before it are complete."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._rows: list[tuple[int, str, Completion]] = []
        self._printed = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, number: int, prompt: str, completions: Sequence[Completion]) -> None:
        """Add the answers to a prompt."""
        self._rows += [(number, prompt, completion) for completion in completions]

    @property
    def num_done(self) -> int:
        """Answers that are complete."""
        return sum(completion.is_done for _, _, completion in self._rows)

    @property
    def is_ready(self) -> bool:
        """Whether the next answer in order is complete."""
        return self._printed < len(self._rows) and self._rows[self._printed][2].is_done

    def print_ready(self) -> None:
        """Print the answers whose turn it is."""
        while self.is_ready:
            self._print(*self._rows[self._printed])
            self._printed += 1

    def print_rest(self) -> None:
        """Print all others, as far as they have come."""
        for row in self._rows[self._printed :]:
            if row[2].tokens or row[2].error:
                self._print(*row)

    def raise_if_incomplete(self) -> None:
        """Raise an error if there are prompts that have no complete answer.

        Raises:
            KeyboardInterrupt: some were cancelled.
            ValueError: some failed.
        """
        reasons = [completion.finish_reason for _, _, completion in self._rows]
        cancelled, failed = (reasons.count(reason) for reason in ("cancelled", "error"))
        if cancelled:
            command.console.print(f"interrupted: {len(reasons) - cancelled} of {len(reasons)} answers are complete")
            raise KeyboardInterrupt
        if failed:
            raise ValueError(f"{failed} of {len(reasons)} answers failed")

    def _print(self, number: int, prompt: str, completion: Completion) -> None:
        if self._is_json:
            row = {
                "index": number,
                "sample": completion.sample,
                "prompt": prompt,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": _reason(completion),
                **({} if completion.error is None else {"error": completion.error}),
                "timings": completion.timings(),
            }
            print(json.dumps(row), flush=True)
            return
        sample = f".{completion.sample}" if completion.request.n > 1 else ""
        print(f"[{number}{sample}] {prompt}\n{completion.text}", end="\n\n", flush=True)
        if completion.error is not None:
            command.show_error(ValueError(f"prompt {number}: {completion.error}"))


class Display:
    """Live progress on a terminal, plain lines elsewhere, all on the standard error; and the answers, when ready."""

    def __init__(self, engine: Engine, cache: BatchControl, answers: Answers) -> None:
        self._engine = engine
        self._cache = cache
        self._answers = answers
        self._is_live = command.console.is_terminal
        self._began = self._shown = time.perf_counter()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers; {task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=command.console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("", total=len(answers))

    def __enter__(self) -> Display:
        self._show_bar(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._show_bar(False)

    def _show_bar(self, is_shown: bool) -> None:
        if self._is_live:
            self._bar.start() if is_shown else self._bar.stop()

    def show(self) -> None:
        """Say how far it is, and print the answers whose turn it is."""
        now = time.perf_counter()
        held, capacity = self._cache.capacity - self._cache.free, self._cache.capacity
        state = (
            f"{self._engine.num_running} running, {self._engine.num_waiting} waiting; cache {held:,} of {capacity:,}"
            f" tokens; {self._engine.statistics.new_tokens / (now - self._began):.1f} tokens/s"
        )
        self._bar.update(self._task, description=state, completed=self._answers.num_done)
        if not self._is_live and now - self._shown >= LINE_EVERY_S:
            self._shown = now
            command.console.print(f"{self._answers.num_done} of {len(self._answers)} answers; {state}", soft_wrap=True)
        if self._answers.is_ready:
            self._show_bar(False)  # it and the answers may share a terminal
            self._answers.print_ready()
            self._show_bar(True)


def totals(statistics: Statistics, seconds: float) -> str:
    """Describe what an engine has done in some seconds."""
    done = statistics.summary()
    return (
        f"prefill {done['prefill_tokens']:,} tokens ({done['shared_tokens']:,} more were shared),"
        f" {done['prefill_tokens_per_s']} tokens/s; decode {done['decode_tokens']:,} tokens in steps without prompts,"
        f" {done['decode_tokens_per_s']} tokens/s\n"
        f"{done['new_tokens']:,} new tokens in {seconds:.1f} s, {done['new_tokens'] / seconds:.1f} tokens/s;"
        f" {done['steps']:,} steps of at most {done['most_running']} sequences, {done['preemptions']} preemptions;"
        f" the cache held at most {done['most_held']:,} tokens"
    )


def _reason(completion: Completion) -> str | None:
    return "interrupted" if completion.finish_reason == "cancelled" else completion.finish_reason
