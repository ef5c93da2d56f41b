"""Random legal and illegal operations on a ``sequence`` cache, judged by the naive oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from executorch_mlx.extension.llm.cache import (
    CacheConfig,
    CacheError,
    CacheFullError,
    LayerPlan,
    StepError,
)
from executorch_mlx.extension.llm.cache.policies import RingPolicy
from executorch_mlx.extension.llm.cache.sequence import SequenceCache
from oracles.cache_strategies import DTYPES, MUTANT_SEARCH, cache_configs
from oracles.sequence_pair import InjectedError, Rows, SequencePair

# Any order, and any layer may be asked again: taken modulo the number of layers by the rules.
layer_orders = st.permutations(range(3))
repeats = st.lists(st.integers(0, 2), max_size=2)
num_tokens_of_a_step = st.integers(1, 10)


class SequenceMachine(RuleBasedStateMachine):
    """One cache and its oracle."""

    backend: ClassVar[str]
    pair: SequencePair

    @initialize(
        config=cache_configs(24, st.none()),
        group=st.integers(1, 3),
        q_dtype=st.sampled_from(("float32", *DTYPES)),
        seed=st.integers(0, 3),
    )
    def build(self, config: CacheConfig, group: int, q_dtype: str, seed: int) -> None:
        self.pair = SequencePair(self.backend, config, group=group, q_dtype=q_dtype, seed=seed)

    @property
    def room(self) -> int:
        """The most tokens that a step may bring now."""
        left = self.pair.oracle.capacity - self.pair.oracle.length
        limit = self.pair.oracle.max_step
        return left if limit is None else min(left, limit)

    def calls(self, order: Sequence[int], again: Sequence[int] = ()) -> list[int]:
        count = len(self.pair.layers)
        return [layer for layer in order if layer < count] + [layer % count for layer in again]

    @rule(
        num_tokens=num_tokens_of_a_step,
        order=layer_orders,
        again=repeats,
        position_dtype=st.sampled_from(["int32", "int64"]),
        column=st.booleans(),
    )
    def extend(self, num_tokens: int, order: list[int], again: list[int], position_dtype: str, column: bool) -> None:
        pair = self.pair
        if pair.oracle.admits(num_tokens):
            pair.step(num_tokens, calls=self.calls(order, again), position_dtype=position_dtype, column=column)
            return
        full = num_tokens > pair.oracle.capacity - pair.oracle.length
        too_long = pair.oracle.max_step is not None and num_tokens > pair.oracle.max_step
        expected, cause = (CacheFullError, "full") if full else (StepError, "at a time")
        if full and too_long:
            expected, cause = CacheError, "full|at a time"
        layer = self.calls(order)[0]
        with pytest.raises(expected, match=cause), pair.cache.step():
            pair.attend(layer, pair.rows(layer, num_tokens, poisoned=True))

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8))
    def decode(self, sizes: list[int]) -> None:
        for num_tokens in sizes:
            if self.pair.oracle.admits(num_tokens):
                self.pair.step(num_tokens)

    @rule(num_tokens=num_tokens_of_a_step, layer=st.integers(0, 2), kind=st.integers(0, 4), by=st.integers(1, 9))
    def extend_at_wrong_positions(self, num_tokens: int, layer: int, kind: int, by: int) -> None:
        pair, layer = self.pair, layer % len(self.pair.layers)
        start = pair.oracle.length
        due = list(range(start, start + num_tokens))
        given = [
            [p + by for p in due],
            [p - by for p in due],
            [*due[:-1], due[-1] + by],
            [*due, due[-1]],
            [due[-1] + 1, *due],
        ][kind]
        with pytest.raises((ValueError, CacheError)), pair.cache.step():
            pair.attend(layer, pair.rows(layer, len(given), poisoned=True), pair.arrays.positions(given))

    @precondition(lambda self: self.room > 0)
    @rule(
        num_tokens=num_tokens_of_a_step,
        order=layer_orders,
        again=repeats,
        after=st.integers(0, 5),
        back=st.integers(0, 4),
    )
    def fail_after_some_layers(
        self, num_tokens: int, order: list[int], again: list[int], after: int, back: int
    ) -> None:
        """The slots that a failed step overwrote are gone, which a rewind just after it must know."""
        pair = self.pair
        pair.poison(min(num_tokens, self.room), self.calls(order, again)[:after])
        pair.rewind(max(0, pair.oracle.length - back))

    @precondition(lambda self: self.room > 1)
    @rule(num_tokens=num_tokens_of_a_step, layer=st.integers(0, 2))
    def fail_by_other_positions_on_a_later_layer(self, num_tokens: int, layer: int) -> None:
        pair, layer = self.pair, layer % len(self.pair.layers)
        num_tokens = min(num_tokens, self.room)
        other = num_tokens - 1 or num_tokens + 1
        rows = pair.rows(0, num_tokens, poisoned=True)
        with pytest.raises(StepError, match="differ"):
            self.step_with_differing_layers(rows, layer, pair.rows(layer, other, poisoned=True))

    def step_with_differing_layers(self, rows: Rows, layer: int, others: Rows) -> None:
        pair = self.pair
        try:
            with pair.cache.step():
                pair.attend(0, rows)
                pair.oracle.attend(0, *rows, pair.scale(0))
                pair.attend(layer, others)
        finally:
            pair.oracle.abort()

    @precondition(lambda self: self.room > 0)
    @rule(
        num_tokens=num_tokens_of_a_step,
        verb=st.sampled_from(["rewind", "clear", "step"]),
        to=st.integers(0, 24),
    )
    def verb_inside_a_step(self, num_tokens: int, verb: str, to: int) -> None:
        pair, num_tokens = self.pair, min(num_tokens, self.room)
        verbs = {
            "clear": pair.cache.clear,
            "rewind": lambda: pair.cache.rewind(to),
            "step": lambda: pair.cache.step().__enter__(),
        }
        with pair.cache.step():
            for layer in pair.layers:
                with pytest.raises(StepError, match="step"):
                    verbs[verb]()
                pair.attend_both(layer, pair.rows(layer, num_tokens))
            pair.cache.check_integrity()
        pair.oracle.commit()

    @precondition(lambda self: self.room > 0)
    @rule(
        num_tokens=num_tokens_of_a_step,
        layer=st.integers(0, 2),
        tensor=st.integers(0, 2),
        axis=st.integers(0, 3),
    )
    def wrong_shape_refused_and_the_step_goes_on(self, num_tokens: int, layer: int, tensor: int, axis: int) -> None:
        pair, num_tokens = self.pair, min(num_tokens, self.room)
        with pair.cache.step():
            for current in pair.layers:
                if current == layer % len(pair.layers):
                    wrong = list(pair.rows(current, num_tokens, poisoned=True))
                    # One more query head is still a multiple of one key head.
                    allowed = tensor == 0 and axis == 1 and wrong[1].shape[1] == 1
                    if not allowed:
                        padding = [(0, 1 if index == axis else 0) for index in range(4)]
                        wrong[tensor] = np.pad(wrong[tensor], padding)
                        at_due = pair.arrays.positions(range(pair.oracle.length, pair.oracle.length + num_tokens))
                        with pytest.raises(ValueError, match=f"layer {current}: [qkv] has shape"):
                            pair.attend(current, tuple(wrong), at_due)
                pair.attend_both(current, pair.rows(current, num_tokens))
        pair.oracle.commit()

    @precondition(lambda self: self.room > 0)
    @rule(num_tokens=num_tokens_of_a_step)
    def commit_poison_then_rewind_it(self, num_tokens: int) -> None:
        """A live sequence's own NaN may reach it; once rewound it may not."""
        pair, num_tokens = self.pair, min(num_tokens, self.room)
        start = pair.oracle.length
        with pair.cache.step():
            for layer in pair.layers:
                rows = pair.rows(layer, num_tokens, poisoned=True)
                pair.attend(layer, rows)
                pair.oracle.attend(layer, *rows, pair.scale(layer))
        pair.oracle.commit()
        assert pair.rewind(start), "max_write tokens may always be taken back"

    @rule(position=st.integers(-2, 26))
    def rewind(self, position: int) -> None:
        if position < 0:
            with pytest.raises(ValueError, match="rewind"):
                self.pair.cache.rewind(position)
        else:
            self.pair.rewind(position)

    @rule(back=st.integers(0, 9))
    def rewind_a_little(self, back: int) -> None:
        self.pair.rewind(max(0, self.pair.oracle.length - back))

    @rule(
        by=st.sampled_from(["nothing", "nothing", "clear", "rewind"]),
        num_tokens=st.integers(0, 9),
        back=st.integers(1, 3),
    )
    def start_again(self, by: str, num_tokens: int, back: int) -> None:
        """Not too often: what is interesting needs a long sequence. A new one owes nothing to the old."""
        pair = self.pair
        if by == "nothing":
            return
        if by == "clear":
            pair.clear()
        else:
            assert pair.rewind(0)
        for _ in range(min(num_tokens, pair.oracle.capacity)):
            pair.step()
        pair.rewind(max(0, pair.oracle.length - back))

    @rule(num_tokens=st.integers(0, 26))
    def ask_whether_it_can_extend(self, num_tokens: int) -> None:
        fits = num_tokens <= self.pair.oracle.capacity - self.pair.oracle.length
        assert self.pair.cache.can_extend(num_tokens) is fits
        if num_tokens == 1:
            assert self.pair.cache.can_extend() is fits

    @rule(layer=st.integers(0, 2))
    def attend_outside_a_step(self, layer: int) -> None:
        layer %= len(self.pair.layers)
        with pytest.raises(StepError, match="outside a step"):
            self.pair.attend(layer, self.pair.rows(layer, 1, poisoned=True))

    @rule()
    def leave_an_empty_step(self) -> None:
        with self.pair.cache.step():
            pass

    @rule()
    def fail_in_an_empty_step(self) -> None:
        with pytest.raises(InjectedError), self.pair.cache.step():
            raise InjectedError

    @invariant()
    def cache_and_oracle_agree(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


def machine_for(backend: str) -> type[SequenceMachine]:
    return type(f"SequenceMachineOn{backend}", (SequenceMachine,), {"backend": backend})


@pytest.mark.parametrize("backend", ["eager", "MLXBackend"])
def test_sequence_under_random_operations_equals_naive_oracle(backend: str) -> None:
    run_state_machine_as_test(machine_for(backend), settings=settings())


def _ring_that_forgets_what_it_overwrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingPolicy, "retains", lambda self, position, high: True)


def _ring_one_slot_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RingPolicy.__init__

    def shorter(self: RingPolicy, capacity: int, window: int, max_write: int) -> None:
        original(self, capacity, window, max_write)
        self.slots = max(1, self.slots - 1)

    monkeypatch.setattr(RingPolicy, "__init__", shorter)


def _ring_that_sees_one_position_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingPolicy, "first_visible", lambda self, position: max(0, position - self.window))


def _abort_that_keeps_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceCache, "_roll_back", SequenceCache._advance)


def _abort_that_forgets_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceCache._roll_back

    def forgetful(self: SequenceCache, step: object) -> None:
        original(self, step)
        self._high = list(self._filled)

    monkeypatch.setattr(SequenceCache, "_roll_back", forgetful)


def _rewind_that_forgets_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceCache._truncate

    def forgetful(self: SequenceCache, position: int) -> None:
        original(self, position)
        self._high = list(self._filled)

    monkeypatch.setattr(SequenceCache, "_truncate", forgetful)


def _empty_sequence_that_remembers_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceCache._truncate

    def stubborn(self: SequenceCache, position: int) -> None:
        high = list(self._high)
        original(self, position)
        self._high = high

    monkeypatch.setattr(SequenceCache, "_truncate", stubborn)
    monkeypatch.setattr(SequenceCache, "check_integrity", lambda self: None)


def _rows_that_an_aborted_step_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceCache._roll_back

    def sticky(self: SequenceCache, step: object) -> None:
        filled = list(self._filled)
        original(self, step)
        self._written_before = filled

    def plan(self: SequenceCache, layer: int, positions: tuple[int, ...]) -> LayerPlan:
        planned = original_plan(self, layer, positions)
        written = getattr(self, "_written_before", [0] * len(self._filled))[layer]
        return dataclasses.replace(planned, write=()) if written >= planned.stop else planned

    original_plan = SequenceCache._plan
    monkeypatch.setattr(SequenceCache, "_roll_back", sticky)
    monkeypatch.setattr(SequenceCache, "_plan", plan)


@pytest.mark.parametrize(
    "mutate",
    [
        _ring_that_forgets_what_it_overwrote,
        _ring_one_slot_short,
        _ring_that_sees_one_position_more,
        _abort_that_keeps_the_position,
        _abort_that_forgets_what_was_written,
        _rewind_that_forgets_what_was_written,
        _empty_sequence_that_remembers_what_was_written,
        _rows_that_an_aborted_step_keeps,
    ],
)
def test_state_machine_with_a_mutant_fails(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: each fault must be found."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=r"granted|Not equal|size|shape|position"):
        run_state_machine_as_test(machine_for("eager"), settings=MUTANT_SEARCH)
