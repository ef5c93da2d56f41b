"""One sequence's keys and values on MLX."""

from __future__ import annotations

from typing import Any

from executorch_mlx.extension.llm.cache.arguments import check_heads, host_positions
from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import LayerPlan, Mask
from executorch_mlx.extension.llm.cache.sequence import SequenceCache, grown_slots

from ..device import STREAM, exclusive, mx
from . import pools
from .base import MLXCache

_Pair = tuple[mx.array, mx.array]


class MLXSequenceCache(SequenceCache, MLXCache):
    """The ``sequence`` layout: a pool of keys and one of values per layer, [1, H_kv, slots, D].

    Evaluate what ``attend`` returns before the next step writes: an unevaluated result still holds the pool it reads,
    and the write then copies that pool.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._dtype: mx.Dtype = getattr(mx, config.kv_dtype)
        self._pools: list[_Pair | None] = [None] * len(config.layers)
        # The pools that this step has replaced and not yet released, by layer.
        self._replaced: dict[int, _Pair | None] = {}

    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """Append and attend, lazily; see ``CacheLayout.attend``."""
        host = host_positions(positions)
        plan = self.plan(layer, host)
        check_heads(layer, self.config.layers[layer], len(host), q, k, v)
        with exclusive(), self.writing(plan), mx.stream(STREAM):
            keys, values = (
                pools.read(pool, plan.read, plan.num_tokens).astype(q.dtype) for pool in self._written(plan, k, v)
            )
            return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=_mask(plan))

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        written = [pool for layer in self._replaced for pool in self._pools[layer] or ()]
        self._replaced.clear()
        return written

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return sum(pool.nbytes for pair in self._pools if pair is not None for pool in pair)

    def _written(self, plan: LayerPlan, k: mx.array, v: mx.array) -> _Pair:
        """Return the layer's pools with the step's rows in place."""
        pair = self._pools[plan.layer]
        if not plan.write and pair is not None:
            return pair
        self._replaced.setdefault(plan.layer, pair)
        config, slots = self.config.layers[plan.layer], 0 if pair is None else pair[0].shape[2]
        # Handles to the old pools stay in `_replaced` until they are released: an in-place update needs that there is
        # no other when the graph is evaluated.
        keys, values = pair or (None, None)
        if keys is None or slots < plan.pool_slots:
            size = grown_slots(self.config, slots, plan.pool_slots, self._policies[plan.layer].slots)
            keys = pools.grown(keys, config.n_kv_heads, size, config.head_dim, self._dtype)
            values = pools.grown(values, config.n_kv_heads, size, config.value_dim, self._dtype)
        assert values is not None
        written = (pools.write(keys, plan.write, k), pools.write(values, plan.write, v))
        self._pools[plan.layer] = written
        return written

    def _settle(self, *, committed: bool) -> None:
        if committed:
            try:
                with exclusive(), mx.stream(STREAM):
                    mx.eval(self.release())
            except BaseException as error:
                self.mark_lost(f"{type(error).__name__}: {error}")
                raise
            return
        for layer, pair in self._replaced.items():
            self._pools[layer] = pair
        self._replaced.clear()

    def _forget(self) -> None:
        self._pools = [None] * len(self.config.layers)


def _mask(plan: LayerPlan) -> mx.array | str | None:
    if plan.mask is Mask.NONE:
        return None
    if plan.mask is Mask.CAUSAL:
        return "causal"
    assert plan.window is not None, "a band follows from a window"
    queries = mx.arange(plan.start, plan.stop)[:, None]
    keys = mx.arange(plan.first_key, plan.stop)[None, :]
    return (keys <= queries) & (keys > queries - plan.window)
