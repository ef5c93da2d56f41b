"""A shared pool of cells on MLX."""

from __future__ import annotations

import numpy as np

from executorch_mlx.extension.llm.cache.batch_cell import BatchCellCache
from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import CellPlan, Mask, RowGroup

from ..device import STREAM, exclusive, mx
from .base import MLXCache
from .pools import Pair, Pools, read

_NEVER = np.iinfo(np.int64).max


class MLXBatchCellCache(BatchCellCache, MLXCache[CellPlan]):
    """The ``batched-cell`` layout: one pool per layer, read behind masks where sequences share it."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools = Pools(config, [config.capacity] * len(config.layers))
        # The open step's masks, which the layers of a window share: by group and number of cells.
        self._masks: dict[tuple[int, int], mx.array] = {}

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return self._pools.num_bytes

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        return self._pools.release()

    def end_step(self, *, committed: bool) -> None:
        """Close the step; cannot fail."""
        super().end_step(committed=committed)
        self._masks.clear()

    def _attend(self, plan: CellPlan, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        with exclusive(), mx.stream(STREAM):
            pools = self._pools.write(plan.layer, plan.pool_cells, plan.write, k, v, plan.zero)
            parts = [self._answered(plan, group, pools, q, scale) for group in plan.groups]
            return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _answered(self, plan: CellPlan, group: RowGroup, pools: Pair, q: mx.array, scale: float) -> mx.array:
        start, stop = group.spans[0].start, group.spans[-1].stop
        rows = q if stop - start == q.shape[2] else q[:, :, start:stop]
        num_queries = stop - start if group.mask is Mask.NONE else 0
        keys, values = (read(pool, [group.read], num_queries).astype(q.dtype) for pool in pools)
        mask: mx.array | str | None = None
        if group.mask is Mask.CAUSAL:
            mask = "causal"
        elif group.mask is Mask.OWNED:
            mask = self._mask(plan, group, keys.shape[2])
        return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask)

    def _mask(self, plan: CellPlan, group: RowGroup, num_cells: int) -> mx.array:
        """Return which of the cells read each query sees, bool [rows, cells]."""
        # Groups live as long as the step's placement, so that their ids stay theirs.
        mask = self._masks.get((id(group), num_cells))
        if mask is None:
            mask = mx.array(self._visible(plan, group, num_cells))
            self._masks[id(group), num_cells] = mask
        return mask

    def _visible(self, plan: CellPlan, group: RowGroup, num_cells: int) -> np.ndarray:
        visible = np.empty((group.spans[-1].stop - group.spans[0].start, num_cells), dtype=np.bool_)
        row = 0
        position_of: dict[int, np.ndarray] = {}
        for span in group.spans:
            if span.seq_id not in position_of:
                tokens, first = self.tokens(span.seq_id), group.read.slot
                cells, positions = np.array(tokens.cells), np.array(tokens.positions)
                inside = (cells >= first) & (cells < first + num_cells)
                position_of[span.seq_id] = its = np.full(num_cells, _NEVER)
                its[cells[inside] - first] = positions[inside]
            its = position_of[span.seq_id]
            queries = np.array(plan.positions[span.start : span.stop])[:, None]
            rows = visible[row : row + span.stop - span.start]
            np.less_equal(its, queries, out=rows)
            if plan.window is not None:
                rows &= its > queries - plan.window
            row += span.stop - span.start
        return visible

    def _forget(self) -> None:
        self._pools.forget()
