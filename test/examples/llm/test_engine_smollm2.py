"""SmolLM2 in a batch: prompts that arrive one after another, one that leaves, and a cache too small for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executorch_mlx.extension.llm.engine import Completion, Engine, Request, Sampling
from oracles.engine_worlds import ExportedWorld, check_answer

CAPACITY = 650
# At which step, how many tokens, how many new ones.
SCHEDULE = ((0, 600, 6), (0, 1, 36), (0, 7, 36), (5, 33, 6), (9, 64, 6), (20, 150, 6))
CANCELLED, SAMPLED = 4, 3


@pytest.fixture(scope="module")
def world(smollm2: Any, one_torch_thread: None) -> ExportedWorld:
    return ExportedWorld(smollm2)


@pytest.mark.smollm2
@pytest.mark.parametrize("kind", ["batched-cell", "batched-sequence"])
def test_smollm2_in_a_batch_gives_each_prompt_the_tokens_it_gets_alone(world: ExportedWorld, kind: str) -> None:
    cache = world.model.new_cache(CAPACITY, kind=kind, max_seqs=6)
    engine = Engine(world.model, cache)
    answers: dict[int, tuple[Completion, ...]] = {}
    steps = 0
    while len(answers) < len(SCHEDULE) or engine.has_work:
        for index, (at, length, count) in enumerate(SCHEDULE):
            if at == steps:
                prompt = np.random.default_rng(index).integers(1000, 40_000, length).tolist()
                is_sampled = index == SAMPLED
                sampling = Sampling(0.8, top_p=0.95, seed=7) if is_sampled else Sampling()
                answers[index] = engine.submit(Request(prompt, count, sampling, n=1 + is_sampled))
        if CANCELLED in answers and answers[CANCELLED][0].tokens:
            answers[CANCELLED][0].cancel()
        engine.step()
        steps += 1
        assert steps < 1000
    for index, completions in answers.items():
        for completion in completions:
            assert completion.finish_reason == ("cancelled" if index == CANCELLED else "length")
            check_answer(world, completion, CAPACITY)
    assert engine.statistics.preemptions > 0
    assert engine.statistics.most_running > 2
    assert cache.free == CAPACITY
