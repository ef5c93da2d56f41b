"""One attention call for many single queries, each over its own pages: whichever way suits the device.

On CUDA a kernel of ours (``ragged_cuda``), on a CPU another (``csrc/attention.cpp``): both read what a row sees, and
nothing else. Elsewhere, and for heads that they are not made for, MLX's own operations: the pages are gathered, padded
to the longest row and masked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from executorch_mlx.extension.llm.cache.plan import PagedRead

from ..device import is_cpu, mx
from . import ragged_cuda
from .pools import Pair

try:
    from .. import _attention
except ImportError:  # run from a source tree without the native part, on a device that does without
    _attention = None  # type: ignore[assignment]

IntArray = npt.NDArray[np.int32]

_STORAGE = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}


@dataclass
class Rows:
    """Single queries and the pages that they read.

    Attributes:
        indices: which of the step's tokens they are.
        tables: each row's pages, [n, width]; those past its end are 0.
        spans: each row's first key, in slots from its first page, and its number of keys, [n, 2].
        page_size: slots of a page.
    """

    indices: Sequence[int]
    tables: IntArray
    spans: IntArray
    page_size: int

    @staticmethod
    def of(reads: Sequence[PagedRead], page_size: int) -> Rows:
        """Gather the reads of single tokens."""
        # A width that changes seldom: what is compiled for it is reused.
        width = -(-max(len(read.pages) for read in reads) // 8) * 8
        tables = np.zeros((len(reads), width), np.int32)
        for row, read in enumerate(reads):
            tables[row, : len(read.pages)] = read.pages
        spans = np.array([(read.first, read.length) for read in reads], np.int32)
        return Rows([read.span.start for read in reads], tables, spans, page_size)

    @property
    def longest(self) -> int:
        """The most keys that a row reads."""
        return int(self.spans[:, 1].max())

    @functools.cached_property
    def last_slots(self) -> IntArray:
        """The slot of each row's last key."""
        last = self.spans.sum(axis=1) - 1
        pages: IntArray = self.tables[np.arange(len(last)), last // self.page_size]
        slots: IntArray = pages * self.page_size + last % self.page_size
        return slots

    @functools.cached_property
    def on_device(self) -> mx.array:
        """The spans, with where each row's table begins, and the tables; see ``ragged_cuda.attend``."""
        num_rows, width = self.tables.shape
        starts = 3 * num_rows + np.arange(0, num_rows * width, width, dtype=np.int32)[:, None]
        numbers = np.concatenate([self.spans, starts], axis=1, dtype=np.int32)
        # None is negative: this makes the array anew, on the device.
        return mx.abs(mx.array(np.concatenate([numbers.reshape(-1), self.tables.reshape(-1)])))

    @functools.cached_property
    def padded(self) -> tuple[mx.array, mx.array]:
        """The tables, cut to what is read, and which of their keys each row sees, [n, 1, 1, keys]."""
        width = -(-int(self.spans.sum(axis=1).max()) // self.page_size)
        keys = np.arange(width * self.page_size)[None, :]
        first, length = self.spans[:, :1], self.spans[:, 1:]
        visible = (keys >= first) & (keys < first + length)
        return mx.array(self.tables[:, :width]), mx.array(visible[:, None, None, :])


Own = tuple[mx.array, mx.array]
"""Each row's last key and value, [1, H_kv, n, D] and [1, H_kv, n, D_v]."""


class RowAttention(NamedTuple):
    """A way to attend with one query per row.

    ``attend(q, own, pools, rows, scale)`` takes queries [1, H_q, n, D], what is to be written first, pools [1, H_kv,
    slots, D] of keys and [1, H_kv, slots, D_v] of values, what each query reads, and the softmax scale; it returns [1,
    H_q, n, D_v] in q's dtype.

    Attributes:
        attend: the function.
        writes: whether it writes ``own``, into the memory of the pools: the caller is their only owner, and evaluates
            the result before anything else reads them; no row reads what another one brings. Otherwise ``own`` is None:
            the rows are there.
    """

    attend: Callable[[mx.array, Own | None, Pair, Rows, float], mx.array]
    writes: bool


def _on_cuda(q: mx.array, own: Own | None, pools: Pair, rows: Rows, scale: float) -> mx.array:
    splits = ragged_cuda.num_splits(q.shape[2], q.shape[1], pools[0].shape[1], rows.longest)
    return ragged_cuda.attend(q, own, pools, rows.on_device, page_size=rows.page_size, splits=splits, scale=scale)


def _on_cpu(q: mx.array, own: Own | None, pools: Pair, rows: Rows, scale: float) -> mx.array:
    """Attend at once: what has been written lazily is evaluated."""
    assert _attention is not None
    queries = mx.contiguous(q[0].swapaxes(0, 1).astype(mx.float32))
    news = [] if own is None else [array.astype(pool.dtype) for array, pool in zip(own, pools, strict=True)]
    mx.eval(queries, pools, news)
    memory = [_memory(pool) for pool in pools]
    if news:
        slots = rows.last_slots
        for pool, new in zip(memory, news, strict=True):
            pool[0, :, slots] = _memory(new)[0].swapaxes(0, 1)
    num_rows, q_heads, dim = queries.shape
    _, kv_heads, num_slots, value_dim = pools[1].shape
    out = np.empty((num_rows, q_heads, value_dim), np.float32)
    sizes = (num_rows, q_heads, kv_heads, dim, value_dim, num_slots, rows.page_size, rows.tables.shape[1])
    _attention.attend(
        _memory(queries).ctypes.data,
        memory[0].ctypes.data,
        memory[1].ctypes.data,
        out.ctypes.data,
        rows.tables.ctypes.data,
        rows.spans.ctypes.data,
        (*sizes, _STORAGE[pools[0].dtype]),
        scale,
        _num_threads(),
    )
    return mx.array(out).astype(q.dtype).swapaxes(0, 1)[None]


def _memory(array: mx.array) -> npt.NDArray[Any]:
    """Return an evaluated array's own memory."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


@functools.cache
def _num_threads() -> int:
    """As many as the BLAS takes."""
    return int(os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count() or 1)


def _composed(q: mx.array, own: Own | None, pools: Pair, rows: Rows, scale: float) -> mx.array:
    assert own is None, "MLX's operations write pools for themselves"
    tables, visible = rows.padded

    def gathered(pool: mx.array) -> mx.array:
        heads, slots, dim = pool.shape[1:]
        pages = pool.reshape(heads, slots // rows.page_size, rows.page_size, dim)[:, tables]
        return pages.swapaxes(0, 1).reshape(len(tables), heads, -1, dim).astype(q.dtype)

    # What a row does not see may hold anything, NaN included.
    its_values = mx.where(visible.swapaxes(2, 3), gathered(pools[1]), 0)
    queries = q[0].swapaxes(0, 1)[:, :, None]
    out = mx.fast.scaled_dot_product_attention(queries, gathered(pools[0]), its_values, scale=scale, mask=visible)
    return out[:, :, 0].swapaxes(0, 1)[None]


ON_CUDA = RowAttention(_on_cuda, writes=True)
ON_CPU = RowAttention(_on_cpu, writes=True)
COMPOSED = RowAttention(_composed, writes=False)


@functools.cache
def row_attention(head_dim: int, value_dim: int) -> RowAttention:
    """Return what suits this device, and heads of these sizes."""
    if is_cpu():
        return COMPOSED if _attention is None else ON_CPU
    if mx.cuda.is_available() and ragged_cuda.takes(head_dim, value_dim):
        return ON_CUDA
    return COMPOSED
