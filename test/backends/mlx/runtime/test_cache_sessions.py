"""Attention whose KV cache lies outside the program: which session's cache a step uses, and steps that fail."""

from __future__ import annotations

import contextvars
from contextlib import suppress
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime

from executorch_mlx.backends.mlx import PLUGIN_BACKEND_ID, load_program
from executorch_mlx.backends.mlx.runtime.caches import MLXSequenceCache
from executorch_mlx.extension.llm.cache import CacheFullError, CacheSession, StepError, build
from oracles.small_programs import (
    CAPACITY,
    MAX_ROWS,
    VOCABULARY,
    TinyLM,
    cache_config,
    num_delegates,
    split_lm,
    tiny_lm,
)

MODELS = {"one delegate": (tiny_lm, False), "several delegates": (split_lm, True)}


class InjectedError(Exception):
    """Raised by a test in the middle of a step."""


class FailingCache(MLXSequenceCache):
    """A cache that raises in one layer as long as it is told to."""

    failing_layer: int | None = None

    def attend(self, layer: int, *arguments: Any) -> Any:
        if layer == self.failing_layer:
            raise InjectedError(f"in layer {layer}")
        return super().attend(layer, *arguments)


class Conversation:
    """One sequence of tokens, run in steps and compared with the eager model on all of it at once."""

    def __init__(self, method: Any, seed: int, *, split: bool = False) -> None:
        self._method = method
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (1, CAPACITY), generator=generator)
        with torch.no_grad():
            self.expected = TinyLM(split=split)(self.tokens, torch.arange(CAPACITY))

    def step(self, start: int, stop: int) -> None:
        """Run the tokens of a span and compare."""
        (logits,) = self.run(start, stop)
        torch.testing.assert_close(logits, self.expected[:, start:stop], rtol=1e-4, atol=1e-4)

    def run(self, start: int, stop: int) -> Any:
        """Run the tokens of a span."""
        return self._method.execute([self.tokens[:, start:stop], torch.arange(start, stop)])


def sequence_cache(capacity: int = CAPACITY) -> Any:
    return build("MLXBackend", "sequence", cache_config(capacity))


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program(tiny_lm())


@pytest.fixture
def conversation(program: Any) -> Conversation:
    return Conversation(program.load_method("forward"), seed=1)


# -- steps that succeed ----------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_prefill_and_decode_equal_the_eager_model(model: str) -> None:
    content, split = MODELS[model]
    assert (num_delegates(content()) > 2) == split
    program = load_program(content())
    conversation = Conversation(program.load_method("forward"), seed=4, split=split)
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 7)
        for start in range(7, 12):
            conversation.step(start, start + 1)
        conversation.step(12, CAPACITY)
        assert session.control.position == CAPACITY


def test_decode_after_a_rewind_equals_the_eager_model(conversation: Conversation) -> None:
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 10)
        assert session.control.rewind(4)
        conversation.step(4, 6)
        session.control.clear()
        conversation.step(0, 3)


def test_methods_of_one_program_continue_each_others_sequence(program: Any, conversation: Conversation) -> None:
    greedy = program.load_method("forward_greedy")
    with CacheSession(sequence_cache()):
        conversation.step(0, 4)
        (tokens,) = greedy.execute([conversation.tokens[:, 4:7], torch.arange(4, 7)])
        assert torch.equal(tokens, conversation.expected[:, 4:7].argmax(-1))
        conversation.step(7, 9)


def test_execute_inside_a_step_that_the_caller_opened_leaves_it_open(conversation: Conversation) -> None:
    with CacheSession(sequence_cache()) as session:
        with session.control.step():
            conversation.step(0, 3)
            assert session.control.in_step
        assert session.control.position == 3


def test_execute_inside_a_step_that_the_caller_aborts_leaves_the_position(conversation: Conversation) -> None:
    def abort(control: Any) -> None:
        with control.step():
            conversation.step(3, 5)
            raise InjectedError("by the caller")

    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 3)
        with pytest.raises(InjectedError, match="by the caller"):
            abort(session.control)
        assert session.control.position == 3
        conversation.step(3, 6)


def test_execute_with_a_cache_built_for_the_plugins_own_id_runs(conversation: Conversation) -> None:
    with CacheSession(build(PLUGIN_BACKEND_ID, "sequence", cache_config())):
        conversation.step(0, 3)


def test_stock_runtime_with_a_session_equals_the_eager_model() -> None:
    stock = Runtime.get().load_program(tiny_lm())
    conversation = Conversation(stock.load_method("forward"), seed=5)
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 5)
        conversation.step(5, 6)
        assert session.control.position == 6


# -- which session ---------------------------------------------------------------------


def test_sessions_taking_turns_under_one_program_keep_their_sequences(program: Any) -> None:
    method = program.load_method("forward")
    first, second = Conversation(method, seed=6), Conversation(method, seed=7)
    with CacheSession(sequence_cache()) as one, CacheSession(sequence_cache()) as other:
        with one.activate():
            first.step(0, 5)
        with other.activate():
            second.step(0, 3)
        for turn in range(4):
            with one.activate():
                first.step(5 + turn, 6 + turn)
            with other.activate():
                second.step(3 + turn, 4 + turn)
        assert (one.control.position, other.control.position) == (9, 7)


def test_cache_in_a_later_session_goes_on_where_it_was(conversation: Conversation) -> None:
    cache = sequence_cache()
    with CacheSession(cache):
        conversation.step(0, 4)
    with CacheSession(sequence_cache()):
        conversation.step(0, 2)
    with CacheSession(cache):
        conversation.step(4, 6)


def test_session_active_at_load_but_not_at_execute_is_used() -> None:
    with CacheSession(sequence_cache()) as session:
        program = load_program(tiny_lm())
        conversation = Conversation(program.load_method("forward"), seed=8)
        contextvars.Context().run(conversation.step, 0, 4)
        assert session.control.position == 4


def test_session_active_at_load_and_ended_since_is_not_used() -> None:
    with CacheSession(sequence_cache()) as session:
        program = load_program(tiny_lm())
        conversation = Conversation(program.load_method("forward"), seed=9)
    with pytest.raises(LookupError, match="no session is active"):
        conversation.run(0, 2)
    assert session.control.position == 0


def test_session_active_at_execute_is_preferred_to_the_one_at_load() -> None:
    with CacheSession(sequence_cache()) as at_load:
        program = load_program(tiny_lm())
        conversation = Conversation(program.load_method("forward"), seed=10)
        with CacheSession(sequence_cache()) as at_execute:
            conversation.step(0, 4)
        assert (at_load.control.position, at_execute.control.position) == (0, 4)
        conversation.step(0, 3)
        assert at_load.control.position == 3


def test_session_that_has_ended_is_not_kept_alive_by_a_program(conversation: Conversation) -> None:
    with CacheSession(sequence_cache()):
        conversation.step(0, 2)
    with pytest.raises(LookupError, match="no session is active"):
        conversation.run(2, 3)


# -- steps that fail -------------------------------------------------------------------


def test_step_of_more_tokens_than_the_program_takes_leaves_the_position(conversation: Conversation) -> None:
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 2)
        with pytest.raises(ValueError, match=rf"\[1, {MAX_ROWS + 1}\] exceeds the program's bound"):
            conversation.run(2, 2 + MAX_ROWS + 1)
        assert session.control.position == 2
        conversation.step(2, 2 + MAX_ROWS)


def test_step_beyond_the_capacity_raises_cache_full_and_a_shorter_one_runs(
    conversation: Conversation,
) -> None:
    with CacheSession(sequence_cache(capacity=6)) as session:
        conversation.step(0, 4)
        for _ in range(3):
            with pytest.raises(CacheFullError, match="holds 4 of 6 tokens and the step brings 3") as raised:
                conversation.run(4, 7)
            assert type(raised.value.__cause__) is RuntimeError
            assert session.control.position == 4
        conversation.step(4, 6)
        with pytest.raises(CacheFullError, match="holds 6 of 6"):
            conversation.run(6, 7)
        session.control.check_integrity()


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (5, 7)])
def test_step_at_positions_that_are_not_due_raises_and_the_right_one_runs(
    start: int, stop: int, conversation: Conversation
) -> None:
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 3)
        with pytest.raises(ValueError, match=f"position {start} where 3 was due"):
            conversation.run(start, stop)
        assert session.control.position == 3
        conversation.step(3, 5)


def test_step_without_tokens_raises_and_leaves_the_position(conversation: Conversation) -> None:
    with CacheSession(sequence_cache()) as session:
        conversation.step(0, 3)
        with pytest.raises(ValueError, match=r"got none|got \[(1, )?0\]"):
            conversation.run(3, 3)
        assert session.control.position == 3
        conversation.step(3, 4)


def test_execute_with_a_cache_of_fewer_layers_raises_and_leaves_the_position(program: Any) -> None:
    config = cache_config()
    cache = build("MLXBackend", "sequence", type(config)(config.capacity, config.layers[:1], "float32"))
    with (
        CacheSession(cache),
        pytest.raises(ValueError, match=r"layer 1: the cache was built for layers 0\.\.0"),
    ):
        Conversation(program.load_method("forward"), seed=1).run(0, 2)
    assert cache.position == 0
    cache.check_integrity()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layer", [0, 1])
def test_step_that_fails_in_a_layer_is_undone_in_all_and_can_be_run_again(model: str, layer: int) -> None:
    content, split = MODELS[model]
    program = load_program(content())
    conversation = Conversation(program.load_method("forward"), seed=11, split=split)
    cache = FailingCache(cache_config())
    with CacheSession(cache):
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            cache.failing_layer = layer
            with pytest.raises(InjectedError, match=f"in layer {layer}"):
                conversation.run(start, stop)
            assert cache.position == start
            assert not cache.in_step
            cache.check_integrity()
            cache.failing_layer = None
            conversation.step(start, stop)


def test_step_that_fails_for_one_session_does_not_disturb_another(program: Any) -> None:
    method = program.load_method("forward")
    first, second = Conversation(method, seed=12), Conversation(method, seed=13)
    failing = FailingCache(cache_config())
    failing.failing_layer = 1
    with CacheSession(sequence_cache()) as session:
        first.step(0, 4)
        with CacheSession(failing), pytest.raises(InjectedError, match="in layer 1"):
            second.run(0, 4)
        first.step(4, 6)
        assert (session.control.position, failing.position) == (6, 0)


def test_failed_execute_in_a_step_that_the_caller_holds_open_cannot_be_committed(program: Any) -> None:
    conversation = Conversation(program.load_method("forward"), seed=14)
    cache = FailingCache(cache_config())

    def swallow(cache: Any) -> None:
        with cache.step(), suppress(InjectedError):
            conversation.run(4, 6)

    with CacheSession(cache):
        conversation.step(0, 4)
        cache.failing_layer = 1
        with pytest.raises(StepError, match="failed in this step"):
            swallow(cache)
        cache.failing_layer = None
        conversation.step(4, 6)
