"""csrc/attention.cpp: ragged paged attention on the CPU, against a float64 softmax."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executorch_mlx.backends.mlx.runtime._attention import attend

Array = np.ndarray[Any, np.dtype[Any]]
LEVELS = [0, 1, 2]
FLOAT32, FLOAT16, BFLOAT16 = range(3)


def stored(x: Array, storage: int) -> Array:
    if storage == BFLOAT16:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16 if storage == FLOAT16 else np.float32)


def read(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


@dataclass
class Case:
    """Rows over shuffled pages; every slot that no row sees holds NaN."""

    lengths: list[int]
    firsts: list[int] | None = None
    group: int = 3
    kv_heads: int = 2
    d: int = 64
    dv: int = 64
    page: int = 16
    storage: int = FLOAT32
    seed: int = 0
    scale: float = 0.125

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        firsts = self.firsts or [0] * len(self.lengths)
        self.rows = np.array([firsts, self.lengths], np.int32).T.copy()
        self.width = -(-int(self.rows.sum(1).max()) // self.page)
        n = len(self.lengths)
        pages = n * self.width + 2
        self.tables = rng.permutation(pages).astype(np.int32)[: n * self.width].reshape(n, self.width)
        self.q = rng.standard_normal((n, self.kv_heads * self.group, self.d)).astype(np.float32)
        self.keys, self.values = (
            stored(rng.standard_normal((self.kv_heads, pages * self.page, size)), self.storage)
            for size in (self.d, self.dv)
        )
        hidden = np.ones(pages * self.page, bool)
        for row in range(n):
            hidden[self.visible(row)] = False
        for pool in (self.keys, self.values):
            pool[:, hidden] = stored(np.array(np.nan), self.storage)

    def visible(self, row: int) -> Array:
        first, length = self.rows[row]
        virtual = np.arange(first, first + length)
        slots: Array = self.tables[row, virtual // self.page] * self.page + virtual % self.page
        return slots

    def run(self, threads: int = 1, level: int = 2) -> Array:
        n, heads, d = self.q.shape
        dims = (n, heads, self.kv_heads, d, self.dv, self.keys.shape[1], self.page, self.width, self.storage)
        out = np.full((n, heads, self.dv), 7, np.float32)
        arrays = (self.q, self.keys, self.values, out, self.tables, self.rows)
        assert all(array.flags.c_contiguous for array in arrays)
        q, keys, values, result, tables, rows = (array.ctypes.data for array in arrays)
        attend(q, keys, values, result, tables, rows, dims, self.scale, threads, level)
        return out

    def expected(self) -> Array:
        out = np.empty((*self.q.shape[:2], self.dv))
        with np.errstate(invalid="ignore"):
            for row in range(len(self.rows)):
                slots = self.visible(row)
                for head in range(self.q.shape[1]):
                    keys, values = (
                        read(pool[head // self.group, slots]).astype(np.float64) for pool in (self.keys, self.values)
                    )
                    scores = self.scale * (keys @ self.q[row, head].astype(np.float64))
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights / weights.sum() @ values
        return out

    def check(self, threads: int = 1, level: int = 2) -> None:
        wanted = self.expected()
        largest = max(np.abs(read(self.values[:, self.visible(row)])).max() for row in range(len(self.rows)))
        np.testing.assert_allclose(self.run(threads, level), wanted, rtol=0, atol=2e-6 * largest)


CASES = {
    "one_key": Case([1]),
    "smollm2": Case([130, 7, 64], group=3, kv_heads=3, page=64),
    "several_pieces": Case([700, 1, 256, 257, 512]),
    "from_inside_a_page": Case([40, 300, 1], [5, 0, 33]),
    "page_of_one": Case([50, 3], [0, 9], page=1),
    "one_head": Case([90, 20], group=1, d=128, dv=128, page=64),
    "two_heads": Case([33], group=2, d=80, dv=96),
    "four_heads": Case([90, 20], group=4, d=128, dv=64),
    "eight_heads": Case([90, 20], group=8, kv_heads=1),
    "five_heads": Case([61], group=5, d=32, dv=48),
    "odd_sizes": Case([77, 19], d=37, dv=21),
    "tiny_sizes": Case([300, 2], d=1, dv=1, group=4),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("storage", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_softmax(name: str, storage: int, level: int) -> None:
    replace(CASES[name], storage=storage).check(level=level)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 600)), min_size=1, max_size=5),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    d=st.integers(1, 140),
    dv=st.integers(1, 140),
    page=st.sampled_from([1, 3, 16, 64]),
    storage=st.sampled_from([FLOAT32, FLOAT16, BFLOAT16]),
    threads=st.sampled_from([1, 2, 5]),
    level=st.sampled_from(LEVELS),
)
def test_any_shape(
    rows: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    d: int,
    dv: int,
    page: int,
    storage: int,
    threads: int,
    level: int,
) -> None:
    firsts, lengths = [first for first, _ in rows], [length for _, length in rows]
    Case(lengths, firsts, group, kv_heads, d, dv, page, storage, scale=d**-0.5).check(threads, level)


def test_a_row_depends_neither_on_the_threads_nor_on_other_rows() -> None:
    # Enough to read that all threads are used.
    case = Case([3000, 900, 1, 2500, 256], page=64, kv_heads=3)
    case.check()
    out = case.run(1)
    for threads in (0, 2, 5, 100):
        np.testing.assert_array_equal(case.run(threads), out)
    case.q, case.rows, case.tables = (array[3:4].copy() for array in (case.q, case.rows, case.tables))
    np.testing.assert_array_equal(case.run(2), out[3:4])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e30, -1e30, 0.0, 20.0, -20.0])
def test_large_scores(scale: float, level: int) -> None:
    Case([300, 40], scale=scale, d=1).check(level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_scores_give_the_mean(level: int) -> None:
    case = Case([600, 5], scale=1e30)
    case.keys[:] = np.where(np.isnan(case.keys), np.nan, 1)
    case.check(level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keys", [[0], [0, 299], list(range(256)), list(range(299))])
def test_a_score_of_minus_infinity_is_no_weight(keys: list[int], level: int) -> None:
    case = Case([300], kv_heads=1, d=1)
    case.q = np.abs(case.q)
    case.keys[:, case.visible(0)[keys]] = -np.inf
    assert np.isfinite(case.expected()).all()
    case.check(level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_scores_without_a_softmax_give_nan(value: float, level: int) -> None:
    case = Case([300, 20], kv_heads=1, d=1)
    case.q = np.abs(case.q)
    case.keys[:, case.visible(1)] = value
    np.testing.assert_array_equal(np.isnan(case.run(level=level)).any(2), [[False] * 3, [True] * 3])


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001])
@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_where_it_is(level: int, bits: int) -> None:
    nan = np.array(bits, np.uint32).view(np.float32)
    case = Case([300, 20, 300])
    wanted = case.run(level=level)
    case.q[1, 4, 9] = nan
    case.keys[1, case.visible(2)[270], 5] = nan
    case.values[0, case.visible(0)[1], 8] = nan
    wanted[1, 4] = wanted[2, 3:] = wanted[0, :3, 8] = np.nan
    np.testing.assert_array_equal(case.run(level=level), wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_every_half_is_read_exactly(level: int) -> None:
    # One key a row, which is its value: all 65536 halves.
    pool = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    case = Case([1] * 1024, group=1, kv_heads=1, page=1, storage=FLOAT16)
    case.values = pool.reshape(1, 1024, 64)
    case.keys, case.tables = np.zeros_like(case.values), np.arange(1024, dtype=np.int32)[:, None].copy()
    np.testing.assert_array_equal(case.run(level=level)[:, 0], pool.reshape(1024, 64).astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[0, 5], [-1, 5]]}, r"row 1: expected first >= 0.* <= 48, got -1 and 5"),
        ({"rows": [[0, 0], [0, 5]]}, r"row 0: .*length >= 1.*, got 0 and 0"),
        ({"rows": [[0, 5], [40, 9]]}, r"row 1: .*<= 48, got 40 and 9"),
        ({"rows": [[0, 5], [2**31 - 1, 2**31 - 1]]}, r"row 1: .*<= 48"),
        (
            {"tables": [[0, 1, 2], [3, -1, 4]]},
            r"row 1: expected pages of 16 within a pool of 128 slots, got page -1 at 1",
        ),
        ({"tables": [[0, 8, 2], [3, 1, 4]]}, r"row 0: .*got page 8 at 1"),
        ({"tables": [[0, 2**31 - 1, 2], [3, 1, 4]]}, r"row 0: .*got page 2147483647 at 1"),
        ({"storage": 3}, "storage"),
        ({"kv_heads": 4}, "whole groups"),
    ],
)
def test_what_lies_out_of_bounds_is_refused(change: dict[str, Any], message: str) -> None:
    case = Case([20, 48])
    for name, value in change.items():
        setattr(case, name, np.array(value, np.int32) if isinstance(value, list) else value)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_entries_of_pages_that_are_not_read_may_hold_anything() -> None:
    case = Case([20, 10], [0, 17])
    wanted = case.expected()
    case.tables[0, 2:] = case.tables[1, 0] = -5
    np.testing.assert_allclose(case.run(), wanted, rtol=0, atol=1e-5)


def test_the_last_page_may_be_cut() -> None:
    case = Case([20], kv_heads=1)
    case.tables[0] = [1, 3]
    case.keys, case.values = (np.ones((1, 52, 64), np.float32) for _ in range(2))
    assert (case.run() == 1).all()
    case.keys, case.values = (np.ones((1, 51, 64), np.float32) for _ in range(2))
    with pytest.raises(ValueError, match="pool of 51 slots, got page 3 at 1"):
        case.run()


def test_no_rows_are_no_work() -> None:
    case = Case([20])
    case.q, case.rows, case.tables = case.q[:0], case.rows[:0], case.tables[:0]
    assert case.run(2).shape == (0, 6, 64)


def test_too_few_threads_are_enough() -> None:
    resource = pytest.importorskip("resource")
    if sys.platform != "linux":
        pytest.skip("the address space is limited on Linux only")
    case = Case([3000] * 3, page=64, kv_heads=3)
    wanted = case.run(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Room for the results but not for a thread's stack.
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), limits[1]))
    try:
        got = case.run(5)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    np.testing.assert_array_equal(got, wanted)
