"""Pools of keys and values: growth, copies, and writes that do not copy.

An assignment to a slice and ``put_along_axis`` work in place where the pool has no other live handle; so a pool's array
is held here alone, and what was read from it in a step is evaluated (or dropped) before the next write.
"""

from __future__ import annotations

from collections.abc import Sequence

from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import Run
from executorch_mlx.extension.llm.cache.sequence import grown_slots

from ..device import STREAM, exclusive, mx

Pair = tuple[mx.array, mx.array]

FORK_ROUNDING = 256
"""Slots that a copy of a prefix is rounded up to."""

_MOST_RUNS = 2
"""Runs that are written one by one, as a ring's that wraps; more are written as a list of slots."""


class Pools:
    """A pool of keys and one of values per layer, [1, H_kv, slots, D], which start empty and grow on demand."""

    def __init__(self, config: CacheConfig, most_slots: Sequence[int]) -> None:
        """Build.

        Args:
            config: dims, storage dtype and initial size.
            most_slots: per layer, the most slots its pools may have, unless a write needs more.
        """
        self._config = config
        self._dtype: mx.Dtype = getattr(mx, config.kv_dtype)
        self._most = most_slots
        self._pairs: list[Pair | None] = [None] * len(config.layers)
        self._written: set[int] = set()  # layers that were written since the last release

    @property
    def num_bytes(self) -> int:
        """Bytes that the pools take."""
        return sum(pool.nbytes for pair in self._pairs if pair is not None for pool in pair)

    def write(
        self, layer: int, num_slots: int, runs: Sequence[Run], k: mx.array, v: mx.array, zero: Sequence[Run] = ()
    ) -> Pair:
        """Put a step's rows in place, lazily.

        Args:
            layer: the layer's id.
            num_slots: the slots that its pools must have before.
            runs: the slots that receive the rows, in token order; none leaves the pools as they are.
            k: keys [1, H_kv, n, D].
            v: values [1, H_kv, n, D_v].
            zero: slots to be zeroed first; those behind a pool's end are left out.

        Returns:
            The layer's pools.
        """
        pair = self._pairs[layer]
        if not runs:
            assert pair is not None, "a layer that is asked again has been written"
            return pair
        held = 0 if pair is None else pair[0].shape[2]
        keys, values = self.reserve(layer, num_slots)
        stale = [Run(run.slot, min(run.length, held - run.slot)) for run in zero if run.slot < held]
        if stale:
            keys, values = _zeroed(keys, stale), _zeroed(values, stale)
        written = (_written(keys, runs, k), _written(values, runs, v))
        self._pairs[layer] = written
        self._written.add(layer)
        return written

    def copy(self, layers: Sequence[int], num_slots: int, runs: Sequence[tuple[Run, Run]]) -> None:
        """Copy rows within layers' pools, from the first run of each pair to the second.

        The rows are read at once: while that is pending it holds the pools, and the write would copy all of them.

        Args:
            layers: the layers' ids; nothing happens where one has no pools.
            num_slots: the slots that pools must have before.
            runs: what is copied, and to where.
        """
        sources = mx.array([slot for run, _ in runs for slot in range(run.slot, run.slot + run.length)])
        targets = [run for _, run in runs]
        rows = {
            layer: tuple(pool[:, :, sources] for pool in self.reserve(layer, num_slots))
            for layer in layers
            if self._pairs[layer] is not None
        }
        mx.eval(rows)
        for layer, (k, v) in rows.items():
            self.write(layer, num_slots, targets, k, v)

    def reserve(self, layer: int, num_slots: int) -> Pair:
        """Return a layer's pools, which have at least so many slots, as they are."""
        config, pair = self._config.layers[layer], self._pairs[layer]
        held = 0 if pair is None else pair[0].shape[2]
        if pair is not None and held >= num_slots:
            return pair
        keys, values = pair or (None, None)
        size = max(grown_slots(self._config, held, num_slots, self._most[layer]), num_slots)
        grown = (
            _grown(keys, config.n_kv_heads, size, config.head_dim, self._dtype),
            _grown(values, config.n_kv_heads, size, config.value_dim, self._dtype),
        )
        self._pairs[layer] = grown
        self._written.add(layer)
        return grown

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        written = [pool for layer in sorted(self._written) for pool in self._pairs[layer] or ()]
        self._written.clear()
        return written

    def forget(self) -> None:
        """Drop all pools."""
        self._pairs = [None] * len(self._pairs)

    def copy_prefix(self, source: Pools, num_slots: int) -> None:
        """Copy the first slots of another's pools into this one's, which are empty.

        They are evaluated at once: a copy that is pending holds the source's pools, and the next write there would copy
        all of them.
        """
        with exclusive(), mx.stream(STREAM):
            for layer, pair in enumerate(source._pairs):
                assert pair is not None, "a layer that holds a prefix has been written"
                kept = min(num_slots, pair[0].shape[2])
                size = min(-(-kept // FORK_ROUNDING) * FORK_ROUNDING, self._most[layer])
                self._pairs[layer] = (_prefix(pair[0], kept, size), _prefix(pair[1], kept, size))
            mx.eval(self._pairs)


def read(pool: mx.array, runs: Sequence[Run], num_queries: int) -> mx.array:
    """Return the rows [1, heads, keys, dim] in the slots of ``runs``, in order; a view where that is safe."""
    first = runs[0]
    if len(runs) == 1 and first.slot > 0 and num_queries == 1 and pool.dtype != mx.float32:
        # MLX 0.32.4 on CUDA reads wrong memory for a half-precision decode over a slice that starts mid-pool when the
        # pool's slot count is a multiple of 256; gathering makes a buffer of its own.
        return pool[:, :, mx.arange(first.slot, first.slot + first.length)]
    parts = [pool[:, :, run.slot : run.slot + run.length] for run in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _grown(pool: mx.array | None, heads: int, slots: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """Return a pool [1, heads, slots, dim] that holds ``pool``'s rows at the same indices."""
    kept = 0 if pool is None else pool.shape[2]
    fresh = mx.zeros((1, heads, slots - kept, dim), dtype)
    return fresh if pool is None else mx.concatenate([pool, fresh], axis=2)


def _prefix(pool: mx.array, kept: int, slots: int) -> mx.array:
    """Return a pool of so many slots, with the first rows of another."""
    _, heads, _, dim = pool.shape
    return _written(mx.zeros((1, heads, slots, dim), pool.dtype), [Run(0, kept)], pool[:, :, :kept])


def _written(pool: mx.array, runs: Sequence[Run], rows: mx.array) -> mx.array:
    """Return the pool with ``rows`` [1, heads, n, dim] in the slots of ``runs``, in order."""
    rows = rows.astype(pool.dtype)
    if len(runs) > _MOST_RUNS:
        slots = [slot for run in runs for slot in range(run.slot, run.slot + run.length)]
        return mx.put_along_axis(pool, mx.array(slots)[None, None, :, None], rows, axis=2)
    done = 0
    for run in runs:
        part = rows if run.length == rows.shape[2] else rows[:, :, done : done + run.length]
        done += run.length
        if run.length == pool.shape[2]:
            # An assignment to all of it would make the caller's array the pool.
            pool = mx.slice_update(pool, part, mx.array([run.slot]), axes=[2])
        else:
            # Not slice_update, which passes over the whole pool on CUDA.
            pool[:, :, run.slot : run.slot + run.length] = part
    return pool


def _zeroed(pool: mx.array, runs: Sequence[Run]) -> mx.array:
    """Return the pool with zeros in the slots of ``runs``."""
    _, heads, _, dim = pool.shape
    shape = (1, heads, sum(run.length for run in runs), dim)
    return _written(pool, runs, mx.broadcast_to(mx.zeros(1, pool.dtype), shape))
