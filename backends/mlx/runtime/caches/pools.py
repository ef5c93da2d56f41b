"""Pools of keys and values: growth and writes that do not copy.

``slice_update`` works in place where its source has no other live handle; so a pool's array is held here alone, and
what was read from it in a step is evaluated (or dropped) before the next write.
"""

from __future__ import annotations

from collections.abc import Sequence

from executorch_mlx.extension.llm.cache.plan import Run

from ..device import mx


def grown(pool: mx.array | None, heads: int, slots: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """Return a pool [1, heads, slots, dim] that holds ``pool``'s rows at the same indices."""
    kept = 0 if pool is None else pool.shape[2]
    fresh = mx.zeros((1, heads, slots - kept, dim), dtype)
    return fresh if pool is None else mx.concatenate([pool, fresh], axis=2)


def write(pool: mx.array, runs: Sequence[Run], rows: mx.array) -> mx.array:
    """Return the pool with ``rows`` [1, heads, n, dim] in the slots of ``runs``, in order."""
    rows = rows.astype(pool.dtype)
    done = 0
    for run in runs:
        part = rows if run.length == rows.shape[2] else rows[:, :, done : done + run.length]
        done += run.length
        # With the start in an array the update is functional (the caller's handle keeps the old pool) and never aliases
        # `part`, not even over the whole extent.
        pool = mx.slice_update(pool, part, mx.array([run.slot]), axes=[2])
    return pool


def read(pool: mx.array, runs: Sequence[Run], num_queries: int) -> mx.array:
    """Return the rows [1, heads, keys, dim] in the slots of ``runs``, in order; a view where that is safe."""
    first = runs[0]
    if len(runs) == 1 and first.slot > 0 and num_queries == 1 and pool.dtype != mx.float32:
        # MLX 0.32.4 on CUDA reads wrong memory for a half-precision decode over a slice that starts mid-pool when the
        # pool's slot count is a multiple of 256; gathering makes a buffer of its own.
        return mx.take(pool, mx.arange(first.slot, first.slot + first.length), axis=2)
    parts = [pool[:, :, run.slot : run.slot + run.length] for run in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
