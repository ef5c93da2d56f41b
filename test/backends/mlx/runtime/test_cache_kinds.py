"""One exported program under every kind of cache, switched by sessions: in turn, in threads and in asyncio tasks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import pytest
import torch
from executorch.runtime import Runtime

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.extension.llm.cache import CacheSession, StepError, build
from oracles.small_programs import CAPACITY, VOCABULARY, TinyLM, cache_config, num_delegates, split_lm, tiny_lm

BATCHED = ("batched-cell", "batched-sequence", "batched-paged", "batched")


# Made once, before any thread: making one seeds torch's global generator.
EAGER_MODELS = {split: TinyLM(split=split) for split in (False, True)}


class Prompts:
    """Several sequences of tokens, run in flat steps and compared with the eager model on each alone."""

    def __init__(self, method: Any, cache: Any, num_seqs: int, seed: int, *, split: bool = False) -> None:
        self.method, self.cache = method, cache
        self.ids = [cache.seq_new() for _ in range(num_seqs)]
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (num_seqs, CAPACITY), generator=generator)
        with torch.no_grad():
            self.expected = torch.cat([EAGER_MODELS[split](row[None], torch.arange(CAPACITY)) for row in self.tokens])

    def step(self, *indices: int) -> None:
        """Run a token of each sequence named, in this order, and compare."""
        due = [self.cache.pos(seq_id) for seq_id in self.ids]
        at: list[tuple[int, int]] = []
        for index in indices:
            at.append((index, due[index]))
            due[index] += 1
        rows, positions = zip(*at, strict=True)
        assert self.cache.declare_step([self.ids[index] for index in indices])
        (logits,) = self.method.execute([self.tokens[rows, positions][None], torch.tensor(positions)])
        torch.testing.assert_close(logits[0], self.expected[rows, positions], rtol=1e-4, atol=1e-4)


def cache_of(kind: str, num_seqs: int = 3) -> Any:
    return build("MLXBackend", kind, cache_config(CAPACITY * num_seqs))


MIXED_STEPS: Sequence[tuple[int, ...]] = ((0, 0, 0), (1, 1, 0, 2), (0, 1, 2, 1), (2,), (2, 1, 0), (0, 0, 2, 2, 1))


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program(tiny_lm())


@pytest.mark.parametrize("kind", BATCHED)
def test_flat_steps_of_many_sequences_equal_the_eager_model_on_each(program: Any, kind: str) -> None:
    with CacheSession(cache_of(kind)) as session:
        prompts = Prompts(program.load_method("forward"), session.control, 3, seed=1)
        for indices in MIXED_STEPS:
            prompts.step(*indices)
        session.control.check_integrity()


@pytest.mark.parametrize("kind", BATCHED)
def test_program_of_several_delegates_runs_in_one_declared_step(kind: str) -> None:
    assert num_delegates(split_lm()) > 1
    program = load_program(split_lm())
    with CacheSession(cache_of(kind)) as session:
        prompts = Prompts(program.load_method("forward"), session.control, 3, seed=2, split=True)
        for indices in MIXED_STEPS:
            prompts.step(*indices)


@pytest.mark.parametrize("kind", BATCHED)
def test_forward_without_a_declaration_says_so_and_a_declared_one_runs(program: Any, kind: str) -> None:
    method = program.load_method("forward")
    with CacheSession(cache_of(kind)) as session:
        prompts = Prompts(method, session.control, 1, seed=3)
        prompts.step(0, 0)
        with pytest.raises(StepError, match="declare_step"):
            method.execute([prompts.tokens[:, 2:3], torch.tensor([2])])
        assert session.control.declare_step([0, 0])
        with pytest.raises(StepError, match="declared with 2 tokens and brings 1"):
            method.execute([prompts.tokens[:, 2:3], torch.tensor([2])])
        prompts.step(0)
        assert session.control.pos(0) == 3


def test_stock_runtime_with_a_batched_cache_equals_the_eager_model() -> None:
    method = Runtime.get().load_program(tiny_lm()).load_method("forward")
    with CacheSession(cache_of("batched")) as session:
        prompts = Prompts(method, session.control, 2, seed=4)
        prompts.step(0, 1, 0)
        prompts.step(1, 0)


def test_sessions_of_all_kinds_take_turns_under_one_program_with_its_weights_once(program: Any) -> None:
    methods = [program.load_method(name) for name in ("forward", "forward_greedy")]
    gc.collect()
    mx.clear_cache()  # a buffer that is used again may be larger than what is put in it
    loaded = mx.get_active_memory()
    sessions = [CacheSession(cache_of(kind)) for kind in (*BATCHED, "batched-cell")]
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session)
        prompts = [Prompts(methods[0], session.control, 2, seed) for seed, session in enumerate(sessions)]
        for indices in ((0, 0, 1), (1, 0), (1,), (0, 1, 1)):
            for session, its in zip(sessions, prompts, strict=True):
                with session.activate():
                    its.step(*indices)
        single = build("MLXBackend", "sequence", cache_config())
        with CacheSession(single):
            (tokens,) = methods[1].execute([prompts[0].tokens[:1, :5], torch.arange(5)])
            assert torch.equal(tokens[0], prompts[0].expected[0, :5].argmax(-1))
        pools = single.pool_bytes + sum(session.control.pool_bytes for session in sessions)
        gc.collect()
        mx.synchronize()
        assert mx.get_active_memory() - loaded == pools, "nothing but the caches' pools has been added"


@pytest.mark.parametrize("kind", BATCHED)
def test_threads_with_a_session_each_are_never_crossed(program: Any, kind: str) -> None:
    errors: list[BaseException] = []

    def serve(seed: int) -> None:
        try:
            with CacheSession(cache_of(kind)) as session:
                prompts = Prompts(program.load_method("forward"), session.control, 3, seed)
                for indices in MIXED_STEPS:
                    prompts.step(*indices)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("kind", BATCHED)
def test_asyncio_tasks_with_a_session_each_are_never_crossed(program: Any, kind: str) -> None:
    async def serve(seed: int) -> None:
        with CacheSession(cache_of(kind)) as session:
            prompts = Prompts(program.load_method("forward"), session.control, 3, seed)
            for indices in MIXED_STEPS:
                prompts.step(*indices)
                await asyncio.sleep(0)

    async def serve_all() -> None:
        await asyncio.gather(*(serve(seed) for seed in range(4)))

    asyncio.run(serve_all())


def test_session_activated_in_a_worker_thread_serves_there(program: Any) -> None:
    with CacheSession(cache_of("batched")) as session:
        prompts = Prompts(program.load_method("forward"), session.control, 2, seed=5)

        def step() -> None:
            with session.activate():
                prompts.step(0, 1)

        async def serve() -> None:
            for _ in range(3):
                await asyncio.to_thread(step)
                prompts.step(1, 0, 0)

        asyncio.run(serve())
        assert session.control.pos(prompts.ids[0]) == 9
