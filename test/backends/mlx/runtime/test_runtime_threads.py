"""Programs under several threads: no results mixed up, no sessions crossed, no threads left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.extension.llm.cache import CacheSession, build
from oracles.small_programs import (
    CAPACITY,
    VOCABULARY,
    Function,
    TinyLM,
    cache_config,
    export,
    pointwise,
    rows,
    tiny_lm,
)

PATIENCE_S = 60  # how long a test waits for threads that should be done soon
RUNS = 200


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run all at once, each in a thread; return their results in order, or raise what the first raised."""
    barrier = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int, work: Callable[[], Any]) -> None:
        try:
            barrier.wait(PATIENCE_S)
            results[index] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def count_wrong(method: Any, function: Callable[[torch.Tensor], torch.Tensor], seed: int) -> int:
    """Execute with other values and sizes each time; count the results that are not the function's."""
    generator = torch.Generator().manual_seed(seed)
    wrong = 0
    for run in range(RUNS):
        x = torch.rand((run + seed) % 16 + 1, 3, generator=generator)
        (out,) = method.execute([x])
        wrong += not torch.equal(out, function(x))
    return wrong


def test_method_in_two_threads_gives_each_its_own_results() -> None:
    program = load_program(pointwise())
    method = program.load_method("forward")
    works = [lambda seed=seed: count_wrong(method, lambda x: x * 2, seed) for seed in (1, 2)]
    assert in_threads(*works) == [0, 0]


def test_methods_of_one_program_in_two_threads_give_each_its_own_results() -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "doubled": lambda x: x * 2,
        "shifted": lambda x: x + 3,
    }
    content = export(
        {name: (Function(function), (torch.zeros(2, 3),), ({0: rows()},)) for name, function in functions.items()}
    )
    program = load_program(content)
    works = [
        lambda name=name, seed=seed: count_wrong(program.load_method(name), functions[name], seed)
        for seed, name in enumerate(functions)
    ]
    assert in_threads(*works) == [0, 0]


def test_programs_in_two_threads_give_each_its_own_results() -> None:
    programs = [load_program(pointwise()) for _ in range(2)]
    works = [
        lambda program=program, seed=seed: count_wrong(program.load_method("forward"), lambda x: x * 2, seed)
        for seed, program in enumerate(programs)
    ]
    assert in_threads(*works) == [0, 0]


def test_programs_loaded_and_dropped_in_two_threads_run() -> None:
    def load_and_run() -> int:
        right = 0
        for number in range(20):
            program = load_program(pointwise())
            (out,) = program.load_method("forward").execute([torch.full((2, 3), float(number))])
            right += torch.equal(out, torch.full((2, 3), 2.0 * number))
        return right

    assert in_threads(load_and_run, load_and_run) == [20, 20]


def test_errors_in_two_threads_stay_with_their_thread() -> None:
    program = load_program(pointwise())
    method = program.load_method("forward")

    def fail(bad: torch.Tensor, message: str) -> int:
        matching = 0
        for _ in range(50):
            with pytest.raises((TypeError, ValueError)) as raised:  # noqa: PT012
                method.execute([torch.ones(2, 3)])
                method.execute([bad])
            matching += message in str(raised.value)
        return matching

    works = (
        lambda: fail(torch.ones(2, 3, dtype=torch.int64), "got int64"),
        lambda: fail(torch.ones(2, 4), "got [2, 4]"),
    )
    assert in_threads(*works) == [50, 50]


def test_sessions_in_two_threads_under_one_method_do_not_cross() -> None:
    program = load_program(tiny_lm())
    method = program.load_method("forward")
    positions = torch.arange(CAPACITY)

    def converse(tokens: torch.Tensor, expected: torch.Tensor) -> float:
        worst = 0.0
        for _ in range(3):
            with CacheSession(build("MLXBackend", "sequence", cache_config())):
                for start, stop in [(0, 4), *((n, n + 1) for n in range(4, CAPACITY))]:
                    (logits,) = method.execute([tokens[:, start:stop], positions[start:stop]])
                    worst = max(worst, float((logits - expected[:, start:stop]).abs().max()))
        return worst

    eager = TinyLM()
    works = []
    for seed in (1, 2):
        tokens = torch.randint(0, VOCABULARY, (1, CAPACITY), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            works.append(partial(converse, tokens, eager(tokens, positions)))
    assert max(in_threads(*works)) < 1e-4


def test_session_activated_in_another_thread_goes_on_there() -> None:
    program = load_program(tiny_lm())
    method = program.load_method("forward")
    tokens, positions = torch.arange(6)[None], torch.arange(6)
    with torch.no_grad():
        expected = TinyLM()(tokens, positions)
    with CacheSession(build("MLXBackend", "sequence", cache_config())) as session:
        method.execute([tokens[:, :3], positions[:3]])

        def go_on() -> Any:
            with session.activate():
                return method.execute([tokens[:, 3:], positions[3:]])

        ((logits,),) = in_threads(go_on)
        assert session.control.position == 6
    torch.testing.assert_close(logits, expected[:, 3:], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_execute_in_many_threads_leaves_no_threads_behind() -> None:
    program = load_program(tiny_lm())
    method = program.load_method("forward")

    def execute() -> None:
        with CacheSession(build("MLXBackend", "sequence", cache_config())):
            method.execute([torch.zeros(1, 2, dtype=torch.long), torch.arange(2)])

    def num_tasks() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    in_threads(execute)
    before = num_tasks()
    in_threads(*[execute] * 50)
    assert num_tasks() <= before + 2
