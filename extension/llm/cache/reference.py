"""The eager reference: the caches' byte layers in torch, behind ``update_and_attend`` run without a backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from .batch_cell import BatchCellCache
from .batch_paged import BatchPagedCache
from .batch_sequence import BatchSequenceCache
from .config import CacheConfig
from .plan import CellPlan, LayerPlan, Mask, PagedPlan, PagedRead, RowGroup, Run, runs_of
from .registry import register_builder
from .sequence import SequenceCache, grown_slots

_Pair = tuple[torch.Tensor, torch.Tensor]


class EagerSequenceCache(SequenceCache):
    """One sequence's keys and values in torch tensors, pools of [1, H, slots, D] per layer."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools: list[_Pair | None] = [None] * len(config.layers)

    def _attend(self, plan: LayerPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        most = self.most_slots(plan.layer)
        pools = _grown(self.config, plan.layer, self._pools[plan.layer], plan.pool_slots, most, k.device)
        self._pools[plan.layer] = pools
        _write(pools, plan.write, k, v)
        keys, values = (
            torch.cat([pool[:, :, run.slot : run.slot + run.length] for run in plan.read], dim=2).to(q.dtype)
            for pool in pools
        )
        visible = None if plan.mask is Mask.NONE else _visible(plan, q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)

    def _copy_prefix(self, source: EagerSequenceCache, upto: int) -> None:
        with _plain_tensors():
            for layer, pair in enumerate(source._pools):
                assert pair is not None, "a layer that holds a prefix has been written"
                slots = min(upto, pair[0].shape[2])
                self._pools[layer] = (pair[0][:, :, :slots].clone(), pair[1][:, :, :slots].clone())

    def _forget(self) -> None:
        self._pools = [None] * len(self.config.layers)


class EagerBatchSequenceCache(BatchSequenceCache[EagerSequenceCache]):
    """Many private histories in torch tensors."""

    sequence_type = EagerSequenceCache

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), dim=2)


class EagerBatchCellCache(BatchCellCache):
    """One pool of cells per layer in torch tensors, [1, H, cells, D]."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools: list[_Pair | None] = [None] * len(config.layers)

    def _attend(self, plan: CellPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        pools = _grown(self.config, plan.layer, self._pools[plan.layer], plan.pool_cells, self.capacity, k.device)
        self._pools[plan.layer] = pools
        for run in plan.zero:
            for pool in pools:
                pool[:, :, run.slot : run.slot + run.length] = 0
        _write(pools, plan.write, k, v)
        return torch.cat([self._answered(plan, group, pools, q, scale) for group in plan.groups], dim=2)

    def _answered(self, plan: CellPlan, group: RowGroup, pools: _Pair, q: torch.Tensor, scale: float) -> torch.Tensor:
        rows = q[:, :, group.spans[0].start : group.spans[-1].stop]
        if group.read is None:
            assert group.tokens is not None
            first, length = group.tokens
            read = self.tokens(group.spans[0].seq_id).cells[first : first + length].tolist()
        else:
            read = list(range(group.read.slot, min(group.read.slot + group.read.length, pools[0].shape[2])))
        keys, values = (pool[:, :, read].to(q.dtype) for pool in pools)
        visible = self._visible(plan, group, read).to(q.device)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)

    def _visible(self, plan: CellPlan, group: RowGroup, read: Sequence[int]) -> torch.Tensor:
        """Bool [rows, cells]: which of the cells read each query sees."""
        parts = []
        for span in group.spans:
            tokens = self.tokens(span.seq_id)
            position_of = dict(zip(tokens.cells, tokens.positions, strict=True))
            never = max(plan.positions) + 1
            keys = torch.tensor([position_of.get(cell, never) for cell in read])
            queries = torch.tensor(plan.positions[span.start : span.stop])[:, None]
            visible = keys <= queries
            parts.append(visible if plan.window is None else visible & (keys > queries - plan.window))
        return torch.cat(parts)

    def _forget(self) -> None:
        self._pools = [None] * len(self.config.layers)


class EagerBatchPagedCache(BatchPagedCache):
    """One pool of pages per layer in torch tensors, [1, H, slots, D]."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools: list[_Pair | None] = [None] * len(config.layers)

    def _attend(self, plan: PagedPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        pools = self._with_pages(plan.layer, plan.step.num_pages, k.device)
        if not plan.is_written:
            _write(pools, runs_of(plan.step.write), k, v)
        return torch.cat([self._answered(plan, read, pools, q, scale) for read in plan.step.reads], dim=2)

    def _answered(self, plan: PagedPlan, read: PagedRead, pools: _Pair, q: torch.Tensor, scale: float) -> torch.Tensor:
        rows = slice(read.span.start, read.span.stop)
        slots = [self._slot(read, index) for index in range(read.first, read.first + read.length)]
        last = plan.positions[rows][-1]
        queries = torch.tensor(plan.positions[rows])[:, None]
        keys = torch.arange(last + 1 - read.length, last + 1)
        visible = keys <= queries
        if plan.step.window is not None:
            visible &= keys > queries - plan.step.window
        its_k, its_v = (pool[:, :, slots].to(q.dtype) for pool in pools)
        return F.scaled_dot_product_attention(
            q[:, :, rows], its_k, its_v, attn_mask=visible.to(q.device), scale=scale, enable_gqa=True
        )

    def _slot(self, read: PagedRead, index: int) -> int:
        return read.pages[index // self.page_size] * self.page_size + index % self.page_size

    def _copy_pages(self, window: int | None, copies: Sequence[tuple[int, int]], num_pages: int) -> None:
        size = self.page_size
        for layer, pair in enumerate(self._pools):
            if pair is not None and self.config.layers[layer].window == window:
                for pool in self._with_pages(layer, num_pages, pair[0].device):
                    for source, target in copies:
                        pool[:, :, target * size : (target + 1) * size] = pool[
                            :, :, source * size : (source + 1) * size
                        ]

    def _with_pages(self, layer: int, num_pages: int, device: torch.device) -> _Pair:
        slots = num_pages * self.page_size
        pools = self._pools[layer] = _grown(self.config, layer, self._pools[layer], slots, slots, device)
        return pools

    def _forget(self) -> None:
        self._pools = [None] * len(self.config.layers)


def _grown(config: CacheConfig, layer: int, pools: _Pair | None, needed: int, most: int, device: torch.device) -> _Pair:
    """Return a layer's pools with at least ``needed`` slots and the old bytes at the same indices."""
    slots = 0 if pools is None else pools[0].shape[2]
    if pools is not None and slots >= needed:
        return pools
    sizes, dtype = config.layers[layer], getattr(torch, config.kv_dtype)
    size = grown_slots(config, slots, needed, most)
    with _plain_tensors():
        grown = (
            torch.zeros(1, sizes.n_kv_heads, size, sizes.head_dim, dtype=dtype, device=device),
            torch.zeros(1, sizes.n_kv_heads, size, sizes.value_dim, dtype=dtype, device=device),
        )
        if pools is not None:
            for new, old in zip(grown, pools, strict=True):
                new[:, :, :slots] = old
    return grown


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Tensors made inside can be written later, in inference mode or out of it, and carry no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _write(pools: _Pair, runs: Sequence[Run], k: torch.Tensor, v: torch.Tensor) -> None:
    """Put this step's rows into the slots of ``runs``, in order."""
    done = 0
    for run in runs:
        for pool, rows in zip(pools, (k.detach(), v.detach()), strict=True):
            pool[:, :, run.slot : run.slot + run.length] = rows[:, :, done : done + run.length].to(pool.dtype)
        done += run.length


def _visible(plan: LayerPlan, device: torch.device) -> torch.Tensor:
    """Bool [n, keys]: which keys each query of the step sees."""
    queries = torch.arange(plan.start, plan.stop, device=device)[:, None]
    keys = torch.arange(plan.first_key, plan.stop, device=device)[None, :]
    visible = keys <= queries
    return visible if plan.window is None else visible & (keys > queries - plan.window)


for _kind, _builder in (
    ("sequence", EagerSequenceCache),
    ("batched-cell", EagerBatchCellCache),
    ("batched-paged", EagerBatchPagedCache),
    ("batched-sequence", EagerBatchSequenceCache),
    ("batched", EagerBatchSequenceCache),
):
    register_builder("eager", _kind, _builder)
