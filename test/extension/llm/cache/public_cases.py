"""Inputs taken from public bug reports, and their kin: one function per row of the list, for every layout that it fits.

Each function drives a real cache of a backend and a kind and judges it by the naive oracles.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from executorch_mlx.backends.mlx.runtime.device import exclusive
from executorch_mlx.extension.llm.cache import (
    CacheConfig,
    CacheFullError,
    CacheSession,
    LayerConfig,
    StepError,
    active_cache,
)
from executorch_mlx.extension.llm.cache.op import update_and_attend
from oracles.batch_pair import KINDS, BatchPair
from oracles.naive_attention import TOLERANCE, round_to
from oracles.sequence_pair import InjectedError, Rows, SequencePair

Answer = npt.NDArray[np.float32]
DTYPES = ("float32", "float16", "bfloat16")
NOBODY = 99
"""An id that never lives here."""


def config_of(
    *windows: int | None,
    capacity: int = 32,
    max_write: int | None = None,
    max_seqs: int | None = None,
    initial_capacity: int = 512,
    kv_dtype: str = "float32",
    head_dim: int = 8,
    v_head_dim: int = 4,
) -> CacheConfig:
    """Return a configuration with a layer per window (None: full history)."""
    layers = [LayerConfig(2, head_dim, v_head_dim, window) for window in windows]
    return CacheConfig(capacity, layers, kv_dtype, initial_capacity, max_write, max_seqs)


class Lane(ABC):
    """One sequence of a cache of any kind, beside its oracle.

    Attributes:
        pair: the cache and the oracle.
        key: what the cache's verbs name the sequence by: its id, or nothing.
    """

    pair: Any
    key: tuple[int, ...] = ()

    @property
    def cache(self) -> Any:
        return self.pair.cache

    @property
    @abstractmethod
    def length(self) -> int:
        """The position that the next token takes."""

    @abstractmethod
    def verbs(self) -> list[Callable[[], Any]]:
        """Return a call of each verb that a step forbids."""

    @abstractmethod
    def restart(self, by: str) -> None:
        """Empty the sequence by "rewind", "rm" or "clear"."""

    @abstractmethod
    def _declare(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _expected(self, layer: int, rows: Rows, at: Sequence[int]) -> npt.NDArray[np.float64]: ...

    @abstractmethod
    def _commit(self, at: Sequence[int]) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...

    def rewind(self, position: int) -> bool:
        """Rewind both; they must agree on whether it is granted."""
        granted: bool = self.pair.rewind(*self.key, position)
        return granted

    def rows(self, layer: int, num_tokens: int, *, poisoned: bool = False) -> Rows:
        rows: Rows = self.pair.rows(layer, num_tokens, poisoned=poisoned)
        return rows

    @contextmanager
    def forward(
        self, num_tokens: int, position_dtype: str = "int32", column: bool = False
    ) -> Iterator[Callable[..., Answer]]:
        """Bracket a step of both; inside, call ``attend(layer, rows, arrays=None)`` to have an answer compared."""
        pair, at = self.pair, list(range(self.length, self.length + num_tokens))
        positions = pair.arrays.positions(at, position_dtype, column=column)
        self._declare(num_tokens)

        def attend(layer: int, rows: Rows, arrays: Sequence[Any] | None = None) -> Answer:
            q, k, v = arrays or [pair.arrays.floats(part, pair.q_dtype) for part in rows]
            out = pair.cache.attend(layer, positions, q, k, v, pair.scale(layer))
            expected = self._expected(layer, rows, at)
            assert pair.arrays.dtype_name(out) == pair.q_dtype, "out has another dtype than q"
            with exclusive():  # MLX evaluates for one thread at a time
                answer: Answer = pair.arrays.numpy(out)
            tolerance = TOLERANCE[pair.q_dtype]
            np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=tolerance, err_msg=f"{layer=} {at=}")
            return answer

        try:
            with pair.cache.step():
                yield attend
        except BaseException:
            self._abort()
            raise
        self._commit(at)
        pair.check()

    def step(self, num_tokens: int, **form: Any) -> list[Answer]:
        """Run a step of fresh tokens."""
        with self.forward(num_tokens, **form) as attend:
            return [attend(layer, self.rows(layer, num_tokens)) for layer in self.pair.layers]

    def steps(self, sizes: Iterable[int]) -> None:
        for num_tokens in sizes:
            self.step(num_tokens)

    def poison(self, num_tokens: int, layers: Iterable[int]) -> None:
        """Abort a step that has written NaN to some layers."""
        with suppress(InjectedError), self.forward(num_tokens) as attend:
            for layer in layers:
                attend(layer, self.rows(layer, num_tokens, poisoned=True))
            raise InjectedError
        self.pair.check()

    def commit_poison(self, num_tokens: int) -> None:
        """Commit a step that has written NaN to all layers."""
        with self.forward(num_tokens) as attend:
            for layer in self.pair.layers:
                attend(layer, self.rows(layer, num_tokens, poisoned=True))

    def visible(self, num_tokens: int) -> list[set[int]]:
        """Run a step and return the positions that each query sees, if all tokens come from here.

        Every value is one-hot in its position, so that the weights can be read off the output.
        """
        q, k, v = self.rows(0, num_tokens)
        v = np.zeros_like(v)
        for row in range(num_tokens):
            v[:, :, row, self.length + row] = 1
        with self.forward(num_tokens) as attend:
            out = attend(0, (q, k, v))
        return [set(np.flatnonzero(out[0, 0, row]).tolist()) for row in range(num_tokens)]


class SequenceLane(Lane):
    """The sequence of a ``sequence`` cache."""

    def __init__(self, pair: SequencePair) -> None:
        self.pair = pair

    @property
    def length(self) -> int:
        length: int = self.pair.oracle.length
        return length

    def verbs(self) -> list[Callable[[], Any]]:
        cache = self.cache
        return [cache.clear, lambda: cache.rewind(0), lambda: cache.step().__enter__()]

    def restart(self, by: str) -> None:
        if by == "rewind":
            assert self.rewind(0)
        else:
            self.pair.clear()

    def _declare(self, num_tokens: int) -> None:
        """Nothing to declare."""

    def _expected(self, layer: int, rows: Rows, at: Sequence[int]) -> npt.NDArray[np.float64]:
        expected: npt.NDArray[np.float64] = self.pair.oracle.attend(layer, *rows, self.pair.scale(layer))
        return expected

    def _commit(self, at: Sequence[int]) -> None:
        self.pair.oracle.commit()

    def _abort(self) -> None:
        self.pair.oracle.abort()


class BatchLane(Lane):
    """A sequence of a batched cache.

    A neighbour takes a token before each of its steps, so that its cells lie scattered in a pool that is shared.
    """

    def __init__(self, pair: BatchPair, *, neighbour: bool) -> None:
        self.pair = pair
        self._with_neighbour = neighbour
        self._begin()

    def _begin(self) -> None:
        self._neighbour = self.pair.new() if self._with_neighbour else None
        self.key = (self.pair.new(),)

    @property
    def length(self) -> int:
        length: int = self.pair.oracle.lengths[self.key[0]]
        return length

    def verbs(self) -> list[Callable[[], Any]]:
        cache, its = self.cache, self.key[0]
        return [
            cache.clear,
            cache.seq_new,
            lambda: cache.seq_clone(its),
            lambda: cache.seq_rm(its),
            lambda: cache.seq_rm(NOBODY),
            lambda: cache.rewind(its, 0),
            lambda: cache.declare_step([its]),
            lambda: cache.step().__enter__(),
        ]

    def restart(self, by: str) -> None:
        if by == "rewind":
            assert self.rewind(0)
        elif by == "rm":
            assert self.pair.rm(*self.key)
            self.key = (self.pair.new(),)
        else:
            self.pair.clear()
            self._begin()

    def _declare(self, num_tokens: int) -> None:
        if self._neighbour is not None:
            self.pair.step([self._neighbour])
        assert self.pair.declare([*self.key] * num_tokens), f"a step of {num_tokens} is refused"
        self.pair.oracle.declared = None

    def _expected(self, layer: int, rows: Rows, at: Sequence[int]) -> npt.NDArray[np.float64]:
        ids = [*self.key] * len(at)
        expected: npt.NDArray[np.float64] = self.pair.oracle.attend(layer, ids, at, *rows, self.pair.scale(layer))
        return expected

    def _commit(self, at: Sequence[int]) -> None:
        self.pair.oracle.commit([*self.key] * len(at), at)

    def _abort(self) -> None:
        self.pair.oracle.abort([*self.key])


def lane_of(
    backend: str,
    kind: str,
    *windows: int | None,
    neighbour: bool = False,
    group: int = 2,
    q_dtype: str = "float32",
    seed: int = 0,
    **sizes: Any,
) -> Lane:
    """Return a sequence of a new cache; ``sizes`` are those of ``config_of``."""
    config = config_of(*windows, **sizes)
    if kind == "sequence":
        return SequenceLane(SequencePair(backend, config, group=group, q_dtype=q_dtype, seed=seed))
    pair = BatchPair(backend, kind, config, group=group, q_dtype=q_dtype, seed=seed)
    return BatchLane(pair, neighbour=neighbour)


def lanes(backend: str, kind: str, *windows: int | None, capacity: int = 32, **sizes: Any) -> Iterator[Lane]:
    """Yield a sequence by itself, and one beside a neighbour where the kind has any."""
    yield lane_of(backend, kind, *windows, capacity=capacity, **sizes)
    if kind != "sequence":
        yield lane_of(backend, kind, *windows, capacity=capacity + 64, neighbour=True, **sizes)


def batch_of(backend: str, kind: str, *windows: int | None, **sizes: Any) -> BatchPair:
    """Return a batched cache and its oracle."""
    return BatchPair(backend, kind, config_of(*windows, **sizes))


def begun(pair: BatchPair, *lengths: int) -> list[int]:
    """Return the ids of new sequences, which take their tokens in one step."""
    ids = [pair.new() for _ in lengths]
    assert None not in ids
    pair.step([seq_id for seq_id, length in zip(ids, lengths, strict=True) for _ in range(length)])
    return ids  # type: ignore[return-value]


def splits(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield each way to feed so many tokens in steps of at most ``most``."""
    if total == 0:
        yield ()
    for first in range(1, min(total, most) + 1):
        for rest in splits(total - first, most):
            yield (first, *rest)


def newest(position: int, window: int) -> set[int]:
    """Return the positions that a query sees."""
    return set(range(max(0, position - window + 1), position + 1))


def in_threads(*calls: Callable[[], Any]) -> None:
    """Run each call in a thread of its own, all at once; raise the first call's error."""
    together = threading.Barrier(len(calls))
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(lambda call=call: (together.wait(60), call())) for call in calls]:
            done.result(60)


# -- one function per row ----------------------------------------------------


def clone_of_a_clone_past_the_ring(backend: str, kind: str) -> None:
    """pytorch/executorch#22662"""
    for window, max_write in ((4, 1), (4, 2), (2, 1), (3, 3), (8, 5)):
        pair = batch_of(backend, kind, window, None, capacity=128, max_write=max_write)
        (a,) = begun(pair, 1)
        length = window + max_write + 5
        pair.steps(*[[a]] * (length - 1))
        b = pair.clone(a, length - max_write)
        assert b is not None
        c = pair.clone(b, length - max_write - 1)
        assert (c is None) is ("cell" not in kind)
        pair.steps(*[[a, b] if c is None else [a, c, b]] * (window + 2))


def rewind_below_the_ring(backend: str, kind: str) -> None:
    """executorch, ring floor"""
    for window, max_write, written, aborted, granted in (
        (2, 1, 3, 0, {1: False, 0: True}),
        (4, 2, 12, 0, {11: True, 10: True, 9: False}),
        (4, 1, 10, 0, {9: True, 8: False}),
        (4, 4, 4, 0, {3: True, 2: True, 1: True}),
        (1, 3, 9, 0, {8: True, 1: True, 0: True}),
        (4, 3, 7, 0, {4: True, 3: False}),
        (4, 2, 10, 0, {9: True, 8: True, 7: False}),
        (4, 2, 10, 2, {10: True, 9: False}),
    ):
        for lane in lanes(backend, kind, window, None, max_write=max_write):
            lane.steps([1] * written)
            if aborted:
                lane.poison(aborted, [0])
            for position, by_ring in granted.items():
                assert lane.rewind(position) is (by_ring or "cell" in kind)
            lane.steps([1] * (window + 2))


def declare_is_atomic(backend: str, kind: str) -> None:
    """pytorch/executorch#22662"""
    pair = batch_of(backend, kind, 4, None, max_write=4)
    a, b = begun(pair, 2, 1)
    for ids in ([a, NOBODY], [NOBODY], [NOBODY, b], [a] * 33, [a, b] * 16, [a] * 5, [b, a, b, b, b, b]):
        assert pair.declare([b, a])
        pair.declare(ids)
        assert not pair.rm(NOBODY)
        assert not pair.rewind(a, 30)
        assert pair.clone(a, 30) is None
        assert pair.oracle.declared is not None
        pair.step(pair.oracle.declared, declared=True)


def clone_upto_then_another_token(backend: str, kind: str) -> None:
    """pytorch/executorch#22662"""
    for window, upto, donor_first in itertools.product((None, 4), range(7), (True, False)):
        pair = batch_of(backend, kind, window, capacity=64, max_write=6)
        (a,) = begun(pair, 6)
        b = pair.clone(a, upto)
        assert b is not None
        pair.steps(*[[a], [b]] if donor_first else [[b], [a]])
        pair.steps([a, b], [b, a, b])
        pair.rm(a)
        pair.steps([b], [b])


def chunk_on_a_ring_after_single_tokens(backend: str, kind: str) -> None:
    """mlx-lm#1914, #503"""
    for window, max_write in ((4, 3), (3, 3), (1, 3), (5, 2), (2, 4)):
        for lane in lanes(backend, kind, window, max_write=max_write, v_head_dim=16):
            for position in range(max(4, window)):
                assert lane.visible(1) == [newest(position, window)]
            start = lane.length
            assert lane.visible(max_write) == [newest(start + row, window) for row in range(max_write)]


def decode_at_the_window(backend: str, kind: str) -> None:
    """mlx-lm#390"""
    for window in (1, 2, 3, 4):
        expected = [newest(position, window) for position in range(window + 1)]
        for sizes in splits(window + 1, window + 1):
            for lane in lanes(backend, kind, window, max_write=window + 1, v_head_dim=16):
                assert [keys for num_tokens in sizes for keys in lane.visible(num_tokens)] == expected


def step_longer_than_the_ring_takes(backend: str, kind: str) -> None:
    """mlxcel#401"""
    for windows in ((4,), (None, 4), (4, None), (8, 4)):
        for lane in lanes(backend, kind, *windows, max_write=4):
            for _ in range(2):
                if kind == "sequence":
                    with pytest.raises(StepError, match=r"5 tokens.*at most 4"), lane.cache.step():
                        lane.pair.attend(0, lane.rows(0, 5, poisoned=True))
                elif "cell" not in kind:
                    assert not lane.pair.declare([*lane.key] * 5)
                else:
                    lane.step(5)
                lane.pair.check()
                lane.steps([3])
            lane.steps([4, 1, 4])
    for sizes in splits(5, 4):
        for lane in lanes(backend, kind, 4, None, max_write=4):
            lane.steps(sizes)


def ring_with_a_larger_initial_capacity(backend: str, kind: str) -> None:
    """mlx-lm#1673"""
    for window, initial_capacity in itertools.product((8, 3), (256, 4096, 1, 0)):
        for lane in lanes(backend, kind, window, initial_capacity=initial_capacity):
            lane.steps([1] * 12)


def window_of_one(backend: str, kind: str) -> None:
    """derived"""
    for max_write in (1, 3):
        for lane in lanes(backend, kind, 1, max_write=max_write):
            for num_tokens in (1, max_write, 1, max_write, max_write):
                rows = lane.rows(0, num_tokens)
                with lane.forward(num_tokens) as attend:
                    np.testing.assert_allclose(attend(0, rows), np.repeat(rows[2], 2, axis=1), rtol=1e-6, atol=1e-6)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"window: .*{wrong}"):
            config_of(wrong)
        with pytest.raises(ValueError, match=f"max_write: .*{wrong}"):
            config_of(1, max_write=wrong)


def rewind_at_the_edges(backend: str, kind: str) -> None:
    """mlx-lm#1528, mlxcel#994"""
    for windows in ((None,), (4,), (None, 3)):
        for lane in lanes(backend, kind, *windows, max_write=4):
            lane.steps([3, 2])
            if isinstance(lane.pair, BatchPair):
                assert lane.pair.declare(lane.key)
            assert lane.rewind(6) is False
            with pytest.raises(ValueError, match=r"rewind: .*-1"):
                lane.cache.rewind(*lane.key, -1)
            assert lane.rewind(5) is True
            if isinstance(lane.pair, BatchPair):
                lane.pair.step(lane.key, declared=True)
            lane.steps([1, 3])


def long_and_short_sequences_in_one_step(backend: str, kind: str) -> None:
    """omlx#543, mlx-lm#983"""
    for window, lengths in itertools.product((4, 2, None), ((9, 2), (2, 9), (4, 4), (12, 1), (1, 3, 7))):
        pair = batch_of(backend, kind, window, capacity=64, max_write=12)
        ids = begun(pair, *lengths)
        pair.steps(*[ids, ids[::-1]] * 3)


def brand_new_sequence_in_a_step_of_others(backend: str, kind: str) -> None:
    """mlx-lm#754, #798, #1736"""
    for window, spans in itertools.product((None, 4), ("abbb", "bbba", "babb", "bbab", "abab")):
        pair = batch_of(backend, kind, window)
        (a,) = begun(pair, 5) if window is None else begun(pair, 4)
        b, never = pair.new(), pair.new()
        assert b is not None
        assert never is not None
        ids = [{"a": a, "b": b}[name] for name in spans]
        pair.step(ids)
        assert pair.rm(never)
        pair.steps([a, b], ids)


BATCHES = (*range(1, 13), 16, 31, 32, 33, 63)
GROUPS = (1, 2, 4, 6, 8)
DIMS = (64, 80, 96, 128, 256)


def any_batch_gqa_and_head_dim(backend: str, kind: str) -> None:
    """llama.cpp#7903"""
    if kind == "sequence":
        for group, dim in itertools.product(GROUPS, DIMS):
            lane_of(backend, kind, None, group=group, head_dim=dim, v_head_dim=dim).steps([3, 1, 2])
        return
    for index, num_seqs in enumerate(BATCHES):
        group, dim = GROUPS[index % 5], DIMS[(index + index // 5) % 5]
        pair = BatchPair(backend, kind, config_of(None, capacity=512, head_dim=dim, v_head_dim=dim), group=group)
        ids = begun(pair, *(1 + index % 4 for index in range(num_seqs)))
        pair.steps(ids, ids[::-1])


def same_layer_twice_in_a_step(backend: str, kind: str) -> None:
    """mlx-lm#1699, #1384"""
    for windows, num_tokens in itertools.product(((None,), (4,), (None, 3)), (1, 3)):
        for lane in lanes(backend, kind, *windows, max_write=3):
            lane.steps([3, 2])
            rows = [lane.rows(layer, num_tokens) for layer in lane.pair.layers]
            with lane.forward(num_tokens) as attend:
                first = [attend(layer, rows[layer]) for layer in lane.pair.layers]
                again = [attend(layer, rows[layer]) for layer in reversed(lane.pair.layers)]
            np.testing.assert_array_equal(first, again[::-1])
            assert lane.length == 5 + num_tokens
            lane.steps([1, 3])


def verb_between_declaration_and_forward(backend: str, kind: str) -> None:
    """mlx-vlm#2147"""
    for lane in lanes(backend, kind, None, 3):
        lane.steps([3])
        with lane.forward(2) as attend:
            for layer in lane.pair.layers:
                for verb in lane.verbs():
                    with pytest.raises(StepError, match="step"):
                        verb()
                attend(layer, lane.rows(layer, 2))
        lane.steps([1])
    if kind == "sequence":
        return

    def undeclared(pair: BatchPair, ids: Sequence[int], match: str = "not declared") -> None:
        pair.oracle.declared = None
        with pytest.raises(StepError, match=match), pair.cache.step():
            pair.attend(0, pair.rows(0, len(ids), poisoned=True), pair.oracle.positions(ids))
        pair.check()

    for verb in ("rm", "rewind", "clone", "nothing", "clear"):
        pair = batch_of(backend, kind, None, 4)
        a, b = begun(pair, 3, 2)
        assert pair.declare([a, b])
        if verb == "rm":
            pair.rm(b)
            assert not pair.rm(b)
        elif verb == "rewind":
            assert pair.rewind(b, 1)
        elif verb == "clone":
            pair.clone(a)
        elif verb == "clear":
            pair.clear()
            a = begun(pair, 1)[0]
        else:
            pair.step([a, b], declared=True)
        for _ in range(2):
            undeclared(pair, [a, b if b in pair.oracle.lengths else a])
        for declared, brought in ((1, 2), (2, 1), (2, 3)):
            assert pair.declare([a] * declared)
            undeclared(pair, [a] * brought, match=f"declared with {declared} tokens and brings {brought}")
        pair.steps([a, a], [a])


def ids_of_nobody(backend: str, kind: str) -> None:
    """llama.cpp#13985, #15916"""
    for max_seqs in (1, 62, 64):
        pair = batch_of(backend, kind, None, capacity=256, max_seqs=max_seqs)
        strangers = {-1, -max_seqs, 62, 63, 64, max_seqs, max_seqs + 1, 1 << 40}
        for fill in (0, max_seqs):
            living = [pair.new() for _ in range(fill)]
            if living:
                assert pair.new() is None
                pair.step(living)
                assert pair.clone(living[0]) is None
            for stranger in strangers.difference(living):
                assert pair.cache.pos(stranger) is None
                assert not pair.rm(stranger)
                assert not pair.rewind(stranger, 0)
                assert not pair.rewind(stranger, 1)
                assert pair.clone(stranger) is None
                assert pair.clone(stranger, 0) is None
                assert not pair.declare([*living[:1], stranger])
        ended = living[::-7]
        for seq_id in ended:
            assert pair.rm(seq_id)
        assert sorted(pair.new() for _ in ended) == sorted(ended)
        assert {pair.cache.pos(seq_id) for seq_id in ended} == {0}
        pair.steps(living, living[::-1])


def positions_that_do_not_continue(backend: str, kind: str) -> None:
    """llama.cpp#19901, #16876"""
    gaps = ([7], [5, 7], [6])
    for windows, at in itertools.product(
        ((None,), (4,), (None, 4)), (*gaps, [5, 5], [6, 5], [4], [-1], [5, 4], [0, 1])
    ):
        for lane in lanes(backend, kind, *windows, max_write=5):
            lane.steps([5])
            if isinstance(lane.pair, BatchPair):
                if "cell" in kind and at in gaps:
                    lane.pair.step([*lane.key] * len(at), at=at)
                    assert lane.length == at[-1] + 1
                    lane.steps([2])
                    continue
                assert lane.pair.declare([*lane.key] * len(at))
                lane.pair.oracle.declared = None
            with pytest.raises(ValueError, match=r"position -?\d+ where \d"), lane.cache.step():
                lane.pair.attend(0, lane.rows(0, len(at), poisoned=True), at)
            lane.pair.check()
            lane.steps([2, 1])


def full_to_the_last_token(backend: str, kind: str) -> None:
    """llama.cpp#23652"""
    for window in (None, 4):
        lane = lane_of(backend, kind, window, capacity=8, max_write=8)
        lane.step(8)
        if isinstance(lane.pair, BatchPair):
            assert not lane.pair.declare(lane.key)
        else:
            with pytest.raises(CacheFullError, match="8 of 8"), lane.cache.step():
                lane.pair.attend(0, lane.rows(0, 1, poisoned=True))
            assert not lane.cache.can_extend()
        lane.pair.check()
        assert lane.rewind(7)
        lane.step(1)
        if not isinstance(lane.pair, BatchPair):
            continue
        assert lane.rewind(6)
        pair, a = lane.pair, lane.key[0]
        b = pair.clone(a)
        if "cell" not in kind:
            assert b is None
            b = pair.clone(a, 1)
        assert b is not None
        assert pair.cache.free == (2 if "cell" in kind else 1)
        pair.steps(*[[a], [b]][: pair.cache.free])
        assert not pair.declare([b])
        assert pair.rm(b)
        pair.step([a])


def nan_in_what_was_freed(backend: str, kind: str) -> None:
    """mlx#2395, #2406, #2608"""
    for dtype, windows, capacity in itertools.product(("bfloat16", "float16"), ((None,), (None, 3)), (48, 300)):
        # The pools are then made of memory that held NaN, also behind their ends.
        mx.eval([mx.full((2 * size * dim,), mx.nan, getattr(mx, dtype)) for size in range(1, 40, 3) for dim in (4, 8)])
        initial_capacity = 3 if capacity == 48 else 512
        for lane in lanes(
            backend,
            kind,
            *windows,
            capacity=capacity,
            max_write=5,
            initial_capacity=initial_capacity,
            kv_dtype=dtype,
            q_dtype=dtype,
        ):
            for by in ("abort", "rewind", "rm", "clear", "rewind to a prefix"):
                if by == "rewind to a prefix":
                    lane.commit_poison(5)
                    assert lane.rewind(lane.length - 5)
                elif by == "abort":
                    lane.poison(5, lane.pair.layers)
                    lane.poison(4, [0])
                else:
                    lane.steps([5, 2])
                    lane.commit_poison(5)
                    lane.restart(by)
                for answer in (*lane.step(1), *lane.step(3)):
                    assert np.isfinite(answer).all()


def chunk_on_top_of_history(backend: str, kind: str) -> None:
    """mlx#2835, #2053"""
    for history, num_tokens in itertools.product((5, 1, 2), (3, 2, 9)):
        for lane in lanes(backend, kind, None, v_head_dim=16):
            lane.visible(history)
            assert lane.visible(num_tokens) == [set(range(history + row + 1)) for row in range(num_tokens)]


def growth(backend: str, kind: str) -> None:
    """executorch growth"""
    for window, initial_capacity, sizes in itertools.product((None, 6), (3, 0, 4096), ((1,) * 10, (10,), (4, 4, 1, 1))):
        for lane in lanes(
            backend,
            kind,
            window,
            capacity=10,
            max_write=10,
            initial_capacity=initial_capacity,
            kv_dtype="float32" if initial_capacity else "bfloat16",
            head_dim=16,
            v_head_dim=16,
        ):
            values: list[Any] = []
            for num_tokens in sizes:
                _grow_and_recall(lane, num_tokens, values, window)
    for window in (None, 10):
        lane = lane_of(backend, kind, window, capacity=10, initial_capacity=10)
        rows = lane.rows(0, 10)
        arrays = [lane.pair.arrays.floats(part, "float32") for part in rows]
        with lane.forward(10) as attend:
            attend(0, rows, arrays)
        assert lane.rewind(4)
        lane.steps([1, 3])
        for array, part in zip(arrays, rows, strict=True):
            np.testing.assert_array_equal(lane.pair.arrays.numpy(array), part)
            array[...] = np.nan
        lane.steps([2])


def _grow_and_recall(lane: Lane, num_tokens: int, values: list[Any], window: int | None) -> None:
    """Run a step, and in it recall each visible value bit for bit.

    Keys are one-hot in their positions; a large query at one gives it the weight 1, and 0 to all others.
    """
    start = len(values)
    q, k, v = lane.rows(0, num_tokens)
    k, v = np.zeros_like(k), round_to("bfloat16", v)
    for row in range(num_tokens):
        k[:, :, row, start + row] = 1
        values.append(v[0, :, row])
    last = len(values) - 1
    with lane.forward(num_tokens) as attend:
        attend(0, (q, k, v))
        for held in range(last + 1) if window is None else newest(last, window):
            q = np.zeros_like(q)
            q[:, :, -1, held] = 1e4
            recalled = attend(0, (q, k, v))[0, :, -1]
            np.testing.assert_array_equal(recalled, np.repeat(values[held], 2, axis=0), err_msg=f"value {held}")


def transposed_views(backend: str, kind: str) -> None:
    """mlx#2152, #2563"""
    for windows, num_tokens in itertools.product(((None,), (3,)), (1, 4)):
        for lane in lanes(backend, kind, *windows, max_write=5):
            for _ in range(3):
                rows, arrays = lane.rows(0, num_tokens), lane.pair.arrays
                views = [arrays.swapped(arrays.floats(part.swapaxes(1, 2).copy(), "float32")) for part in rows]
                with lane.forward(num_tokens) as attend:
                    attend(0, rows, views)
                for view, part in zip(views, rows, strict=True):
                    np.testing.assert_array_equal(arrays.numpy(view), part)
                np.testing.assert_array_equal(arrays.numpy(views[0] + views[0]), rows[0] * 2)


def threads_and_caches(backend: str, kind: str) -> None:
    """mlx-lm#1181, executorch#22294"""
    for lane in lanes(backend, kind, None, 3, capacity=64):
        lane.steps([3])
        in_threads(lambda lane=lane: lane.steps([1, 2]))
        lane.steps([1])
    one, two = (lane_of(backend, kind, None, 3, capacity=64, seed=seed) for seed in range(2))
    for _ in range(3):
        in_threads(lambda: one.steps([2]))
        in_threads(lambda: two.steps([1, 1]))
    in_threads(lambda: one.steps([1, 2, 3] * 4), lambda: two.steps([1, 2, 3] * 4))

    def sees_its_own(session: CacheSession) -> None:
        assert active_cache() is None, "a thread begins with no session"
        with session.activate():
            assert active_cache() is session.control, "a session is crossed with another"

    with CacheSession(one.cache) as first, CacheSession(two.cache) as second:
        in_threads(lambda: sees_its_own(first), lambda: sees_its_own(second))


def any_dtypes_and_forms_of_positions(backend: str, kind: str) -> None:
    """executorch op contract"""
    for kv_dtype, q_dtype in itertools.product(DTYPES, DTYPES):
        for lane in lanes(backend, kind, None, 3, max_write=4, kv_dtype=kv_dtype, q_dtype=q_dtype):
            lane.steps([4, 1, 3])
    for lane in lanes(backend, kind, None, 3, kv_dtype="float16"):
        for position_dtype, column in itertools.product(("int32", "int64"), (False, True)):
            for num_tokens in (3, 1):
                lane.step(num_tokens, position_dtype=position_dtype, column=column)
    if backend != "eager":
        return
    lane = lane_of(backend, kind, None, kv_dtype="float16")
    for num_tokens, dtype in itertools.product((3, 1), (torch.float16, torch.bfloat16, torch.float32)):
        rows, at = lane.rows(0, num_tokens), torch.arange(lane.length, lane.length + num_tokens)
        with CacheSession(lane.cache), lane.forward(num_tokens) as attend:
            answer = torch.tensor(attend(0, rows))
            out = update_and_attend(*(torch.tensor(part) for part in rows), at, 0, lane.pair.scale(0), dtype)
        assert out.dtype is dtype
        torch.testing.assert_close(out, answer.to(dtype), rtol=0, atol=0)


def exception_in_a_later_layer(backend: str, kind: str) -> None:
    """derived"""
    for windows, num_tokens, times in itertools.product(((None, None), (4, 4), (None, 3), (3, None)), (1, 3), (1, 2)):
        for lane in lanes(backend, kind, *windows, max_write=3, initial_capacity=2):
            lane.steps([3, 2])
            for _ in range(times):
                lane.poison(num_tokens, [0])
                with pytest.raises(ValueError, match="layer 1: v has shape"):
                    _step_that_layer_1_refuses(lane, num_tokens)
                lane.pair.check()
            for answer in lane.step(num_tokens):
                assert np.isfinite(answer).all()
            assert lane.length == 5 + num_tokens
            lane.steps([1, 3])


def _step_that_layer_1_refuses(lane: Lane, num_tokens: int) -> None:
    with lane.forward(num_tokens) as attend:
        attend(0, lane.rows(0, num_tokens, poisoned=True))
        q, k, v = lane.rows(1, num_tokens, poisoned=True)
        attend(1, (q, k, v[..., 1:]))


def sequences_that_come_and_go(backend: str, kind: str) -> None:
    """sglang#32446"""
    lane = lane_of(backend, kind, None, 2, neighbour=True, capacity=64, max_write=3, initial_capacity=4)
    lane.steps([2, 1])
    cache, arrays, stays = lane.cache, lane.pair.arrays, lane.length
    inputs = [[arrays.floats(part, "float32") for part in lane.rows(layer, 3)] for layer in lane.pair.layers]
    mx.eval(inputs if backend == "MLXBackend" else [])
    if kind == "sequence":
        lane.restart("clear")
    free, memory = getattr(cache, "free", None), set()
    for index in range(500):
        if kind != "sequence":
            its = cache.seq_new()
            assert its is not None, "no id is left"
            assert cache.declare_step([its] * 3), "no room is left"
        with cache.step():
            for layer in lane.pair.layers:
                cache.attend(layer, (0, 1, 2), *inputs[layer], lane.pair.scale(layer))
        assert cache.rewind(0) if kind == "sequence" else cache.seq_rm(its)
        assert getattr(cache, "free", None) == free, "free tokens are not constant"
        if index >= 20:
            memory.add(mx.get_active_memory())
    assert len(memory) == 1, f"active memory is not constant: {sorted(memory)}"
    lane.pair.check()
    assert lane.length == (0 if kind == "sequence" else stays)
    lane.steps([2, 1])


def step_of_no_tokens(backend: str, kind: str) -> None:
    """mlx-lm#1215, vllm#11186"""
    for lane in lanes(backend, kind, None, 4):
        lane.steps([3])
        with lane.forward(2) as attend:
            for layer in lane.pair.layers:
                for at in ([], lane.pair.arrays.positions([])):
                    with pytest.raises(ValueError, match=r"one or more.*got none"):
                        lane.pair.attend(layer, lane.rows(layer, 0), at)
                attend(layer, lane.rows(layer, 2))
        lane.steps([1])
        if isinstance(lane.pair, BatchPair):
            assert lane.pair.declare(lane.key)
            for ask in (lane.cache.can_step, lane.cache.declare_step):
                with pytest.raises(ValueError, match="got none"):
                    ask([])
            lane.pair.step(lane.key, declared=True)


class PublicCase(NamedTuple):
    """A row: its function, and the kinds that it applies to."""

    check: Callable[[str, str], None]
    kinds: tuple[str, ...]

    def kinds_on(self, backend: str) -> tuple[str, ...]:
        """Return its kinds on a backend: cells and pages are read in several ways."""
        return (*self.kinds, *KINDS[backend][len(BATCHED) :]) if BATCHED[0] in self.kinds else self.kinds


BATCHED = KINDS["eager"][:3]
ALL = ("sequence", *BATCHED)

CASES: dict[int, PublicCase] = {
    1: PublicCase(clone_of_a_clone_past_the_ring, BATCHED),
    2: PublicCase(rewind_below_the_ring, ALL),
    3: PublicCase(declare_is_atomic, BATCHED),
    4: PublicCase(clone_upto_then_another_token, BATCHED),
    5: PublicCase(chunk_on_a_ring_after_single_tokens, ALL),
    6: PublicCase(decode_at_the_window, ALL),
    7: PublicCase(step_longer_than_the_ring_takes, ALL),
    8: PublicCase(ring_with_a_larger_initial_capacity, ALL),
    9: PublicCase(window_of_one, ALL),
    10: PublicCase(rewind_at_the_edges, ALL),
    11: PublicCase(long_and_short_sequences_in_one_step, BATCHED),
    12: PublicCase(brand_new_sequence_in_a_step_of_others, BATCHED),
    13: PublicCase(any_batch_gqa_and_head_dim, ALL),
    14: PublicCase(same_layer_twice_in_a_step, ALL),
    15: PublicCase(verb_between_declaration_and_forward, ALL),
    16: PublicCase(ids_of_nobody, BATCHED),
    17: PublicCase(positions_that_do_not_continue, ALL),
    18: PublicCase(full_to_the_last_token, ALL),
    19: PublicCase(nan_in_what_was_freed, ALL),
    20: PublicCase(chunk_on_top_of_history, ALL),
    21: PublicCase(growth, ALL),
    22: PublicCase(transposed_views, ALL),
    23: PublicCase(threads_and_caches, ALL),
    24: PublicCase(any_dtypes_and_forms_of_positions, ALL),
    25: PublicCase(exception_in_a_later_layer, ALL),
    26: PublicCase(sequences_that_come_and_go, ALL),
    27: PublicCase(step_of_no_tokens, ALL),
}
