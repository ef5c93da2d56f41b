"""The engine for asyncio: streams that run together, are left, are cancelled, or whose step fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from executorch_mlx.extension.llm.engine import AsyncEngine, Completion, Engine, Request, Sampling
from oracles.engine_worlds import InjectedError, TokenWorld, WatchedModel, check_answer

CAPACITY = 90
WORLD = TokenWorld((None,))


def engine_over(kind: str = "batched-sequence") -> tuple[Engine, WatchedModel, Any]:
    watched = WatchedModel(WORLD.model)
    cache = WORLD.model.new_cache(CAPACITY, kind=kind, max_seqs=8)
    return Engine(watched, cache, step_tokens=8), watched, cache


def request(seed: int, max_new_tokens: int = 8, n: int = 1) -> Request:
    prompt = [(seed * 7 + index * index) % 23 for index in range(2 + 3 * seed)]
    return Request(prompt, max_new_tokens, Sampling(1.0, seed=seed) if seed % 2 else Sampling(), n=n)


async def consume(engine: AsyncEngine, request: Request) -> list[Completion]:
    """Read a stream to its end; return its answers, whose tokens are those that came."""
    streamed: dict[Completion, list[int]] = {}
    async for update in engine.stream(request):
        streamed.setdefault(update.completion, [])
        if update.token is not None:
            streamed[update.completion].append(update.token)
    assert all(completion.tokens == tokens for completion, tokens in streamed.items())
    assert len(streamed) == request.n
    return list(streamed)


async def all_others() -> None:
    """Wait until no other task is left."""
    own = {task for task in asyncio.all_tasks() if task is asyncio.current_task() or task.get_name() == "guard"}
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - own), return_exceptions=True), 30)
    assert asyncio.all_tasks() == own


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def guarded() -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("guard")
        # What should end and does not is a failure, not a hang.
        return await asyncio.wait_for(main, 60)

    return asyncio.run(guarded())


@pytest.mark.parametrize("kind", ["batched-cell", "batched-sequence"])
def test_streams_that_run_together_give_the_tokens_of_each_alone_and_leave_no_task(kind: str) -> None:
    engine, _, cache = engine_over(kind)

    async def main() -> list[list[Completion]]:
        driven = AsyncEngine(engine)
        results = await asyncio.gather(*(consume(driven, request(seed, n=1 + seed % 3)) for seed in range(6)))
        await all_others()
        return results

    for completions in run(main()):
        for completion in completions:
            assert completion.finish_reason == "length"
            check_answer(WORLD, completion, CAPACITY)
    assert engine.statistics.most_running > 1
    assert cache.free == CAPACITY


def test_engine_may_be_driven_in_one_event_loop_after_another() -> None:
    engine, _, _ = engine_over()
    driven = AsyncEngine(engine)
    for seed in range(3):
        for completion in run(consume(driven, request(seed))):
            check_answer(WORLD, completion, CAPACITY)


def test_stream_that_is_left_early_is_cancelled_and_the_others_go_on() -> None:
    engine, _, cache = engine_over()

    async def main() -> tuple[Completion, list[Completion]]:
        driven = AsyncEngine(engine)
        other = asyncio.create_task(consume(driven, request(2)))
        async with aclosing(driven.stream(request(1, 40))) as stream:
            for _ in range(3):
                update = await anext(stream)
        completions = await other
        await all_others()
        return update.completion, completions

    left, completions = run(main())
    assert left.finish_reason == "cancelled"
    assert len(left.tokens) < 40
    check_answer(WORLD, left, CAPACITY)
    for completion in completions:
        check_answer(WORLD, completion, CAPACITY)
    assert cache.free == CAPACITY


def test_task_that_is_cancelled_frees_its_sequence() -> None:
    engine, _, cache = engine_over()

    async def main() -> list[Completion]:
        driven, seen, some = AsyncEngine(engine), [], asyncio.Event()

        async def read() -> None:
            async for update in driven.stream(request(3, 40, n=2)):
                seen.append(update.completion)
                some.set()

        task = asyncio.create_task(read())
        await some.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await all_others()
        return seen

    assert {completion.finish_reason for completion in run(main())} == {"cancelled"}
    assert cache.free == CAPACITY
    assert not engine.has_work


def test_step_that_fails_reaches_all_streams_and_later_requests_are_answered() -> None:
    engine, watched, cache = engine_over()

    async def main() -> tuple[list[Any], list[Completion]]:
        driven = AsyncEngine(engine)
        watched.failures.append((4, InjectedError, False))
        tasks = [consume(driven, request(seed, 20)) for seed in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        later = await consume(driven, request(5))
        await all_others()
        return results, later

    results, later = run(main())
    assert [type(result) for result in results] == [InjectedError] * 4
    for completion in later:
        check_answer(WORLD, completion, CAPACITY)
    assert cache.free == CAPACITY


def test_step_that_fails_again_and_again_is_not_repeated_for_nobody() -> None:
    engine, watched, _ = engine_over()
    engine.keep([1] * 20)
    watched.failures.extend([(0, InjectedError, False)] * 100)

    async def main() -> None:
        with pytest.raises(InjectedError):
            await consume(AsyncEngine(engine), request(0))
        await all_others()

    run(main())
    assert len(watched.failures) > 90, "nobody waits for the prefix alone"


def test_closing_the_engine_ends_its_streams() -> None:
    engine, watched, cache = engine_over()

    async def main() -> None:
        server = AsyncEngine(engine)
        stream = server.stream(request(3, 40))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RuntimeError, match="the engine was closed"):
            async for _ in stream:
                pass
        await all_others()
        assert (await consume(server, request(1)))[0].finish_reason == "length"

    run(main())
    assert cache.free == CAPACITY
    assert watched.calls


def test_request_that_can_never_be_answered_is_the_streams_error() -> None:
    engine, _, _ = engine_over()

    async def main() -> None:
        with pytest.raises(ValueError, match="token 23"):
            await consume(AsyncEngine(engine), Request([23]))
        await all_others()

    run(main())
    assert not engine.has_work


def test_stream_that_is_never_read_asks_for_nothing() -> None:
    engine, _, _ = engine_over()

    async def main() -> None:
        AsyncEngine(engine).stream(request(0))
        await all_others()

    run(main())
    assert not engine.has_work
