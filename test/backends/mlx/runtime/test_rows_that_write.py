"""Attention calls that write rows themselves are given only rows that no other row of the call reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.runtime.caches import MLXBatchPagedCache
from executorch_mlx.backends.mlx.runtime.caches.ragged import COMPOSED, RowAttention, Rows
from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig

pytestmark = pytest.mark.usefixtures("on_cpu")

# Steps of the sequences 0 and 1, and whether each writes by itself.
STEPS: list[tuple[Sequence[int], bool]] = [
    ([0, 0, 0, 1, 1], False),  # spans of several tokens
    ([0, 1], True),
    ([1], True),
    ([0, 1, 0], False),  # the second 0 reads the first
    ([1, 0, 1, 0], False),
    ([1, 0], True),
    ([0, 1, 1], False),
]


def test_rows_are_written_beforehand_where_another_row_reads_them() -> None:
    wrote: list[bool] = []

    def attend(q: mx.array, own: Any, pools: Any, rows: Rows, scale: float) -> mx.array:
        wrote.append(own is not None)
        if own is None:
            return COMPOSED.attend(q, None, pools, rows, scale)
        # Row by row, the last one first, as a device may take them.
        outs = []
        for row in reversed(range(len(rows.indices))):
            for pool, new in zip(pools, own, strict=True):
                np.array(pool, copy=False)[0, :, rows.last_slots[row]] = np.array(new)[0, :, row]
            alone = Rows([0], rows.tables[row : row + 1], rows.spans[row : row + 1], rows.page_size)
            outs.append(COMPOSED.attend(q[:, :, row : row + 1], None, pools, alone, scale))
            mx.eval(outs)
        return mx.concatenate(outs[::-1], axis=2)

    class Writing(MLXBatchPagedCache):
        row_attention = RowAttention(attend, writes=True)

    class Plain(MLXBatchPagedCache):
        row_attention = COMPOSED

    mx.random.seed(1)
    caches = [kind(CacheConfig(64, [LayerConfig(1, 8)], "float32")) for kind in (Writing, Plain)]
    for cache in caches:
        assert [cache.seq_new(), cache.seq_new()] == [0, 1]
    for ids, writes in STEPS:
        q, k, v = (mx.random.normal((1, heads, len(ids), 8)) for heads in (2, 1, 1))
        due, positions, outs = {seq_id: caches[0].pos(seq_id) or 0 for seq_id in ids}, [], []
        for seq_id in ids:
            positions.append(due[seq_id])
            due[seq_id] += 1
        wrote.clear()
        for cache in caches:
            assert cache.declare_step(ids)
            with cache.step():
                outs.append(np.array(cache.attend(0, positions, q, k, v, 0.3)))
        assert any(wrote) == writes, ids
        np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-5)
