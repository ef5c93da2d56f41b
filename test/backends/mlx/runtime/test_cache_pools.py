"""What the caches' pools cost on MLX: writes in place, copies of a prefix, shapes that are reused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.runtime.caches import MLXBatchPagedCache
from executorch_mlx.backends.mlx.runtime.caches.pools import read
from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, Run, build
from oracles.batch_pair import OTHER_CELLS, BatchPair
from oracles.sequence_pair import SequencePair

KINDS = ("sequence", "batched-cell", "batched-sequence", "batched-paged")
BATCHED = (*KINDS[1:], OTHER_CELLS["MLXBackend"])
PAGE = MLXBatchPagedCache.page_size
LAYER = LayerConfig(n_kv_heads=2, head_dim=64)
SLOT_BYTES = 2 * 2 * 64 * 4  # keys and values of two heads in float32


class Cache:
    """A cache of any kind with a flat layer, fed with ones; a ``sequence`` is the sequence 0."""

    def __init__(self, kind: str, capacity: int, initial_capacity: int, layer: LayerConfig = LAYER) -> None:
        self.layer = layer
        self.cache: Any = build("MLXBackend", kind, CacheConfig(capacity, [layer], "float32", initial_capacity, 8))
        self.is_batched = kind != "sequence"
        if self.is_batched:
            assert self.cache.seq_new() == 0

    def step(self, ids: Sequence[int]) -> None:
        due = {seq_id: self.cache.pos(seq_id) if self.is_batched else self.cache.position for seq_id in set(ids)}
        positions = []
        for seq_id in ids:
            positions.append(due[seq_id])
            due[seq_id] += 1
        q = k = v = mx.ones((1, self.layer.n_kv_heads, len(ids), self.layer.head_dim))
        if self.is_batched:
            assert self.cache.declare_step(ids)
        with self.cache.step():
            mx.eval(self.cache.attend(0, positions, q, k, v, 1.0), self.cache.release())


def bytes_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Return the memory that work keeps, and the most that it takes on the way."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # a buffer that is used again may be larger than what is put in it
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_active_memory() - before, max(0, mx.get_peak_memory() - before)


# -- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_step_takes_the_same_memory_whatever_the_pools_size(kind: str, num_tokens: int) -> None:
    taken = []
    for slots in (1024, 65536):
        cache = Cache(kind, slots, slots)
        cache.step([0] * 8)
        cache.step([0] * num_tokens)
        kept, most = bytes_of(lambda cache=cache: cache.step([0] * num_tokens))
        assert cache.cache.pool_bytes == slots * SLOT_BYTES
        assert kept == 0
        taken.append(most)
    assert max(taken) < 64 * SLOT_BYTES


@pytest.mark.parametrize("kind", BATCHED)
def test_step_of_many_sequences_takes_the_same_memory_whatever_the_pools_size(kind: str) -> None:
    taken = []
    for slots in (1024, 16384):
        cache = Cache(kind, slots, slots)
        ids = [0, *(cache.cache.seq_new() for _ in range(7))]
        for _ in range(3):
            cache.step(ids)
        kept, most = bytes_of(lambda cache=cache, ids=ids: cache.step(ids))
        assert kept == 0
        taken.append(most)
    assert max(taken) < 128 * SLOT_BYTES


def test_cells_freed_here_and_there_are_zeroed_and_reused_without_a_copy() -> None:
    taken = []
    for slots in (1024, 65536):
        cache = Cache("batched-cell", slots, slots)
        other = cache.cache.seq_new()
        for _ in range(20):
            cache.step([0, other])
        cache.step([0])
        assert cache.cache.seq_rm(other)
        _, zeroing = bytes_of(lambda cache=cache: cache.step([0]))
        _, scattered = bytes_of(lambda cache=cache: cache.step([0] * 12))
        taken += [zeroing, scattered]
    assert max(taken) < 128 * SLOT_BYTES


def test_growth_of_the_pools_doubles_up_to_the_capacity() -> None:
    # Pages are whole.
    for kind in KINDS:
        unit = PAGE if kind == "batched-paged" else 1
        cache, sizes = Cache(kind, capacity=40 * unit, initial_capacity=3 * unit), []
        for _ in range(40 * unit // 8):
            cache.step([0] * 8)
            sizes.append(cache.cache.pool_bytes // (SLOT_BYTES * unit))
        assert sorted(set(sizes)) == ([3, 6, 12, 24, 40] if unit > 1 else [12, 24, 40]), kind
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("kind", ["sequence", "batched-sequence"])
def test_ring_has_no_more_slots_than_window_and_step_need(kind: str) -> None:
    cache = Cache(kind, 4096, 512, LayerConfig(n_kv_heads=2, head_dim=64, window=16))
    for _ in range(60):
        cache.step([0] * 8)
    assert cache.cache.pool_bytes == (16 + 8 - 1) * SLOT_BYTES


def test_freed_pages_are_used_before_there_are_more() -> None:
    cache = Cache("batched-paged", 64 * PAGE, PAGE)
    for _ in range(20):
        cache.step([0] * PAGE)
        other = cache.cache.seq_new()
        cache.step([other] * (3 * PAGE))
        assert cache.cache.seq_rm(other)
    assert cache.cache._pages[None].num_pages == 20 + 3


def test_pages_that_a_window_has_left_are_used_again() -> None:
    cache = Cache("batched-paged", 4096, 64, LayerConfig(n_kv_heads=2, head_dim=64, window=16))
    for _ in range(60):
        cache.step([0] * 8)
    assert cache.cache.pool_bytes <= 2 * PAGE * SLOT_BYTES  # 16 + 8 - 1 tokens lie in two pages at most


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "slots"), [(1, 256), (200, 256), (256, 256), (257, 512), (700, 768)])
def test_clone_of_a_private_history_allocates_about_its_prefix(prefix: int, slots: int) -> None:
    cache = Cache("batched-sequence", 65536, 16384)
    for _ in range(100):
        cache.step([0] * 8)
    clones = []
    kept, _ = bytes_of(lambda: clones.append(cache.cache.seq_clone(0, prefix)))
    assert cache.cache.pos(clones[0]) == prefix
    assert kept == slots * SLOT_BYTES
    assert cache.cache.pool_bytes == (16384 + slots) * SLOT_BYTES


def test_clone_of_cells_copies_no_keys() -> None:
    cache = Cache("batched-cell", 4096, 4096)
    for _ in range(100):
        cache.step([0] * 8)
    assert bytes_of(lambda: cache.cache.seq_clone(0)) == (0, 0)
    assert cache.cache.free == 4096 - 800


def test_clone_of_pages_copies_one_page_and_that_when_it_writes() -> None:
    cache = Cache("batched-paged", 64 * PAGE, 8 * PAGE)
    for _ in range(PAGE // 4):
        cache.step([0] * 8)
    cache.step([0] * 5)
    clones = []
    assert bytes_of(lambda: clones.append(cache.cache.seq_clone(0))) == (0, 0)
    pages = cache.cache._pages[None].owners
    assert sorted(pages.values()) == [2, 2, 2], "both hold all pages"
    kept, most = bytes_of(lambda: cache.step(clones))
    assert (kept, sorted(pages.values())) == (0, [1, 1, 2, 2])
    assert most <= 2 * PAGE * SLOT_BYTES
    cache.step([0, *clones] * 2)
    assert sorted(pages.values()) == [1, 1, 2, 2], "the donor's last page is its own again"


def test_page_that_cannot_be_copied_leaves_the_cache_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache("batched-paged", 64 * PAGE, 8 * PAGE)
    cache.step([0] * 5)
    clone = cache.cache.seq_clone(0)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            cache.step([clone])
    assert cache.cache.is_lost
    cache.cache.clear()
    assert cache.cache.seq_new() == 0
    cache.step([0] * 5)


@pytest.mark.parametrize("kind", BATCHED)
def test_donor_writes_in_place_after_it_was_cloned(kind: str) -> None:
    cache = Cache(kind, 16384, 4096)
    for _ in range(3):
        cache.step([0] * 8)
    _, before = bytes_of(lambda: cache.step([0]))
    assert cache.cache.seq_clone(0) is not None
    kept, most = bytes_of(lambda: cache.step([0]))
    assert kept == 0
    assert most <= before + 64 * SLOT_BYTES


@pytest.mark.parametrize("kind", BATCHED)
def test_sequences_that_come_and_go_leave_memory_as_it_was(kind: str) -> None:
    cache = Cache(kind, 1024, 256)

    def come_and_go() -> None:
        seq_id = cache.cache.seq_new()
        cache.step([seq_id] * 3)
        clone = cache.cache.seq_clone(seq_id, 2)
        cache.step([seq_id, clone, 0])
        assert cache.cache.seq_rm(seq_id)
        assert cache.cache.seq_rm(clone)
        assert cache.cache.rewind(0, 0)

    for _ in range(2):
        come_and_go()
    kept, _ = bytes_of(lambda: [come_and_go() for _ in range(30)])
    assert kept <= 0
    assert cache.cache.free == 1024


# -- reads ---------------------------------------------------------------------------------------


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Return a list that each attention call adds to: its queries, its keys, and its mask's kind."""
    calls: list[tuple[int, int, str]] = []
    attention = mx.fast.scaled_dot_product_attention

    def spy(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any) -> mx.array:
        kind = mask if isinstance(mask, str) else "none" if mask is None else "array"
        calls.append((q.shape[2], k.shape[2], kind))
        return attention(q, k, v, scale=scale, mask=mask)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    return calls


def test_masked_steps_of_cells_read_rounded_extents(attentions: list[tuple[int, int, str]]) -> None:
    cache = Cache(OTHER_CELLS["MLXBackend"], 2048, 2048)
    ids = [0, cache.cache.seq_new()]
    for _ in range(300):
        cache.step(ids)
    assert {keys for _, keys, kind in attentions if kind == "array"} == {256, 512, 768}


def test_steps_of_a_sequence_that_owns_the_whole_window_use_no_mask(attentions: list[tuple[int, int, str]]) -> None:
    cache = Cache("batched-cell", 2048, 2048)
    cache.step([0] * 8)
    cache.step([0] * 3)
    cache.step([0])
    other = cache.cache.seq_new()
    cache.step([other] * 5)
    assert attentions == [(8, 8, "causal"), (3, 11, "causal"), (1, 12, "none"), (5, 5, "causal")]


def test_single_tokens_beside_masked_ones_join_their_call(attentions: list[tuple[int, int, str]]) -> None:
    """A sequence that owns its whole window between two that do not: one call, not three."""
    cache = Cache(OTHER_CELLS["MLXBackend"], 2048, 2048)
    first, (second, third, fourth) = 0, [cache.cache.seq_new() for _ in range(3)]
    cache.step([first, second] * 3)
    attentions.clear()
    cache.step([first, third, second, *[fourth] * 4])
    assert attentions == [(3, 256, "array"), (4, 4, "causal")]


def test_steps_of_private_histories_use_no_mask_but_causal(attentions: list[tuple[int, int, str]]) -> None:
    cache = Cache("batched-sequence", 2048, 64)
    other = cache.cache.seq_new()
    cache.step([0, 0, other])
    cache.step([0, other, other, other])
    assert attentions == [(2, 2, "causal"), (1, 1, "none"), (1, 3, "none"), (3, 4, "causal")]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_over_keys_that_start_mid_pool_is_right(kind: str, dtype: str) -> None:
    """A pool of 256 slots and a window that has left its beginning: there MLX on CUDA decodes over the wrong keys."""
    layers = [LayerConfig(n_kv_heads=2, head_dim=64, window=193)]
    config = CacheConfig(512, layers, dtype, initial_capacity=256, max_write=64)
    if kind == "sequence":
        single = SequencePair("MLXBackend", config, q_dtype=dtype)
        single.steps([64, 64, 64, 64, *[1] * 3, 64, *[1] * 3])
    else:
        pair = BatchPair("MLXBackend", kind, config, q_dtype=dtype)
        ids = [pair.new(), pair.new()]
        assert None not in ids
        for seq_id in ids:
            for num_tokens in (64, 64, 64):
                pair.step([seq_id] * num_tokens)
            pair.steps([seq_id], [seq_id], [seq_id])
        pair.steps(ids, ids)


def test_half_precision_view_that_starts_mid_pool_is_never_handed_to_a_decode() -> None:
    pool = mx.random.normal((1, 2, 256, 64)).astype(mx.bfloat16)
    mx.eval(pool)
    rows = read(pool, [Run(3, 100)], 1)
    kept, _ = bytes_of(lambda: mx.eval(rows))
    assert kept == rows.nbytes, "a buffer of its own"
    np.testing.assert_array_equal(np.array(rows.astype(mx.float32)), np.array(pool[:, :, 3:103].astype(mx.float32)))
