"""Random schedules: whatever arrives, is cancelled, fails or is preempted, each answer is that of its prompt alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from executorch_mlx.extension.llm.engine import GREEDY, Completion, Engine, Request, Sampling, Update
from oracles.engine_worlds import ExportedWorld, InjectedError, TokenWorld, WatchedModel, check_answer

samplings = st.sampled_from(
    [GREEDY, GREEDY, Sampling(1.0, seed=5), Sampling(1.5, top_k=20, seed=6), Sampling(0.7, top_p=0.8, seed=5)]
)
lengths_of_answers = st.integers(1, 12) | st.integers(20, 45)


class ScheduleMachine(RuleBasedStateMachine):
    """One engine, and what is known of its answers."""

    world: ClassVar[Any]
    kind: ClassVar[str]
    seen: ClassVar[Counter[str]]

    @initialize(data=st.data(), max_seqs=st.integers(1, 6))
    def build(self, data: st.DataObject, max_seqs: int) -> None:
        model = self.world.model
        capacity = data.draw(st.integers(*self.world.capacities), "capacity")
        self.step_tokens = data.draw(st.integers(1, model.max_step), "step_tokens")
        self.model = WatchedModel(model)
        self.cache = model.new_cache(capacity, kind=self.kind, max_seqs=max_seqs)
        self.engine = Engine(self.model, self.cache, step_tokens=self.step_tokens)
        self.room = min(capacity, model.max_context)
        self.completions: list[Completion] = []
        self.streamed: dict[Completion, list[int]] = {}
        self.ended: Counter[Completion] = Counter()
        # Answers that have got a token since they last lost their room.
        self.advancing: set[Completion] = set()
        self.kept_tokens = 0

    def prompt(self, stem: int, length: int, tail: list[int]) -> list[int]:
        random = np.random.default_rng(stem)
        whole = [*random.integers(0, self.model.vocab_size, length).tolist(), *tail]
        return whole[: self.room]

    stems = st.integers(0, 2)
    lengths = st.integers(0, 60)
    tails = st.lists(st.integers(0, 22), max_size=3)

    # -- what happens ------------------------------------------------------

    @rule(
        stem=stems,
        length=lengths,
        tail=tails,
        max_new_tokens=lengths_of_answers,
        sampling=samplings,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stops=st.sampled_from([0, 0, 1, 3]),
    )
    def submit_one(self, **request: Any) -> None:
        self.submit(**request)

    def submit(
        self, stem: int, length: int, tail: list[int], max_new_tokens: int, sampling: Sampling, n: int, stops: int
    ) -> None:
        low, high = self.world.beginning
        prompt = self.prompt(stem, length % high, tail) or [stem] * low
        stop_ids = frozenset(range(0, self.model.vocab_size, 11)) if stops == 3 else frozenset(range(stops))
        request = Request(prompt, max_new_tokens, sampling, stop_ids, n=n)
        answers = self.engine.submit(request)
        assert [answer.sample for answer in answers] == list(range(n))
        self.completions += answers
        self.streamed |= {answer: [] for answer in answers}

    @rule(stem=stems, count=st.integers(3, 6), length=st.integers(1, 12), sampling=samplings)
    def submit_many_short_ones_with_long_answers(self, stem: int, count: int, length: int, sampling: Sampling) -> None:
        """Admitted together, they outgrow the cache together."""
        for index in range(count):
            self.submit(stem, length + index, [index], 30, sampling, 1, 0)

    @precondition(lambda self: self.completions)
    @rule(which=st.integers(0, 40))
    def cancel(self, which: int) -> None:
        self.completions[-1 - which % len(self.completions)].cancel()

    @rule(stem=stems, length=st.integers(1, 40))
    def keep(self, stem: int, length: int) -> None:
        prefix = self.prompt(stem, length, [])
        self.engine.keep(prefix)
        self.kept_tokens += len(prefix)

    @rule(
        after=st.integers(0, 6),
        error=st.sampled_from([InjectedError, KeyboardInterrupt, ValueError]),
        is_late=st.booleans(),
    )
    def fail(self, after: int, error: type[BaseException], is_late: bool) -> None:
        self.model.failures.append((after, error, is_late))

    @rule(really=st.sampled_from([False, False, True]))
    def lose(self, really: bool) -> None:
        if really:
            self.cache.mark_lost("test")
            self.advancing.clear()
            self.seen["losses"] += 1

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.advance()

    @rule(really=st.sampled_from([False, False, True]))
    def finish_all(self, really: bool) -> None:
        if really:
            self.drain()

    # -- what must hold ----------------------------------------------------

    def advance(self) -> None:
        self.model.calls.clear()
        armed = len(self.model.failures)
        begun = [c for c in self.completions if c.started is not None and not c.is_done]
        before = {c: c.preemptions for c in self.completions}
        cancelled = {c for c in self.completions if c.is_cancelled}
        try:
            updates = self.engine.step()
        except (InjectedError, KeyboardInterrupt, ValueError):
            assert len(self.model.failures) == armed - 1
            self.seen["failures"] += 1
            updates = None
        assert len(self.model.failures) == armed - (updates is None)
        self.cache.check_integrity()
        for call in self.model.calls:
            assert 1 <= len(call.tokens) == len(call.positions) <= self.step_tokens
        assert len(self.model.calls) <= 1
        preempted = {c for c in self.completions if c.preemptions > before[c]}
        self.advancing -= preempted
        self.seen["preemptions"] += len(preempted)
        if begun and not self.kept_tokens:
            assert begun[0] not in preempted, "the oldest was preempted"
        if updates is not None:
            self.take(updates)
            self.check_step(updates, self.advancing - cancelled)
            self.advancing |= {u.completion for u in updates if u.token is not None}
        self.advancing -= {c for c in self.advancing if c.is_done}

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            completion = update.completion
            assert not self.ended[completion], "an update after the last one"
            if update.token is not None:
                self.streamed[completion].append(update.token)
            if update.finish_reason is not None:
                assert update.finish_reason == completion.finish_reason
                assert update.finish_reason in ("stop", "length", "cancelled")
                self.ended[completion] += 1
                self.seen[update.finish_reason] += 1
                check_answer(self.world, completion, self.room)

    def check_step(self, updates: list[Update], advancing: set[Completion]) -> None:
        due = [u.completion for u in updates if u.token is not None or u.finish_reason == "stop"]
        assert len(set(due)) == len(due)
        assert advancing <= set(due), "a running answer has not advanced"
        rows = self.model.calls[0].rows if self.model.calls else []
        assert len(rows) == max(len(due), 1) * bool(self.model.calls)
        assert len(set(rows)) == len(rows)

    def drain(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.advance()
            steps += 1
            assert steps < 10_000, "the engine does not come to an end"
        assert set(self.ended) == set(self.completions)
        for completion, tokens in self.streamed.items():
            assert completion.is_done
            assert tokens == completion.tokens
        assert 0 <= self.cache.capacity - self.cache.free <= self.kept_tokens
        self.seen["shared"] += self.engine.statistics.shared_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.drain()
        self.engine.close()
        assert self.cache.free == self.cache.capacity
        assert not self.engine.has_work


def run_machine(world: Any, kind: str, divisor: int, happens: Sequence[str]) -> None:
    seen: Counter[str] = Counter()
    machine = type(
        f"{type(world).__name__}Over{kind}", (ScheduleMachine,), {"world": world, "kind": kind, "seen": seen}
    )
    profile = settings()
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=max(profile.max_examples // divisor, 1)))
    # A run in which none of this happened has shown nothing.
    assert [what for what in happens if not seen[what]] == []


WINDOWS = {"full": (None,), "window": (4,), "mixed": (None, 5)}


@pytest.mark.parametrize("kind", ["batched-cell", "batched-sequence"])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_any_schedule_of_a_model_of_integers_gives_each_answer_as_if_it_were_alone(
    windows: tuple[int | None, ...], kind: str
) -> None:
    happens = ("preemptions", "failures", "losses", "shared", "stop", "length", "cancelled")
    run_machine(TokenWorld(windows), kind, divisor=6, happens=happens)


@pytest.fixture(scope="module", params=["tiny", "windowed"])
def exported_world(request: pytest.FixtureRequest, one_torch_thread: None) -> ExportedWorld:
    return ExportedWorld(request.getfixturevalue(request.param))


@pytest.mark.parametrize("kind", ["batched-cell", "batched-sequence", "batched"])
def test_any_schedule_of_an_exported_model_gives_each_answer_as_if_it_were_alone(
    exported_world: ExportedWorld, kind: str
) -> None:
    run_machine(exported_world, kind, divisor=25, happens=("preemptions", "length"))
