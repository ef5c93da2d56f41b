"""A batched cache and its naive oracle, fed the same tokens and compared after each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from executorch_mlx.backends.mlx.runtime.caches import MLXBatchCellCache, MLXBatchPagedCache
from executorch_mlx.backends.mlx.runtime.caches.ragged import COMPOSED
from executorch_mlx.extension.llm.cache import CacheConfig, build, register_builder
from executorch_mlx.extension.llm.cache.reference import EagerBatchCellCache, EagerBatchPagedCache

from .arrays import ARRAYS
from .naive_attention import TOLERANCE
from .naive_batch import ORACLES, Dims, NaiveBatch, NaiveCells, NaivePrivate
from .sequence_pair import InjectedError, Rows, random_rows

# Cells read in the way that a device does not choose by itself.
OTHER_CELLS = {"eager": "cells, gathered", "MLXBackend": "cells, masked"}
register_builder("eager", OTHER_CELLS["eager"], type("Gathered", (EagerBatchCellCache,), {"gathers": True}))
register_builder("MLXBackend", OTHER_CELLS["MLXBackend"], type("Masked", (MLXBatchCellCache,), {"gathers": False}))

# Pages so small that short sequences have several, read in the way of the device and in the way of any.
SMALL_PAGES = "pages of four"
COMPOSED_PAGES = "pages of three, composed"
register_builder("eager", SMALL_PAGES, type("SmallPages", (EagerBatchPagedCache,), {"page_size": 4}))
register_builder("MLXBackend", SMALL_PAGES, type("SmallPages", (MLXBatchPagedCache,), {"page_size": 4}))
register_builder(
    "MLXBackend",
    COMPOSED_PAGES,
    type("ComposedPages", (MLXBatchPagedCache,), {"page_size": 3, "row_attention": COMPOSED}),
)
KINDS = {
    "eager": ("batched-cell", "batched-sequence", "batched-paged", OTHER_CELLS["eager"], SMALL_PAGES),
    "MLXBackend": (
        *("batched-cell", "batched-sequence", "batched-paged"),
        *(OTHER_CELLS["MLXBackend"], SMALL_PAGES, COMPOSED_PAGES),
    ),
}
"""All batched kinds, by backend."""

Answer = npt.NDArray[np.float32]


class BatchPair:
    """Drives a cache and its oracle together.

    Attributes:
        cache: the cache under test.
        oracle: what judges it.
    """

    def __init__(
        self,
        backend: str,
        kind: str,
        config: CacheConfig,
        *,
        group: int = 2,
        q_dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.arrays = ARRAYS[backend]
        self.kind = kind
        self.config = config
        self.cache: Any = build(backend, kind, config)
        windows = [layer.window for layer in config.layers]
        dims = Dims(config.capacity, windows, config.max_write, config.kv_dtype, q_dtype)
        self.oracle: NaiveBatch = (NaivePrivate if "page" in kind else ORACLES.get(kind, NaiveCells))(dims)
        self.q_dtype = q_dtype
        self._group = group
        self._random = np.random.default_rng(seed)

    @property
    def layers(self) -> range:
        """The layer ids."""
        return range(len(self.config.layers))

    # -- verbs -------------------------------------------------------------

    def new(self) -> int | None:
        """Begin a sequence on both."""
        seq_id = self.cache.seq_new()
        full = len(self.oracle.lengths) >= self.cache.max_seqs
        assert (seq_id is None) == full, f"seq_new answered {seq_id}"
        if seq_id is not None:
            assert 0 <= seq_id < self.cache.max_seqs
            self.oracle.new(seq_id)
        self.check()
        return seq_id  # type: ignore[no-any-return]

    def clone(self, src: int, upto: int | None = None) -> int | None:
        """Clone on both; assert that they agree on whether it is granted."""
        seq_id = self.cache.seq_clone(src, upto)
        granted = self.oracle.can_clone(src, upto) and len(self.oracle.lengths) < self.cache.max_seqs
        assert (seq_id is not None) == granted, f"seq_clone({src}, {upto}) answered {seq_id}"
        if seq_id is not None:
            self.oracle.clone(src, seq_id, upto)
            self.oracle.declared = None
        self.check()
        return seq_id  # type: ignore[no-any-return]

    def rm(self, seq_id: int) -> bool:
        """End a sequence on both."""
        granted: bool = self.cache.seq_rm(seq_id)
        assert granted is (seq_id in self.oracle.lengths), f"seq_rm({seq_id}) answered {granted}"
        if granted:
            self.oracle.rm(seq_id)
            self.oracle.declared = None
        self.check()
        return granted

    def rewind(self, seq_id: int, position: int) -> bool:
        """Rewind both; assert that they agree on whether it is granted."""
        granted: bool = self.cache.rewind(seq_id, position)
        expected = self.oracle.can_rewind(seq_id, position)
        assert granted is expected, f"rewind({seq_id}, {position}) answered {granted}"
        if granted and position != self.oracle.lengths[seq_id]:
            self.oracle.rewind(seq_id, position)
            self.oracle.declared = None
        self.check()
        return granted

    def clear(self) -> None:
        """Clear both."""
        self.cache.clear()
        self.oracle.clear()
        self.oracle.declared = None
        self.check()

    def declare(self, ids: Sequence[int]) -> bool:
        """Declare on both; assert that they agree on whether it is granted."""
        able: bool = self.cache.can_step(ids)
        self.check()
        granted: bool = self.cache.declare_step(ids)
        assert able is granted, f"can_step({ids}) answered {able}, declare_step {granted}"
        assert granted is self.oracle.admits(ids), f"declare_step({ids}) answered {granted}"
        if granted:
            self.oracle.declared = list(ids)
        self.check()
        return granted

    # -- steps -------------------------------------------------------------

    def rows(self, layer: int, num_tokens: int, *, poisoned: bool = False) -> Rows:
        """Return q, k and v of fresh tokens; k and v NaN if poisoned."""
        q, k, v = random_rows(self._random, self.config.layers[layer], num_tokens, self._group, self.q_dtype)
        return (q, np.full_like(k, np.nan), np.full_like(v, np.nan)) if poisoned else (q, k, v)

    def attend(self, layer: int, rows: Rows, positions: Any) -> Any:
        """Call the cache alone."""
        if isinstance(positions, list):
            positions = self.arrays.positions(positions)
        q, k, v = (self.arrays.floats(part, self.q_dtype) for part in rows)
        return self.cache.attend(layer, positions, q, k, v, self.scale(layer))

    def attend_both(
        self, layer: int, ids: Sequence[int], rows: Rows, at: Sequence[int], positions: Any = None
    ) -> Answer:
        """Call the cache and the oracle; assert that they agree; return the cache's answer."""
        out = self.attend(layer, rows, list(at) if positions is None else positions)
        expected = self.oracle.attend(layer, ids, at, *rows, self.scale(layer))
        assert self.arrays.dtype_name(out) == self.q_dtype
        answer = self.arrays.numpy(out)
        tolerance = TOLERANCE[self.q_dtype]
        np.testing.assert_allclose(
            answer, expected, rtol=tolerance, atol=tolerance, err_msg=f"layer {layer}, sequences {list(ids)} at {at}"
        )
        return answer

    def scale(self, layer: int) -> float:
        """Return the softmax scale of a layer (1 for one that does not exist)."""
        return float(self.config.layers[layer].head_dim ** -0.5) if layer in self.layers else 1.0

    def step(
        self,
        ids: Sequence[int],
        *,
        at: Sequence[int] | None = None,
        calls: Iterable[int] | None = None,
        declared: bool = False,
        position_dtype: str = "int32",
        column: bool = False,
    ) -> list[Answer]:
        """Run one step on both and compare.

        Args:
            ids: whose token each row is.
            at: their positions; None for those that are due.
            calls: layer ids in call order, each at least once; a repeat brings the same k and v and a new q.
            declared: whether the step has been declared already.
            position_dtype: dtype of the positions.
            column: positions [n, 1] instead of [n].

        Returns:
            The cache's answer to each call.
        """
        if not declared:
            assert self.declare(ids), f"a step of {list(ids)} is refused"
        at = self.oracle.positions(ids) if at is None else at
        positions = self.arrays.positions(at, position_dtype, column=column)
        tokens: dict[int, Rows] = {}
        answers = []
        self.oracle.declared = None
        with self.cache.step():
            for layer in self.layers if calls is None else calls:
                q, k, v = self.rows(layer, len(ids))
                if layer in tokens:
                    _, k, v = tokens[layer]
                tokens[layer] = (q, k, v)
                answers.append(self.attend_both(layer, ids, (q, k, v), at, positions))
        self.oracle.commit(ids, at)
        self.check()
        return answers

    def steps(self, *steps: Sequence[int]) -> None:
        """Run several steps on both and compare."""
        for ids in steps:
            self.step(ids)

    def poison(self, ids: Sequence[int], calls: Sequence[int], at: Sequence[int] | None = None) -> None:
        """Run a step of NaN keys and values on both, that fails after the given layer calls."""
        assert self.declare(ids)
        at = self.oracle.positions(ids) if at is None else at
        self.oracle.declared = None
        try:
            with self.cache.step():
                for layer in calls:
                    rows = self.rows(layer, len(ids), poisoned=True)
                    self.attend(layer, rows, list(at))
                    self.oracle.attend(layer, ids, at, *rows, self.scale(layer))
                raise InjectedError
        except InjectedError:
            self.oracle.abort(ids)
        self.check()

    def commit_poison(self, ids: Sequence[int]) -> None:
        """Run a step of NaN keys and values on both. Its answers are not compared."""
        assert self.declare(ids)
        at = self.oracle.positions(ids)
        self.oracle.declared = None
        with self.cache.step():
            for layer in self.layers:
                rows = self.rows(layer, len(ids), poisoned=True)
                self.attend(layer, rows, list(at))
                self.oracle.attend(layer, ids, at, *rows, self.scale(layer))
        self.oracle.commit(ids, at)
        self.check()

    def check(self) -> None:
        """Assert what holds between any two operations."""
        cache, oracle = self.cache, self.oracle
        cache.check_integrity()
        assert {seq_id: cache.pos(seq_id) for seq_id in oracle.lengths} == oracle.lengths
        assert cache.free == oracle.free
        assert cache.max_step == oracle.max_step
        assert cache.capacity == oracle.dims.capacity
        assert not cache.in_step
