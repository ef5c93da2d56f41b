"""Pages that many sequences share, on MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from executorch_mlx.extension.llm.cache.arguments import check_heads
from executorch_mlx.extension.llm.cache.batch_paged import BatchPagedCache
from executorch_mlx.extension.llm.cache.config import CacheConfig
from executorch_mlx.extension.llm.cache.plan import Mask, PagedPlan, PagedRead, PagedStep, Run, runs_of

from .. import trace
from ..device import mx
from . import ragged_cuda
from .base import MLXCache
from .pools import Pair, Pools, read
from .ragged import ON_CUDA, RowAttention, Rows, row_attention


class _StepArrays:
    """What the layers of a window need of a step, made once."""

    def __init__(self, step: PagedStep, page_size: int) -> None:
        self._step = step
        singles = [read for read in step.reads if read.mask is Mask.NONE]
        self.rows = Rows.of(singles, page_size) if singles else None
        self.spans = [read for read in step.reads if read.mask is not Mask.NONE]
        self._are_apart = len({read.span.seq_id for read in singles}) == len(singles)

    @property
    def may_write(self) -> bool:
        """Whether one attention call may write all tokens: no row reads what another one brings."""
        return self._are_apart and not self.spans

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The slots that the step's tokens go to."""
        return runs_of(self._step.write)


class MLXBatchPagedCache(BatchPagedCache, MLXCache[PagedPlan]):
    """The ``batched-paged`` layout: all single tokens of a step are answered by one attention call.

    Attributes:
        row_attention: how they are answered; None leaves it to the device.
    """

    row_attention: ClassVar[RowAttention | None] = None

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        whole, initial = (
            -(-max(tokens, 1) // self.page_size) * self.page_size
            for tokens in (config.capacity, config.initial_capacity)
        )
        self._pools = Pools(replace(config, initial_capacity=initial), [whole] * len(config.layers))
        self._row_attention = [
            self.row_attention or row_attention(layer.head_dim, layer.value_dim) for layer in config.layers
        ]
        self._kept: dict[int | None, _StepArrays] = {}
        # Results of kernels that write pools, which MLX does not know: what is not evaluated is not written.
        self._results: list[mx.array] = []

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return self._pools.num_bytes

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call, and kernels' results; see ``MLXCache.release``."""
        results, self._results = self._results, []
        return [*self._pools.release(), *results]

    def _leave(self) -> None:
        super()._leave()
        self._kept.clear()

    def traced(self, layers: Sequence[int], positions: tuple[int, ...]) -> trace.TracedAttention | None:
        """Return a step of single tokens as a function of arrays; see ``MLXCache.traced``."""
        if max(layers) >= len(self._row_attention):
            return None  # to be reported where it is asked
        if any(self._row_attention[layer] is not ON_CUDA for layer in layers):
            return None
        first = self.plan(layers[0], positions)
        plans = [first, *(self._plan(layer, first.positions) for layer in layers[1:])]
        for step in {plan.step.window: plan.step for plan in plans}.values():
            if step.copies or not self._arrays(step).may_write:
                return None
        return _TracedStep(self, plans)

    def _arrays(self, step: PagedStep) -> _StepArrays:
        arrays = self._kept.get(step.window)
        if arrays is None:
            arrays = self._kept[step.window] = _StepArrays(step, self.page_size)
        return arrays

    def _attend(self, plan: PagedPlan, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        step = plan.step
        arrays = self._arrays(step)
        answer = self._row_attention[plan.layer]
        if answer.writes and arrays.may_write:
            assert arrays.rows is not None, "a step has tokens"
            pools = self._pools.reserve(plan.layer, self._slots(step.num_pages))
            out = answer.attend(q, None if plan.is_written else (k, v), pools, arrays.rows, scale)
            self._results.append(out)
            return out
        runs = () if plan.is_written else arrays.runs
        pools = self._pools.write(plan.layer, self._slots(step.num_pages), runs, k, v)
        parts: list[tuple[int, mx.array]] = []
        if arrays.rows is not None:
            indices = arrays.rows.indices
            rows = q if len(indices) == q.shape[2] else q[:, :, mx.array(list(indices))]
            out = answer.attend(rows, None, pools, arrays.rows, scale)
            parts += [(index, out[:, :, at : at + 1]) for at, index in enumerate(indices)]
        parts += [(its.span.start, self._answered(plan, its, pools, q, scale)) for its in arrays.spans]
        if len(parts) == 1:
            return parts[0][1]
        return mx.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])], axis=2)

    def _answered(self, plan: PagedPlan, its: PagedRead, pools: Pair, q: mx.array, scale: float) -> mx.array:
        """Answer a span of several tokens by itself."""
        start, stop = its.span.start, its.span.stop
        rows = q if stop - start == q.shape[2] else q[:, :, start:stop]
        keys, values = (read(pool, self._runs(its), stop - start).astype(q.dtype) for pool in pools)
        mask: mx.array | str = "causal"
        if its.mask is Mask.BAND:
            assert plan.step.window is not None, "a band follows from a window"
            last = plan.positions[stop - 1]
            queries = mx.arange(plan.positions[start], last + 1)[:, None]
            positions = mx.arange(last + 1 - its.length, last + 1)[None, :]
            mask = (positions <= queries) & (positions > queries - plan.step.window)
        return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask)

    def _runs(self, its: PagedRead) -> list[Run]:
        """Return the slots that a span reads: pages that lie side by side are one run."""
        size, runs, end = self.page_size, [], its.first + its.length
        pages = its.pages[its.first // size : -(-end // size)]
        offset = its.first // size * size
        for run in runs_of(pages):
            low, high = max(its.first - offset, 0), min(end - offset, run.length * size)
            runs.append(Run(run.slot * size + low, high - low))
            offset += run.length * size
        return runs

    def _copy_pages(self, window: int | None, copies: Sequence[tuple[int, int]], num_pages: int) -> None:
        size = self.page_size
        runs = [(Run(source * size, size), Run(target * size, size)) for source, target in copies]
        layers = [layer for layer, its in enumerate(self.config.layers) if its.window == window]
        try:
            self._pools.copy(layers, self._slots(num_pages), runs)
        except Exception as error:
            self.mark_lost(f"{type(error).__name__}: {error}")
            raise

    def _slots(self, num_pages: int) -> int:
        """Return the slots that pools must have: past the capacity, which pages are rounded up from, some more."""
        whole = -(-self.capacity // self.page_size)
        spare = max(whole // 8, 1)
        pages = num_pages if num_pages <= whole else whole + -(-(num_pages - whole) // spare) * spare
        return pages * self.page_size

    def _forget(self) -> None:
        self._pools.forget()


class _TracedStep(trace.TracedAttention):
    """A step of single tokens on CUDA: the rows of each window, and pools of each layer, in one list."""

    def __init__(self, cache: MLXBatchPagedCache, plans: Sequence[PagedPlan]) -> None:
        self._cache, self._plans = cache, plans
        self.arrays = []
        # Where they lie in the list: of each window, with its longest row, and of each layer.
        self._rows: dict[int | None, tuple[int, int]] = {}
        self._pools: dict[int, int] = {}
        fixed: list[Any] = [cache.page_size]
        for plan in plans:
            window = plan.step.window
            if window not in self._rows:
                rows = cache._arrays(plan.step).rows
                assert rows is not None, "a step has tokens"
                self._rows[window] = len(self.arrays), rows.longest
                self.arrays.append(rows.on_device)
            if plan.layer not in self._pools:
                self._pools[plan.layer] = len(self.arrays)
                self.arrays += cache._pools.reserve(plan.layer, cache._slots(plan.step.num_pages))
        # A longest row is rounded up, so that the number of splits is the same for most steps.
        self._longest = {window: -(-longest // 512) * 512 for window, (_, longest) in self._rows.items()}
        fixed += [array.shape for array in self.arrays]
        fixed += [plan.is_written for plan in plans]
        self._window = {plan.layer: plan.step.window for plan in plans}
        self.fixed = (*fixed, *self._longest.values(), *self._window.items())
        self._page_size = cache.page_size
        self._asked = {plan.layer for plan in plans if plan.is_written}

    def attend(self, arrays: list[Any], layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """See ``TracedAttention.attend``."""
        check_heads(layer, self._cache.config.layers[layer], q.shape[2], q, k, v)
        window, at = self._window[layer], self._pools[layer]
        pools = arrays[at], arrays[at + 1]
        own = None if layer in self._asked else (k, v)
        self._asked.add(layer)
        splits = ragged_cuda.num_splits(q.shape[2], q.shape[1], k.shape[1], self._longest[window])
        return ragged_cuda.attend(
            q, own, pools, arrays[self._rows[window][0]], page_size=self._page_size, splits=splits, scale=scale
        )

    def commit(self, results: list[mx.array]) -> None:
        """See ``TracedAttention.commit``."""
        for plan in self._plans:
            self._cache.commit(plan)
        self._cache._results += results
