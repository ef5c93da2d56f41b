"""Methods called without ExecuTorch in between."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.extension.llm.cache import CacheSession, build
from oracles.small_programs import VOCABULARY, affine, cache_config, split_lm, tiny_lm

pytestmark = pytest.mark.usefixtures("on_cpu")

BATCHED = ("batched-paged", "batched-sequence", "batched-cell")


def greedy() -> Any:
    return load_program(tiny_lm()).load_method("forward_greedy")


def test_method_without_a_cache_equals_its_execute() -> None:
    method = load_program(affine()).load_method("forward")
    x = torch.randn(3, 4)
    (expected,) = method.execute([x])
    for value in (x.numpy(), x.tolist(), mx.array(x.numpy())):
        (out,) = method.direct()([value])
        np.testing.assert_allclose(np.array(out), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", BATCHED)
def test_tokens_may_stay_on_the_device(kind: str, *, wait: bool) -> None:
    method = greedy()
    direct = method.direct()
    caches = [build("MLXBackend", kind, cache_config(60)) for _ in range(2)]
    ids = [[cache.seq_new() for _ in range(3)] for cache in caches]
    tokens: list[Any] = [np.array([[3, 1, 4]]), np.array([[3, 1, 4]])]
    for step in range(6):
        # The third sequence comes in later.
        taking = 2 if step < 2 else 3
        positions = [caches[0].pos(seq_id) for seq_id in ids[0][:taking]]
        for cache, its in zip(caches, ids, strict=True):
            assert cache.declare_step(its[:taking])
        with CacheSession(caches[0]):
            inputs = [torch.tensor(np.array(tokens[0])[:, :taking]), torch.tensor(positions)]
            out = method.execute(inputs)[0].numpy()
        with CacheSession(caches[1]):
            (lazy,) = direct([tokens[1][:, :taking], positions], wait=wait)
        tokens = [np.concatenate([out, [[4]]], 1)[:, :3], mx.concatenate([lazy, mx.array([[4]])], axis=1)[:, :3]]
        assert [cache.pos(its[0]) for cache, its in zip(caches, ids, strict=True)] == [step + 1] * 2
        caches[1].check_integrity()
    np.testing.assert_array_equal(np.array(tokens[1]), tokens[0])


def test_index_outside_of_its_tensor_is_reported_by_the_call_or_by_the_next() -> None:
    direct = greedy().direct()
    cache = build("MLXBackend", "sequence", cache_config())
    with CacheSession(cache):
        with pytest.raises(IndexError, match="past the vocabulary"):
            direct([[[VOCABULARY]], [0]])
        assert cache.position == 0
        direct([mx.array([[VOCABULARY]], mx.int64), [0]], wait=False)
        assert cache.position == 1
        with pytest.raises(IndexError, match="past the vocabulary"):
            direct([[[1]], [1]])
        assert cache.position == 1
        direct([[[1]], [1]])
        assert cache.position == 2


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([[[1]]], ValueError, "takes 2 inputs, got 1"),
        ([mx.array([[1.0]]), [0]], TypeError, "input 0: expected int64, got float32"),
        ([[[1]], [5]], ValueError, "position 5 where 0 was due"),
    ],
)
def test_wrong_call_is_an_error_and_changes_nothing(inputs: list[Any], error: type, message: str) -> None:
    direct = greedy().direct()
    cache = build("MLXBackend", "sequence", cache_config())
    with CacheSession(cache):
        with pytest.raises(error, match=message):
            direct(inputs)
        assert cache.position == 0
        direct([[[1]], [0]])
        assert cache.position == 1


def test_cache_is_needed_and_must_be_mlx() -> None:
    direct = greedy().direct()
    with pytest.raises(LookupError, match="no session is active"):
        direct([[[1]], [0]])
    import executorch_mlx.extension.llm.cache.op  # noqa: F401  registers the eager layouts

    with CacheSession(build("eager", "sequence", cache_config())), pytest.raises(TypeError, match="no MLX arrays"):
        direct([[[1]], [0]])


def test_method_of_several_delegates_is_refused() -> None:
    with pytest.raises(ValueError, match="MLX delegates, or operators of its own"):
        load_program(split_lm()).load_method("forward").direct()
