"""A shared pool of cells on MLX."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from executorch_mlx.extension.llm.cache.batch_cell import BatchCellCache
from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import CellPlan, Mask, RowGroup

from ..device import is_cpu, mx
from .base import MLXCache
from .pools import Pair, Pools, read

_NEVER = np.iinfo(np.int64).max


class MLXBatchCellCache(BatchCellCache, MLXCache[CellPlan]):
    """The ``batched-cell`` layout: one pool per layer.

    On a CPU, where a masked key costs as much as a visible one, each sequence's cells are gathered; elsewhere the cells
    in use are read behind a mask, in one call for neighbouring rows.
    """

    gathers = is_cpu()

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools = Pools(config, [config.capacity] * len(config.layers))
        # The open step's masks and cells to gather, which the layers of a window share: by group and number of keys.
        self._kept: dict[tuple[int, int], mx.array] = {}

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return self._pools.num_bytes

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        return self._pools.release()

    def _leave(self) -> None:
        super()._leave()
        self._kept.clear()

    def _attend(self, plan: CellPlan, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        pools = self._pools.write(plan.layer, plan.pool_cells, plan.write, k, v, plan.zero)
        parts = [self._answered(plan, group, pools, q, scale) for group in plan.groups]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _answered(self, plan: CellPlan, group: RowGroup, pools: Pair, q: mx.array, scale: float) -> mx.array:
        start, stop = group.spans[0].start, group.spans[-1].stop
        rows = q if stop - start == q.shape[2] else q[:, :, start:stop]
        if group.read is None:
            cells = self._once(group, 0, self._gathered)
            keys, values = (pool[:, :, cells].astype(q.dtype) for pool in pools)
        else:
            num_queries = stop - start if group.mask is Mask.NONE else 0
            keys, values = (read(pool, [group.read], num_queries).astype(q.dtype) for pool in pools)
        mask: mx.array | str | None = None
        if group.mask is Mask.CAUSAL:
            mask = "causal"
        elif group.mask is not Mask.NONE:
            num_keys = keys.shape[2]
            mask = self._once(group, num_keys, lambda group: self._visible(plan, group, num_keys))
        return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask)

    def _once(self, group: RowGroup, num_keys: int, make: Callable[[RowGroup], np.ndarray]) -> mx.array:
        """Return an array of a group, made by the first layer of its window and kept for the step's other ones."""
        # Groups live as long as the step's placement, so that their ids stay theirs.
        key = (id(group), num_keys)
        if key not in self._kept:
            self._kept[key] = mx.array(make(group))
        return self._kept[key]

    def _gathered(self, group: RowGroup) -> np.ndarray:
        """Return the cells of the tokens that a group reads."""
        assert group.tokens is not None
        first, length = group.tokens
        return np.array(self.tokens(group.spans[0].seq_id).cells[first : first + length])

    def _visible(self, plan: CellPlan, group: RowGroup, num_keys: int) -> np.ndarray:
        """Return which of the keys read each query sees, bool [rows, keys]."""
        parts = []
        for span in group.spans:
            tokens = self.tokens(span.seq_id)
            if group.tokens is None:
                keys = np.full(num_keys, _NEVER)
                keys[np.array(tokens.cells)] = tokens.positions
            else:
                first, length = group.tokens
                keys = np.array(tokens.positions[first : first + length])
            queries = np.array(plan.positions[span.start : span.stop])[:, None]
            visible = keys <= queries
            parts.append(visible if plan.window is None else visible & (keys > queries - plan.window))
        return np.concatenate(parts)

    def _forget(self) -> None:
        self._pools.forget()
