"""What ``decode.py`` measures: sequences with a history, and models that step them."""

from __future__ import annotations

import functools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from executorch_mlx.backends.mlx.runtime.caches import KINDS
from executorch_mlx.backends.mlx.runtime.device import STREAM, exclusive, is_cpu
from executorch_mlx.backends.mlx.runtime.trace import TracedAttention
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig

Shape = dict[str, Any]


def _llama(layers: int, width: int, inner: int, heads: tuple[int, int], vocab: int, base: float, dtype: str) -> Shape:
    """Return a model's shape as mlx-lm's configuration has it, and the dtype."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, (layers, width, inner, *heads), strict=True))
    return {**sizes, "head_dim": 64, "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": base, "dtype": dtype}


SHAPES = {
    "smollm2-135m": _llama(30, 576, 1536, (9, 3), 49152, 1e5, "float32"),
    "llama-3.2-1b": _llama(16, 2048, 8192, (32, 8), 128256, 5e5, "bfloat16"),
}

METHOD = "forward_greedy"
PAGED, SEQUENCE, CELL = LAYOUTS = ("batched-paged", "batched-sequence", "batched-cell")
THROUGH = "batched-paged through ExecuTorch"
MLX_LM = "mlx-lm"
FLOOR = "no attention"
CONTENDERS = (*LAYOUTS, THROUGH, MLX_LM, FLOOR)

# How a contender is stepped: it waits for each step; or begins the next one before it reads the last one's tokens; or
# copies each step's tokens to the host and feeds them from there.
SYNCHRONOUS, OVERLAPPED, HOST = "synchronous", "overlapped", "host"
LINES = {
    PAGED: (PAGED, SYNCHRONOUS),
    f"{PAGED}, overlapped": (PAGED, OVERLAPPED),
    SEQUENCE: (SEQUENCE, SYNCHRONOUS),
    CELL: (CELL, SYNCHRONOUS),
    MLX_LM: (MLX_LM, SYNCHRONOUS),
    f"{MLX_LM}, pipelined": (MLX_LM, OVERLAPPED),
    FLOOR: (FLOOR, SYNCHRONOUS),
}
HOST_LINES = {"callable": (PAGED, HOST), ".pte through ExecuTorch": (THROUGH, HOST)}
ROOFLINE = "memory roofline"

FORKED = 2000
RAGGED = 2
"""The longest of ragged sequences, in lengths of the shortest."""
ROOM = 1024
"""Tokens that a sequence may grow by."""


class Contender(ABC):
    """Sequences with a history, and a model that steps them."""

    @abstractmethod
    def fill(self, lengths: Sequence[int]) -> None:
        """Begin anew with sequences of these lengths."""

    @abstractmethod
    def drop(self) -> None:
        """Free what the sequences take."""

    @abstractmethod
    def step(self, manner: str) -> Any:
        """Step all sequences once, in a manner; return their tokens."""

    def steps(self, count: int, manner: str) -> list[float]:
        """Return the seconds of steps; one that comes before them is not counted."""
        last, times = self.step(manner), []
        for _ in range(count):
            began = time.perf_counter()
            tokens = self.step(manner)
            if manner == OVERLAPPED:
                np.array(last)
            last = tokens
            times.append(time.perf_counter() - began)
        np.array(last)
        return times

    def bandwidth(self) -> float:
        """Return the bytes per second, read and written, of a copy."""
        num_bytes, times = 2**28 if is_cpu() else 2**30, []
        source = mx.zeros(num_bytes // 4)
        mx.eval(source)
        on_host = np.array(source) if is_cpu() else None
        target = None if on_host is None else on_host.copy()
        for _ in range(8):
            began = time.perf_counter()
            if on_host is not None:
                np.copyto(target, on_host)  # MLX would pay for fresh pages with each copy
            else:
                mx.eval(source + 0)
            times.append(time.perf_counter() - began)
        return 2 * num_bytes / statistics.median(times)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the method that a request names; an exception is part of the answer."""
        method = getattr(self, request.pop("do"))
        try:
            return {"value": method(**request)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class Ours(Contender):
    """The compiled callable over one of this package's caches."""

    def __init__(self, direct: Any, builder: Callable[[CacheConfig], Any], shape: Shape) -> None:
        self._direct, self._builder, self._shape = direct, builder, shape
        self._cache: Any = None

    def fill(self, lengths: Sequence[int], *, capacity: int | None = None, initial: int = 512) -> None:
        """As ``Contender.fill``; a cache may be given another capacity and size to start with."""
        self.drop()
        heads, dim, layers = (self._shape[key] for key in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
        capacity = capacity or sum(lengths) + ROOM * (len(lengths) + 1)
        config = CacheConfig(capacity, [LayerConfig(heads, dim)] * layers, self._shape["dtype"], initial)
        cache = self._cache = self._builder(config)
        ids = [cache.seq_new() for _ in lengths]
        for seq_id, length in zip(ids, lengths, strict=True):
            assert cache.declare_step([seq_id] * length)
            with exclusive(), mx.stream(STREAM), cache.step():
                q, k, v = (
                    _random(self._shape, count, length) for count in (self._shape["num_attention_heads"], heads, heads)
                )
                for layer in range(layers):
                    # What the queries find is never computed: only the pools are evaluated, at the step's end.
                    cache.attend(layer, tuple(range(length)), q, k, v, dim**-0.5)
        self._begin(ids)

    def drop(self) -> None:
        self._cache = self._tokens = None
        mx.clear_cache()

    def step(self, manner: str) -> Any:
        positions = [self._cache.pos(seq_id) for seq_id in self._ids]
        assert self._cache.declare_step(self._ids)
        with CacheSession(self._cache):
            self._tokens = self._advance(positions, manner)
        return self._tokens

    def prefill(self, length: int) -> float:
        """Return the seconds of one step with a whole prompt."""
        seq_id = self._cache.seq_new()
        assert self._cache.declare_step([seq_id] * length)
        began = time.perf_counter()
        with CacheSession(self._cache):
            self._direct([np.full((1, length), 100), np.arange(length), np.array([length - 1])])
        seconds = time.perf_counter() - began
        assert self._cache.seq_rm(seq_id)
        return seconds

    def fork(self, length: int, count: int) -> list[dict[str, float]]:
        """Fork a sequence; return seconds, bytes of pools that are added, and seconds of the first step of both."""
        # Pools large enough for both, so that none of them grows in the step that is timed.
        self.fill([length], initial=2 * length + ROOM)
        (donor,) = self._ids
        rows = []
        for _ in range(count):
            assert self._cache.rewind(donor, length)
            before, began = self._cache.pool_bytes, time.perf_counter()
            fork = self._cache.seq_clone(donor)
            forked_s = time.perf_counter() - began
            self._begin([donor, fork])
            began = time.perf_counter()
            self.step(SYNCHRONOUS)
            step_s = time.perf_counter() - began
            rows.append({"fork_s": forked_s, "bytes": self._cache.pool_bytes - before, "step_s": step_s})
            assert self._cache.seq_rm(fork)
        return rows

    def pool_bytes(self) -> int:
        """Return the bytes of the cache's pools."""
        return int(self._cache.pool_bytes)

    def _begin(self, ids: list[int]) -> None:
        self._ids, self._tokens = ids, np.full((1, len(ids)), 100)
        self._rows = np.arange(len(ids))

    def _advance(self, positions: list[int], manner: str) -> Any:
        inputs = [self._tokens, np.array(positions), self._rows]
        (tokens,) = self._direct(inputs, wait=manner != OVERLAPPED)
        return np.array(tokens) if manner == HOST else tokens


class ThroughExecuTorch(Ours):
    """The program, run by ExecuTorch."""

    def _advance(self, positions: list[int], manner: str) -> Any:
        # Here the callable is a LanguageModel.
        rows = range(len(positions))
        return np.array([self._direct.step_greedy(self._tokens[0].tolist(), positions, rows)])


class NoAttention(KINDS[SEQUENCE]):  # type: ignore[misc]
    """A cache that hands queries back, and keeps nothing."""

    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return q

    def traced(self, layers: Sequence[int], positions: tuple[int, ...]) -> TracedAttention:
        return TracedNothing()


class TracedNothing(TracedAttention):
    """The same in a traced step."""

    arrays: ClassVar[list[Any]] = []
    fixed: ClassVar[tuple[Any, ...]] = ()

    def attend(self, arrays: list[Any], layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return q

    def commit(self, results: list[mx.array]) -> None:
        pass


class MlxLm(Contender):
    """mlx-lm's model over its cache for batches."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self._model, self._shape = model, shape
        self.drop()

    def fill(self, lengths: Sequence[int]) -> None:
        from mlx_lm.models.cache import BatchKVCache, KVCache

        batch, longest = len(lengths), max(lengths)
        # Shorter sequences are padded at their beginning.
        padding = [longest - length for length in lengths]
        self._caches = [
            KVCache() if batch == 1 else BatchKVCache(padding) for _ in range(self._shape["num_hidden_layers"])
        ]
        for cache in self._caches:
            keys, values = (
                _random(self._shape, self._shape["num_key_value_heads"], longest, batch=batch) for _ in range(2)
            )
            mx.eval(cache.update_and_fetch(keys, values))
        self._tokens = mx.full((batch, 1), 100)

    def drop(self) -> None:
        self._caches, self._tokens = [], None
        mx.clear_cache()

    def step(self, manner: str) -> Any:
        logits = self._model(self._tokens, cache=self._caches)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)[:, None]
        (mx.async_eval if manner == OVERLAPPED else mx.eval)(self._tokens)
        return self._tokens


def _random(shape: Shape, heads: int, length: int, *, batch: int = 1) -> mx.array:
    array = mx.random.normal((batch, heads, length, shape["head_dim"])).astype(getattr(mx, shape["dtype"]))
    mx.eval(array)
    return array


# -- where models come from ---------------------------------------------------------


class Folder:
    """SmolLM2, as ``common.prepare`` writes it."""

    def __init__(self, folder: Path) -> None:
        self.pte, self._hf = folder / "pte" / "model.pte", folder / "hf"

    def direct(self) -> Any:
        from executorch_mlx.backends.mlx import load_program

        return load_program(self.pte).load_method(METHOD).direct()

    def mlx_lm(self) -> Any:
        from mlx_lm.utils import load_model

        # MLX multiplies with our BLAS here, too: what this file imports has installed it.
        return load_model(self._hf)[0]

    def weight_bytes(self) -> int:
        return (self._hf / "model.safetensors").stat().st_size


class Payload:
    """A program without its weights, and random ones."""

    def __init__(self, payload: Path, pte: Path | None, shape: Shape) -> None:
        self.pte, self._payload, self._shape = pte, payload, shape

    @functools.cached_property
    def _loaded(self) -> tuple[Any, int]:
        from executorch_mlx.backends.mlx.program import read_payload
        from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
        from executorch_mlx.backends.mlx.runtime.device import DTYPES
        from executorch_mlx.backends.mlx.runtime.direct import DirectMethod
        from executorch_mlx.backends.mlx.runtime.fuse import fuse

        graph, constants = read_payload(self._payload.read_bytes()), {}
        with exclusive(), mx.stream(STREAM):
            for index in (named.slot.idx for named in graph.named_slots):
                if index < graph.num_constant_tensors:
                    meta = graph.tensor_meta[index]
                    assert meta is not None, "a constant is described"
                    size = [dim.value for dim in meta.shape]
                    array = mx.random.normal(size, scale=0.02) if len(size) > 1 else mx.random.uniform(0.5, 1.5, size)
                    constants[index] = array.astype(DTYPES[meta.scalar_type])
                    mx.eval(constants[index])
            num_bytes = sum(array.nbytes for array in constants.values())
            fusion = fuse(graph, constants, None, {})
            return DirectMethod(CompiledProgram(graph, constants, fusion=fusion)), num_bytes

    def direct(self) -> Any:
        return self._loaded[0]

    def mlx_lm(self) -> Any:
        from mlx_lm.models import llama

        rest = {key: value for key, value in self._shape.items() if key != "dtype"}
        model = llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=True, **rest))
        model.set_dtype(getattr(mx, self._shape["dtype"]))
        mx.eval(model.parameters())
        return model

    def weight_bytes(self) -> int:
        return self._loaded[1]


def contender(name: str, source: Folder | Payload, shape: Shape) -> Contender:
    """Load a contender."""
    if name == MLX_LM:
        return MlxLm(source.mlx_lm(), shape)
    if name == THROUGH:
        from executorch_mlx.examples.llm.generation import LanguageModel

        assert source.pte is not None, "this contender is left out where there is no program"
        return ThroughExecuTorch(LanguageModel(source.pte), KINDS[PAGED], shape)
    return Ours(source.direct(), NoAttention if name == FLOOR else KINDS[name], shape)
