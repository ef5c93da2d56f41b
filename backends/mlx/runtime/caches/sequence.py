"""One sequence's keys and values on MLX."""

from __future__ import annotations

from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import LayerPlan, Mask
from executorch_mlx.extension.llm.cache.sequence import SequenceCache

from ..device import mx
from .base import MLXCache
from .pools import Pools, read


class MLXSequenceCache(SequenceCache, MLXCache[LayerPlan]):
    """The ``sequence`` layout: reads exactly what a step sees."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools = Pools(config, [self.most_slots(layer) for layer in range(len(config.layers))])

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return self._pools.num_bytes

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        return self._pools.release()

    def _attend(self, plan: LayerPlan, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        pools = self._pools.write(plan.layer, plan.pool_slots, plan.write, k, v)
        keys, values = (read(pool, plan.read, plan.num_tokens).astype(q.dtype) for pool in pools)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask_of(plan))

    def _copy_prefix(self, source: MLXSequenceCache, upto: int) -> None:
        self._pools.copy_prefix(source._pools, upto)

    def _forget(self) -> None:
        self._pools.forget()


def mask_of(plan: LayerPlan) -> mx.array | str | None:
    """Return what ``mx.fast.scaled_dot_product_attention`` takes as the mask of a plan."""
    if plan.mask is Mask.NONE:
        return None
    if plan.mask is Mask.CAUSAL:
        return "causal"
    assert plan.window is not None, "a band follows from a window"
    queries = mx.arange(plan.start, plan.stop)[:, None]
    keys = mx.arange(plan.first_key, plan.stop)[None, :]
    return (keys <= queries) & (keys > queries - plan.window)
