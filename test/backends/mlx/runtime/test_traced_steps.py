"""Steps traced by mx.compile are the steps as they are written."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.backends.mlx.runtime import trace
from executorch_mlx.backends.mlx.runtime.caches import MLXSequenceCache
from executorch_mlx.extension.llm.cache import CacheSession, LayerPlan
from oracles.small_programs import VOCABULARY, cache_config, tiny_lm

pytestmark = pytest.mark.usefixtures("on_cpu")


class Forgetful(MLXSequenceCache):
    """Attends over the step's own tokens only, so that what it computes follows from arrays; counts its tracings."""

    traced_calls = 0
    fails = False

    def answer(self, q: mx.array, k: mx.array, v: mx.array, scale: float, offset: mx.array) -> mx.array:
        if self.fails:
            raise RuntimeError("no attention today")
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal") + offset

    def _attend(self, plan: LayerPlan, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return self.answer(q, k, v, scale, mx.array(float(plan.start)))

    def traced(self, layers: Any, positions: tuple[int, ...]) -> trace.TracedAttention:
        return _Step(self, [self.plan(layer, positions) for layer in layers])


class _Step(trace.TracedAttention):
    def __init__(self, cache: Forgetful, plans: list[LayerPlan]) -> None:
        self.cache, self.plans = cache, plans
        self.arrays, self.fixed = [mx.array(float(plans[0].start))], ("forgetful",)

    def attend(self, arrays: list[Any], layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        self.cache.traced_calls += 1
        return self.cache.answer(q, k, v, scale, arrays[0])

    def commit(self, results: list[mx.array]) -> None:
        assert len(results) == len(self.plans)
        for plan in self.plans:
            with self.cache.writing(plan):
                pass


class Pair:
    """A program with a tracer, and the same without."""

    def __init__(self) -> None:
        self.methods = [load_program(tiny_lm()).load_method("forward").direct() for _ in range(2)]
        program = self.methods[1]._program
        self.tracer = program._tracer = trace.Tracer(program.graph, program._run)
        self.caches = [Forgetful(cache_config()) for _ in range(2)]
        self._random = np.random.default_rng(0)

    def step(self, num_tokens: int) -> None:
        start = self.caches[0].position
        tokens = self._random.integers(0, VOCABULARY, (1, num_tokens))
        answers = []
        for method, cache in zip(self.methods, self.caches, strict=True):
            with CacheSession(cache):
                (out,) = method([tokens, np.arange(start, start + num_tokens)])
            answers.append(np.array(out))
        np.testing.assert_allclose(answers[1], answers[0], rtol=1e-5, atol=1e-5)
        assert self.caches[1].position == start + num_tokens


def test_traced_steps_are_those_that_are_written() -> None:
    pair = Pair()
    for num_tokens in (1, 1, 1, 1, 3, 1, 3, 2, 3, 1, 3):
        pair.step(num_tokens)
    layers = len(pair.caches[1].config.layers)
    # One token was traced at its third step, three tokens at theirs; two tokens came once.
    assert (pair.caches[0].traced_calls, pair.caches[1].traced_calls) == (0, 2 * layers)


def test_shape_that_is_seldom_seen_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_TRACES", 1)
    pair = Pair()
    for num_tokens in (1, 1, 2, 1, 1, 2):
        pair.step(num_tokens)
    assert pair.caches[1].traced_calls == 0
    assert len(pair.tracer._traces) == 1


def test_what_fails_while_it_is_traced_fails_as_it_is_written() -> None:
    pair = Pair()
    for _ in range(2):
        pair.step(1)
    pair.caches[1].fails = True
    with pytest.raises(RuntimeError, match="no attention today"), CacheSession(pair.caches[1]):
        pair.methods[1]([np.array([[1]]), np.array([2])])
    assert pair.caches[1].position == 2
    pair.caches[1].fails = False
    for _ in range(4):
        pair.step(1)


def test_token_past_the_vocabulary_is_an_error_in_a_traced_step() -> None:
    pair = Pair()
    for _ in range(4):
        pair.step(1)
    with pytest.raises(IndexError, match="past the vocabulary"), CacheSession(pair.caches[1]):
        pair.methods[1]([np.array([[VOCABULARY]]), np.array([4])])
    assert pair.caches[1].position == 4
    pair.step(1)


def test_traces_hold_no_cache() -> None:
    pair = Pair()
    for _ in range(4):
        pair.step(1)
    kept, cache = pair.tracer, weakref.ref(pair.caches[1])
    pair.caches.clear()
    gc.collect()
    assert kept is pair.tracer
    assert cache() is None
