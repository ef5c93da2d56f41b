"""The engine over exported models: what it computes, shares, keeps, gives up, refuses and survives."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.extension.llm.cache import CacheFullError, CacheSession
from executorch_mlx.extension.llm.engine import GREEDY, Completion, Engine, Request, Sampler, Sampling, Update
from oracles.engine_worlds import ExportedWorld, TokenModel, WatchedModel, check_answer

KINDS = ("batched-cell", "batched-sequence", "batched")
CAPACITY = 200


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 257, length).tolist()


@pytest.fixture(scope="module")
def world(tiny: Any, one_torch_thread: None) -> ExportedWorld:
    return ExportedWorld(tiny)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def engine_for(world: ExportedWorld, kind: str, capacity: int = CAPACITY, max_seqs: int = 8, **options: Any) -> Engine:
    return Engine(world.model, world.model.new_cache(capacity, kind=kind, max_seqs=max_seqs), **options)


def check_all(world: ExportedWorld, completions: Sequence[Completion], capacity: int = CAPACITY) -> None:
    for completion in completions:
        assert completion.finish_reason in ("stop", "length"), completion
        check_answer(world, completion, min(capacity, world.model.max_context))


def held(engine: Engine) -> int:
    return engine._cache.capacity - engine._cache.free


def run_all(engine: Engine, completions: Sequence[Completion]) -> Sequence[Completion]:
    for _ in engine.run():
        pass
    return completions


def fill(world: ExportedWorld, cache: Any, count: int) -> int:
    seq_id = cache.seq_new()
    with CacheSession(cache):
        for start in range(0, count, 15):
            assert cache.declare_step([seq_id] * 15)
            world.model.step_greedy(list(range(15)), range(start, start + 15), [0])
    return seq_id


# -- prompts ---------------------------------------------------------------------------------------------


def test_long_prompt_in_chunks_does_not_hold_up_running_answers(world: ExportedWorld, kind: str) -> None:
    watched = WatchedModel(world.model)
    engine = Engine(watched, world.model.new_cache(CAPACITY, kind=kind), step_tokens=6)
    running = [*engine.submit(Request(tokens_of(1, 3), 20)), *engine.submit(Request(tokens_of(2, 2), 20))]
    engine.step()
    assert [len(answer.tokens) for answer in running] == [1, 1]
    (late,) = engine.submit(Request(tokens_of(3, 40), 2))
    for step in range(2, 12):
        assert {update.completion for update in engine.step()} >= set(running)
        assert [len(answer.tokens) for answer in running] == [step, step]
        # Two rows of the running ones, and four of the prompt's 40 tokens.
        assert len(watched.calls[-1].tokens) == 6
        assert len(late.tokens) == (step == 11)
    check_all(world, run_all(engine, [*running, late]))


@pytest.mark.parametrize("step_tokens", [1, 5, 16])
def test_samples_compute_their_prompt_once(world: ExportedWorld, kind: str, step_tokens: int) -> None:
    prompt, n = tokens_of(4, 37), 3
    engine = engine_for(world, kind, step_tokens=step_tokens)
    answers = engine.submit(Request(prompt, 6, Sampling(1.0, seed=3), n=n))
    check_all(world, run_all(engine, answers))
    # With one sequence at a time the others come when the first has left.
    if step_tokens > 1:
        assert engine.statistics.prefill_tokens == len(prompt) + n - 1
        assert engine.statistics.shared_tokens == (n - 1) * (len(prompt) - 1)
        assert sorted(answer.shared_tokens for answer in answers) == [0, 36, 36]
    assert engine.statistics.new_tokens == n * 6


@pytest.mark.parametrize(("kind", "copies"), [("batched-cell", 1), ("batched-sequence", 4)])
def test_samples_share_cells_and_copy_sequences(world: ExportedWorld, kind: str, copies: int) -> None:
    prompt, n = tokens_of(5, 33), 4
    engine = engine_for(world, kind)
    answers = engine.submit(Request(prompt, 8, Sampling(1.0, seed=3), n=n))
    while not all(answer.tokens for answer in answers):
        engine.step()
    # Each sample has its prompt's last token to itself; the first one's further tokens were fed back.
    own = sum(len(answer.tokens) for answer in answers)
    assert held(engine) == copies * (len(prompt) - 1) + own
    check_all(world, run_all(engine, answers))
    assert held(engine) == 0


def test_later_prompt_shares_the_beginning_of_a_running_one(world: ExportedWorld, kind: str) -> None:
    common = tokens_of(6, 24)
    engine = engine_for(world, kind)
    (first,) = engine.submit(Request([*common, 7, 8], 12))
    for _ in range(2):
        engine.step()
    (second,) = engine.submit(Request([*common, 9, 10, 11], 4))
    check_all(world, run_all(engine, [first, second]))
    assert (first.shared_tokens, second.shared_tokens) == (0, 24)
    assert engine.statistics.prefill_tokens == 26 + 3


# -- kept prefixes ---------------------------------------------------------------------------------------


def test_kept_prefix_is_computed_once_even_if_nothing_runs_in_between(world: ExportedWorld, kind: str) -> None:
    prefix = tokens_of(7, 30)
    watched = WatchedModel(world.model)
    engine = Engine(watched, world.model.new_cache(CAPACITY, kind=kind, max_seqs=4))
    engine.keep(prefix)
    engine.keep(prefix)
    run_all(engine, [])
    assert [len(call.tokens) for call in watched.calls] == [16, 14]
    assert held(engine) == 30
    for index in range(3):
        (answer,) = run_all(engine, engine.submit(Request([*prefix, 40 + index, 9], 3)))
        check_all(world, [answer])
        assert answer.shared_tokens == 30
        assert held(engine) == 30
    assert engine.statistics.prefill_tokens == 30 + 3 * 2
    engine.close()
    assert held(engine) == 0


def test_prefix_kept_while_its_prompts_wait_is_computed_once(world: ExportedWorld, kind: str) -> None:
    prefix = tokens_of(8, 20)
    engine = engine_for(world, kind)
    engine.keep(prefix)
    answers = [answer for index in range(3) for answer in engine.submit(Request([*prefix, 50 + index], 3))]
    check_all(world, run_all(engine, answers))
    assert engine.statistics.prefill_tokens == 20 + 3


def test_kept_prefix_is_given_up_where_one_sequence_needs_its_room(world: ExportedWorld, kind: str) -> None:
    prefix, capacity = tokens_of(9, 30), 60
    engine = engine_for(world, kind, capacity)
    engine.keep(prefix)
    run_all(engine, [])
    small = run_all(engine, engine.submit(Request(tokens_of(10, 20), 5)))
    assert held(engine) == 30, "there was room for both"
    large = run_all(engine, engine.submit(Request(tokens_of(11, 45), 5)))
    check_all(world, [*small, *large], capacity)
    assert held(engine) == 0
    # It can be kept anew.
    engine.keep(prefix)
    run_all(engine, [])
    assert held(engine) == 30


def test_kept_prefix_is_given_up_where_a_growing_answer_needs_its_room(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, 60)
    engine.keep(tokens_of(9, 30))
    run_all(engine, [])
    # Admitted with headroom for 16 tokens; it grows past the 30 that are free.
    answers = run_all(engine, engine.submit(Request(tokens_of(10, 10), 40)))
    check_all(world, answers, 60)
    assert answers[0].preemptions == 0
    assert held(engine) == 0


@pytest.mark.parametrize("max_seqs", [1, 2])
def test_kept_prefix_takes_one_of_the_sequences_and_nothing_is_stuck(
    world: ExportedWorld, kind: str, max_seqs: int
) -> None:
    engine = engine_for(world, kind, max_seqs=max_seqs)
    engine.keep(tokens_of(9, 20))
    answers = [answer for seed in range(4) for answer in engine.submit(Request(tokens_of(seed, 9), 5))]
    check_all(world, run_all(engine, answers))
    assert held(engine) == (20 if max_seqs == 2 else 0)


# -- a full cache ----------------------------------------------------------------------------------------


def test_newest_are_preempted_first_and_come_back_oldest_first(world: ExportedWorld, kind: str) -> None:
    capacity = 96
    engine = engine_for(world, kind, capacity)
    answers = [answer for seed in range(4) for answer in engine.submit(Request(tokens_of(20 + seed, 8), 40))]
    lost: list[int] = []
    before = [0] * 4
    while engine.has_work:
        engine.step()
        after = [answer.preemptions for answer in answers]
        lost += [index for index in reversed(range(4)) if after[index] > before[index]]
        before = after
    assert lost[:2] == [3, 2]
    assert 0 not in lost
    check_all(world, answers, capacity)
    finished = [answer.finished for answer in answers]
    assert finished == sorted(finished, key=lambda at: at or 0)
    assert engine.statistics.preemptions == len(lost)
    assert held(engine) == 0


def test_engine_that_refuses_ends_the_newest_and_the_others_go_on(world: ExportedWorld, kind: str) -> None:
    capacity = 96
    engine = engine_for(world, kind, capacity, when_full="refuse")
    answers = [answer for seed in range(4) for answer in engine.submit(Request(tokens_of(20 + seed, 8), 40))]
    updates = list(engine.run())
    refused = [answer for answer in answers if answer.finish_reason == "refused"]
    assert answers[3] in refused
    assert answers[0] not in refused
    for answer in refused:
        assert "the cache of 96 tokens was full" in (answer.error or "")
        assert 16 <= len(answer.tokens) < 40
        assert [u.finish_reason for u in updates if u.completion is answer][-1] == "refused"
    check_all(world, [answer for answer in answers if answer not in refused], capacity)
    assert engine.statistics.preemptions == 0
    assert held(engine) == 0
    check_all(world, run_all(engine, engine.submit(Request(tokens_of(23, 8), 40))), capacity)


def test_request_that_waited_for_room_begins_as_soon_as_there_is_some(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, 60)
    # Not even its prompt fits beside the first, of which nothing is computed yet when it is first looked at.
    (first,) = engine.submit(Request(tokens_of(1, 30), 3))
    (second,) = engine.submit(Request(tokens_of(2, 40), 3))
    (third,) = engine.submit(Request(tokens_of(3, 5), 3))
    while not first.is_done:
        engine.step()
        assert third.started is None, "nobody overtakes one that waits for room"
    engine.step()
    assert second.started is not None
    check_all(world, run_all(engine, [first, second, third]), 60)


def test_cache_that_something_else_fills_is_an_error_until_it_is_freed(world: ExportedWorld, kind: str) -> None:
    cache = world.model.new_cache(60, kind=kind, max_seqs=3)
    engine = Engine(world.model, cache)
    foreign = fill(world, cache, 30)
    answers = [*engine.submit(Request(tokens_of(1, 5), 4)), *engine.submit(Request(tokens_of(2, 40), 4))]
    with pytest.raises(CacheFullError, match=r"30 of 60 tokens .* something else uses the cache"):
        for _ in engine.run():
            pass
    assert [answer.finish_reason for answer in answers] == ["length", None]
    with pytest.raises(CacheFullError, match="something else"):
        engine.step()
    cache.seq_rm(foreign)
    check_all(world, run_all(engine, answers), 60)
    assert cache.free == 60


def test_running_answer_without_room_is_an_error_until_it_is_freed(world: ExportedWorld, kind: str) -> None:
    cache = world.model.new_cache(60, kind=kind, max_seqs=3)
    engine = Engine(world.model, cache)
    (answer,) = engine.submit(Request(tokens_of(1, 5), 30))
    engine.step()
    foreign = fill(world, cache, 45)
    with pytest.raises(CacheFullError, match="something else uses the cache"):
        for _ in engine.run():
            pass
    tokens = len(answer.tokens)
    assert not answer.is_done
    cache.seq_rm(foreign)
    check_all(world, run_all(engine, [answer]), 60)
    assert tokens > 1


# -- what is wrong with a request ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": [1] * 97}, "97 tokens and there is room for 96"),
        ({"prompt": [1, 300]}, "token 300: the model's vocabulary has 0 to 299"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": [1], "stop": ["x"]}, "stop strings need a tokenizer"),
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [1], "n": 0}, "n: expected 1 or more, got 0"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens: expected 1 or more, got 0"),
        ({"prompt": [1], "stop": "x"}, "stop: expected a list of texts"),
        ({"prompt": [1], "stop": [""]}, "stop: expected a list of texts that are not empty"),
    ],
    ids=str,
)
def test_request_that_can_never_be_answered_is_one_error_and_the_engine_goes_on(
    world: ExportedWorld, wrong: dict[str, Any], message: str
) -> None:
    engine = engine_for(world, "batched")
    (answer,) = engine.submit(Request(tokens_of(1, 5), 4))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**wrong))
    check_all(world, run_all(engine, [answer]))


@pytest.mark.parametrize(
    ("prefix", "message"), [([], "no tokens"), ([1] * 97, "room for 96"), ([1, 300], "token 300")], ids=str
)
def test_prefix_that_can_never_be_kept_is_one_error(world: ExportedWorld, prefix: list[int], message: str) -> None:
    engine = engine_for(world, "batched")
    with pytest.raises(ValueError, match=message):
        engine.keep(prefix)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_tokens": 17}, "step_tokens: expected 1 to 16, the model's limit, got 17"),
        ({"step_tokens": 0}, "step_tokens: expected 1 to 16"),
        ({"max_running": 0}, "max_running: expected 1 or more, got 0"),
        ({"when_full": "wait"}, "when_full: expected one of preempt, refuse, got 'wait'"),
    ],
    ids=str,
)
def test_engine_option_out_of_range_is_an_error(world: ExportedWorld, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(world, "batched", **options)


def test_cache_that_is_not_the_engines_own_is_an_error(world: ExportedWorld) -> None:
    with pytest.raises(TypeError, match="expected a cache of a batched kind, got MLXSequenceCache"):
        Engine(world.model, world.model.new_cache(30))
    cache = world.model.new_cache(30, kind="batched")
    cache.declare_step([cache.seq_new()] * 3)
    with CacheSession(cache):
        world.model.step_greedy([1, 2, 3], range(3), [2])
    with pytest.raises(ValueError, match="expected an empty cache, got one that holds 3 tokens"):
        Engine(world.model, cache)


@pytest.mark.parametrize("length", [95, 96])
def test_prompt_that_fills_the_context_gets_the_tokens_that_fit(world: ExportedWorld, kind: str, length: int) -> None:
    engine = engine_for(world, kind)
    (answer,) = run_all(engine, engine.submit(Request(tokens_of(1, length), 50)))
    assert len(answer.tokens) == 96 - length + 1
    check_all(world, [answer])


# -- sampling --------------------------------------------------------------------------------------------

SAMPLINGS = (
    GREEDY,
    Sampling(1.0, seed=1),
    Sampling(2.0, top_k=7, seed=1),
    Sampling(0.8, top_p=0.7, seed=2),
    Sampling(1.3, top_k=30, top_p=0.9, seed=3),
)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, max_seqs=6)
    requests = [Request(tokens_of(30 + i, 3 + 5 * i), 8, sampling, n=2) for i, sampling in enumerate(SAMPLINGS)]
    answers = [answer for request in requests for answer in engine.submit(request)]
    check_all(world, run_all(engine, answers))
    for sampled in range(1, len(SAMPLINGS)):
        first, second = answers[2 * sampled : 2 * sampled + 2]
        assert first.tokens != second.tokens, "each sample has a seed of its own"


def test_sampled_prompt_longer_than_a_step_is_computed_in_several(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, step_tokens=4)
    check_all(world, run_all(engine, engine.submit(Request(tokens_of(1, 30), 4, Sampling(1.0, seed=1)))))


class SpoiledModel(TokenModel):
    """Its logits after a prompt that begins with 0 are no numbers."""

    def logits(self, seen: tuple[Any, ...]) -> np.ndarray:
        scores = super().logits(seen)
        return np.full_like(scores, np.nan) if seen[0][0][1] == 0 and len(seen[0]) >= 4 else scores


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=1)], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_fail_their_own_request_only(kind: str, sampling: Sampling) -> None:
    model = SpoiledModel()
    cache = model.new_cache(90, kind=kind)
    engine = Engine(model, cache)
    (spoiled,) = engine.submit(Request([0, 5], 9, sampling))
    (sound,) = engine.submit(Request([1, 5], 9, Sampling(1.0, seed=4)))
    updates = list(engine.run())
    assert spoiled.finish_reason == "error"
    assert "cannot be sampled from" in (spoiled.error or "")
    assert len(spoiled.tokens) == 2
    assert [u.finish_reason for u in updates if u.completion is spoiled] == [None, None, "error"]
    assert (sound.finish_reason, len(sound.tokens)) == ("length", 9)
    assert cache.free == 90


# -- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_step_that_fails_is_run_again(
    world: ExportedWorld, kind: str, error: type[BaseException], is_late: bool
) -> None:
    watched = WatchedModel(world.model)
    engine = Engine(watched, world.model.new_cache(CAPACITY, kind=kind, max_seqs=4), step_tokens=8)
    answers = [
        *engine.submit(Request(tokens_of(1, 20), 6, Sampling(1.0, seed=1), n=2)),
        *engine.submit(Request(tokens_of(2, 3), 6)),
    ]
    streamed: Counter[Completion] = Counter()
    while engine.has_work:
        watched.failures.append((0, error, is_late))
        with pytest.raises(error):
            engine.step()
        engine._cache.check_integrity()
        streamed.update(update.completion for update in engine.step() if update.token is not None)
    check_all(world, answers)
    assert streamed == dict.fromkeys(answers, 6)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_interrupt_between_two_draws_changes_no_token(
    world: ExportedWorld, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    engine = engine_for(world, "batched")
    requests = [Request(tokens_of(seed, 3), 6, Sampling(1.0, seed=seed)) for seed in range(3)]
    answers = [answer for request in requests for answer in engine.submit(request)]
    engine.step()
    choose, calls = Sampler.choose, []

    def interrupted(sampler: Sampler, logits: Any, place: int) -> int:
        calls.append(sampler)
        if len(calls) == which + 1:
            raise KeyboardInterrupt
        return choose(sampler, logits, place)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_all(world, run_all(engine, answers))


def test_what_ended_before_a_failed_step_is_reported_by_the_next(world: ExportedWorld) -> None:
    watched = WatchedModel(world.model)
    engine = Engine(watched, world.model.new_cache(CAPACITY, kind="batched"))
    gone, going = (*engine.submit(Request([1], 9)), *engine.submit(Request([2], 9)))
    engine.step()
    gone.cancel()
    watched.failures.append((0, RuntimeError, False))
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.has_work
    updates = engine.step()
    assert [(u.completion, u.finish_reason) for u in updates] == [(gone, "cancelled"), (going, None)]


@pytest.mark.parametrize("when", range(0, 12, 3))
def test_lost_cache_is_computed_anew(world: ExportedWorld, kind: str, when: int) -> None:
    engine = engine_for(world, kind, step_tokens=7)
    prefix = tokens_of(40, 18)
    engine.keep(prefix)
    answers = [
        *engine.submit(Request([*prefix, 3], 6, Sampling(1.0, seed=1), n=2)),
        *engine.submit(Request(tokens_of(2, 9), 6)),
    ]
    for _ in range(when):
        engine.step()
    engine._cache.mark_lost("test")
    check_all(world, run_all(engine, answers))
    assert held(engine) == len(prefix), "the prefix is kept again"
    engine.close()
    assert held(engine) == 0


def test_cache_lost_while_nothing_runs_is_usable_again(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind)
    run_all(engine, engine.submit(Request([1, 2], 3)))
    engine._cache.mark_lost("test")
    check_all(world, run_all(engine, engine.submit(Request([1, 2], 3))))


# -- ends ------------------------------------------------------------------------------------------------


def test_cancelled_answer_frees_its_room_at_the_next_step(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind)
    stays, goes = (*engine.submit(Request(tokens_of(1, 5), 9)), *engine.submit(Request(tokens_of(2, 12), 9)))
    while not goes.tokens:
        engine.step()
    goes.cancel()
    updates = engine.step()
    assert [(u.token, u.finish_reason) for u in updates if u.completion is goes] == [(None, "cancelled")]
    assert held(engine) == 5 + len(stays.tokens) - 1
    check_all(world, run_all(engine, [stays]))
    goes.cancel()
    stays.cancel()
    assert (goes.finish_reason, stays.finish_reason) == ("cancelled", "length")


def test_answer_cancelled_before_it_began_costs_no_step(world: ExportedWorld) -> None:
    watched = WatchedModel(world.model)
    engine = Engine(watched, world.model.new_cache(CAPACITY, kind="batched"))
    answers = engine.submit(Request([1, 2], 3, n=2))
    for answer in answers:
        answer.cancel()
    updates = list(engine.run())
    assert {u.completion for u in updates} == set(answers)
    assert not watched.calls


def test_one_sample_may_be_cancelled_and_the_others_go_on(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, step_tokens=8)
    first, second, third = engine.submit(Request(tokens_of(1, 20), 6, Sampling(1.0, seed=1), n=3))
    engine.step()
    # The others wait for what it computes.
    first.cancel()
    check_all(world, run_all(engine, [second, third]))


def test_closed_engine_has_freed_all_and_may_be_used_again(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, 60)
    engine.keep(tokens_of(9, 20))
    answers = [answer for seed in range(5) for answer in engine.submit(Request(tokens_of(seed, 9), 30))]
    for _ in range(6):
        engine.step()
    later = engine.submit(Request([1], 2))
    engine.close()
    assert {answer.finish_reason for answer in [*answers, *later]} == {"cancelled"}
    assert held(engine) == 0
    assert not engine.has_work
    check_all(world, run_all(engine, engine.submit(Request([1, 2], 3))), 60)


def test_stop_token_ends_an_answer_and_is_left_out(world: ExportedWorld, kind: str) -> None:
    prompt = tokens_of(1, 9)
    whole = world.answer(prompt, GREEDY, frozenset(), 8).tokens
    engine = engine_for(world, kind)
    (answer,) = engine.submit(Request(prompt, 8, stop_ids=frozenset([whole[3]])))
    updates = list(engine.run())
    assert answer.finish_reason == "stop"
    assert answer.tokens == whole[: whole.index(whole[3])]
    assert (updates[-1].token, updates[-1].finish_reason) == (None, "stop")
    assert held(engine) == 0


def test_hundreds_of_requests_leave_nothing_behind(world: ExportedWorld, kind: str) -> None:
    capacity = 8 * 20
    engine = engine_for(world, kind, capacity)

    def round_of(seeds: range) -> int:
        requests = [
            Request(tokens_of(seed % 25, 1 + seed % 13), 1 + seed % 8, SAMPLINGS[seed % 2], n=1 + (seed % 10 == 0))
            for seed in seeds
        ]
        answers = [answer for request in requests for answer in engine.submit(request)]
        check_all(world, run_all(engine, answers), capacity)
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    first = round_of(range(40))
    assert round_of(range(40, 200)) <= first
    assert held(engine) == 0
    scheduler = engine._scheduler
    assert not any((engine._answers, engine._inbox, engine._updates))
    assert not any((scheduler.waiting, scheduler.running, scheduler.kept))


# -- threads ---------------------------------------------------------------------------------------------


def test_requests_of_several_threads_are_answered_while_another_steps(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind, 120)
    start, submitted = threading.Barrier(5), threading.Event()
    answers: dict[int, list[Completion]] = {index: [] for index in range(4)}
    errors: list[BaseException] = []
    updates: list[Update] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    def submit(index: int) -> None:
        for seed in range(6):
            answers[index] += engine.submit(Request(tokens_of(seed, 4 + seed), 4))

    def step() -> None:
        while not submitted.is_set() or engine.has_work:
            updates.extend(engine.step())

    stepper = threading.Thread(target=guarded, args=[step])
    submitters = [threading.Thread(target=guarded, args=[lambda i=index: submit(i)]) for index in range(4)]
    for thread in (stepper, *submitters):
        thread.start()
    for thread in submitters:
        thread.join()
    submitted.set()
    stepper.join()
    assert not errors
    all_answers = [answer for some in answers.values() for answer in some]
    check_all(world, all_answers, 120)
    ended = [update.completion for update in updates if update.finish_reason]
    assert Counter(ended) == Counter(all_answers)
    assert held(engine) == 0


def test_answer_is_cancelled_by_a_thread_while_another_computes_its_step(world: ExportedWorld, kind: str) -> None:
    computing, cancelled = threading.Event(), threading.Event()

    class Paused(WatchedModel):
        def _watched(self, run: Any, step: Any) -> Any:
            outputs = super()._watched(run, step)
            if len(self.calls) == 3:
                computing.set()
                assert cancelled.wait(60)
            return outputs

    engine = Engine(Paused(world.model), world.model.new_cache(CAPACITY, kind=kind))
    goes, stays = (*engine.submit(Request([1, 2, 3], 9)), *engine.submit(Request([4, 5], 9)))
    stepper = threading.Thread(target=lambda: run_all(engine, []))
    stepper.start()
    assert computing.wait(60)
    goes.cancel()
    cancelled.set()
    stepper.join()
    assert (goes.finish_reason, len(goes.tokens)) == ("cancelled", 2)
    check_all(world, [stays])
    assert held(engine) == 0


def test_steps_of_several_threads_take_turns(world: ExportedWorld, kind: str) -> None:
    engine = engine_for(world, kind)
    answers = [answer for seed in range(6) for answer in engine.submit(Request(tokens_of(seed, 7), 9))]
    threads = [threading.Thread(target=lambda: run_all(engine, [])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_all(world, answers)


# -- text ------------------------------------------------------------------------------------------------


class ScriptedModel(TokenModel):
    """Says a text, token by token, after a prompt of one token."""

    vocab_size = 128
    script = ""

    def logits(self, seen: tuple[Any, ...]) -> np.ndarray:
        said = len(seen[0]) - 1
        return np.eye(self.vocab_size)[ord(self.script[said]) if said < len(self.script) else ord("~")]


class Characters:
    """A tokenizer whose tokens are characters; ``^`` completes none, the next one brings both; ``~`` is an error."""

    def __init__(self) -> None:
        self._late = ""

    def stream(self) -> Characters:
        return Characters()

    def push(self, token: int) -> str:
        if token == ord("~"):
            raise Exception("this decoder has lost its way")
        text, self._late = self._late + chr(token), ""
        if text == "^":
            self._late, text = text, ""
        return text

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("script", "stop", "text", "num_tokens"),
    [
        ("hello END more", ["END"], "hello ", 9),
        ("aEb ENc ENDd", ["END"], "aEb ENc ", 11),
        ("aab aaab", ["aaab"], "aab ", 8),
        ("abcabd", ["abd"], "abc", 6),
        ("xx yy zz", ["zz", "yy"], "xx ", 5),
        ("one two", ["two", "e t"], "on", 5),
        ("abcd", ["abc", "bc"], "", 3),
        ("xbcd", ["abcd", "bc"], "x", 3),
        ("END", ["END"], "", 3),
        ("a^b", ["^b"], "a", 3),
        ("ab~c stop", ["stop"], "ab~c ", 9),
    ],
)
def test_stop_string_ends_the_text_before_it(script: str, stop: list[str], text: str, num_tokens: int) -> None:
    (answer, updates) = say(script, stop, 20)
    assert answer.finish_reason == "stop"
    assert answer.text == "".join(update.text for update in updates) == text
    assert answer.tokens == [ord(character) for character in script[:num_tokens]]
    assert [update.token for update in updates] == answer.tokens


@pytest.mark.parametrize(
    ("script", "stop", "max_new_tokens"),
    [("hello EN", ["END"], 8), ("aaa", ["aaaa"], 3), ("abc", ["cd", "bcd"], 3), ("ab^", ["^x"], 3), ("plain", [], 5)],
)
def test_what_was_held_back_for_a_stop_string_comes_at_the_end(
    script: str, stop: list[str], max_new_tokens: int
) -> None:
    (answer, updates) = say(script, stop, max_new_tokens)
    assert answer.finish_reason == "length"
    assert answer.text == "".join(update.text for update in updates) == script


def test_stop_string_that_only_the_end_shows_is_one_all_the_same() -> None:
    (answer, updates) = say("ab^", ["^"], 3)
    assert (answer.text, answer.finish_reason, updates[-1].finish_reason) == ("ab", "stop", "stop")


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    (_, updates) = say("aENbEND", ["END"], 9)
    assert [update.text for update in updates] == ["a", "", "", "ENb", "", "", ""]


def test_stop_token_gives_out_what_was_held_back() -> None:
    (answer, updates) = say("abEN!", ["END"], 9, frozenset([ord("!")]))
    assert (answer.text, answer.finish_reason) == ("abEN", "stop")
    assert (updates[-1].token, updates[-1].text) == (None, "EN")


def test_cancelled_answer_gives_out_what_was_held_back() -> None:
    model = ScriptedModel()
    model.script = "abEN"
    engine = Engine(model, model.new_cache(40), tokenizer=Characters())
    (answer,) = engine.submit(Request([1], 9, stop=["END"]))
    for _ in range(4):
        engine.step()
    assert answer.text == "ab"
    answer.cancel()
    (update,) = engine.step()
    assert (answer.text, update.text, update.finish_reason) == ("abEN", "EN", "cancelled")


def say(
    script: str, stop: list[str], max_new_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> tuple[Completion, list[Update]]:
    model = ScriptedModel()
    model.script = script
    engine = Engine(model, model.new_cache(40), tokenizer=Characters())
    (answer,) = engine.submit(Request([1], max_new_tokens, stop=stop, stop_ids=stop_ids))
    return answer, list(engine.run())
