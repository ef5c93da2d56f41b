"""Tests of the public cases: faults that could ship, each planted in turn, and the cases that must notice."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from public_cases import CASES

from executorch_mlx.backends.mlx.runtime.caches import pools as mlx_pools
from executorch_mlx.backends.mlx.runtime.caches import sequence as mlx_sequence
from executorch_mlx.backends.mlx.runtime.caches.batch_cell import MLXBatchCellCache
from executorch_mlx.backends.mlx.runtime.caches.sequence import MLXSequenceCache
from executorch_mlx.extension.llm.cache import (
    CacheError,
    CacheFullError,
    Run,
    config,
    layout,
    reference,
    sequence,
    session,
)
from executorch_mlx.extension.llm.cache import batch_cell as cell_core
from executorch_mlx.extension.llm.cache.batch import BatchCache
from executorch_mlx.extension.llm.cache.batch_cell import BatchCellCache
from executorch_mlx.extension.llm.cache.batch_sequence import BatchSequenceCache
from executorch_mlx.extension.llm.cache.cells import CellSequence, FreeCells
from executorch_mlx.extension.llm.cache.layout import CacheLayout
from executorch_mlx.extension.llm.cache.policies import RingPolicy
from executorch_mlx.extension.llm.cache.reference import EagerBatchCellCache, EagerSequenceCache
from executorch_mlx.extension.llm.cache.sequence import SequenceCache
from oracles.batch_pair import OTHER_CELLS

Patch = pytest.MonkeyPatch


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around``, which is given the original first."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


# -- retention ---------------------------------------------------------------


def ring_retains_everything(patch: Patch) -> None:
    patch.setattr(RingPolicy, "retains", lambda self, position, high: True)


def ring_retains_its_window_only(patch: Patch) -> None:
    def retains(self: RingPolicy, position: int, high: int) -> bool:
        return position == 0 or self.first_visible(position) >= max(0, high - self.window)

    patch.setattr(RingPolicy, "retains", retains)


def window_of_one_refuses_a_rewind(patch: Patch) -> None:
    def retains(self: RingPolicy, position: int, high: int) -> bool:
        return position == 0 or self.first_visible(position) >= max(0, high - self.slots)

    patch.setattr(RingPolicy, "retains", retains)


def clone_forgets_its_donors_floor(patch: Patch) -> None:
    def fork(original: Any, self: SequenceCache, upto: int) -> SequenceCache | None:
        forked: SequenceCache | None = original(self, upto)
        if forked is not None:
            forked._high = list(forked._filled)
        return forked

    wrap(patch, SequenceCache, "fork", fork)


def rewind_lowers_the_floor(patch: Patch) -> None:
    def truncate(original: Any, self: SequenceCache, position: int) -> None:
        original(self, position)
        self._high = list(self._filled)

    wrap(patch, SequenceCache, "_truncate", truncate)


def abort_lowers_the_floor(patch: Patch) -> None:
    def roll_back(original: Any, self: SequenceCache, step: Any) -> None:
        original(self, step)
        self._high = list(self._filled)

    wrap(patch, SequenceCache, "_roll_back", roll_back)


def rewind_past_the_end_is_granted(patch: Patch) -> None:
    def rewind(original: Any, self: Any, *where: int) -> bool:
        end = self.position if len(where) == 1 else self.pos(where[0])
        return True if end is not None and where[-1] > end else original(self, *where)

    wrap(patch, SequenceCache, "rewind", rewind)
    wrap(patch, BatchCache, "rewind", rewind)


def rewind_to_the_end_cancels_the_declaration(patch: Patch) -> None:
    def rewind(original: Any, self: BatchCache[Any, Any], seq_id: int, position: int) -> bool:
        granted: bool = original(self, seq_id, position)
        self._declared = () if granted else self._declared
        return granted

    wrap(patch, BatchCache, "rewind", rewind)


def negative_rewind_is_refused_quietly(patch: Patch) -> None:
    def rewind(original: Any, self: SequenceCache, position: int) -> bool:
        return position >= 0 and original(self, position)

    wrap(patch, SequenceCache, "rewind", rewind)


# -- atomicity ---------------------------------------------------------------


def declare_destroys_the_earlier_declaration(patch: Patch) -> None:
    def declare(original: Any, self: BatchCache[Any, Any], ids: Sequence[int]) -> bool:
        self._declared = ()
        granted: bool = original(self, ids)
        return granted

    wrap(patch, BatchCache, "declare_step", declare)


def refused_verbs_cancel_the_declaration(patch: Patch) -> None:
    def rm(original: Any, self: BatchCache[Any, Any], seq_id: int) -> bool:
        self._declared = ()
        granted: bool = original(self, seq_id)
        return granted

    wrap(patch, BatchCache, "seq_rm", rm)


def clone_ignores_upto(patch: Patch) -> None:
    wrap(patch, BatchCache, "seq_clone", lambda original, self, src, upto=None: original(self, src))


def clone_keeps_the_cells_past_upto(patch: Patch) -> None:
    def prefix(original: Any, self: CellSequence, position: int) -> CellSequence:
        whole: CellSequence = original(self, self.position)
        whole.position = position
        return whole

    wrap(patch, CellSequence, "prefix", prefix)


def abort_advances(patch: Patch) -> None:
    patch.setattr(SequenceCache, "_roll_back", SequenceCache._advance)
    patch.setattr(BatchCellCache, "_roll_back", BatchCellCache._advance)


def abort_keeps_its_cells(patch: Patch) -> None:
    patch.setattr(BatchCellCache, "_roll_back", lambda self, step: None)


def abort_keeps_its_rows(patch: Patch) -> None:
    def roll_back(original: Any, self: SequenceCache, step: Any) -> None:
        kept = list(self._filled)
        original(self, step)
        self.__dict__["kept"] = kept

    def plan(original: Any, self: SequenceCache, layer: int, positions: tuple[int, ...]) -> Any:
        planned = original(self, layer, positions)
        kept = self.__dict__.get("kept", [0] * len(self._filled))
        return dataclasses.replace(planned, write=()) if kept[layer] > positions[-1] else planned

    wrap(patch, SequenceCache, "_roll_back", roll_back)
    wrap(patch, SequenceCache, "_plan", plan)


def abort_ends_the_sequences_steps_only_when_committed(patch: Patch) -> None:
    def end(original: Any, self: SequenceCache, *, committed: bool) -> None:
        original(self, committed=True)

    wrap(patch, SequenceCache, "end_step", end)


# -- masks -------------------------------------------------------------------


def window_off_by_one(patch: Patch) -> None:
    patch.setattr(RingPolicy, "first_visible", lambda self, position: max(0, position - self.window))
    wrap(
        patch,
        cell_core._Tail,
        "first_visible",
        lambda original, self, position, window: original(self, position, None if window is None else window + 1),
    )


def window_of_masked_cells_off_by_one(patch: Patch) -> None:
    def visible(original: Any, self: Any, plan: Any, *rest: Any) -> Any:
        return original(self, plan if plan.window is None else dataclasses.replace(plan, window=plan.window + 1), *rest)

    wrap(patch, MLXBatchCellCache, "_visible", visible)
    wrap(patch, EagerBatchCellCache, "_visible", visible)


def ring_one_slot_short(patch: Patch) -> None:
    def init(original: Any, self: RingPolicy, capacity: int, window: int, max_write: int) -> None:
        original(self, capacity, window, max_write)
        self.slots = max(window, self.slots - 1)

    wrap(patch, RingPolicy, "__init__", init)


def ring_of_the_initial_capacity(patch: Patch) -> None:
    """The ring is as large as the first pool, and the window is what it holds."""

    def policy(original: Any, layer: Any, config: Any) -> Any:
        made = original(layer, config)
        if isinstance(made, RingPolicy):
            made.slots = min(max(made.slots, config.initial_capacity), config.capacity)
            made.window = made.slots - made.max_write + 1
        return made

    wrap(patch, sequence, "policy_for", policy)


def cells_window_starts_with_the_initial_capacity(patch: Patch) -> None:
    def tokens_from(original: Any, self: Any, position: int, window: int | None) -> Any:
        return original(self, position, None if position < 256 else window)

    def visible(original: Any, self: Any, plan: Any, *rest: Any) -> Any:
        early = plan.positions[0] < 256
        return original(self, dataclasses.replace(plan, window=None) if early else plan, *rest)

    wrap(patch, cell_core._Tail, "first_visible", tokens_from)
    wrap(patch, EagerBatchCellCache, "_visible", visible)
    wrap(patch, MLXBatchCellCache, "_visible", visible)


def causal_upper_left(patch: Patch) -> None:
    def eager(plan: Any, device: torch.device) -> torch.Tensor:
        keys = plan.stop - plan.first_key
        return torch.ones(plan.num_tokens, keys, dtype=torch.bool).tril()

    def mlx(original: Any, plan: Any) -> Any:
        if original(plan) != "causal":
            return original(plan)
        return mx.arange(plan.stop - plan.first_key)[None, :] <= mx.arange(plan.num_tokens)[:, None]

    patch.setattr(reference, "_visible", eager)
    wrap(patch, mlx_sequence, "mask_of", mlx)


def causal_upper_left_in_cells(patch: Patch) -> None:
    def visible(original: Any, self: Any, plan: Any, group: Any, read: Any) -> Any:
        mask = original(self, plan, group, read)
        return mask if group.mask is not cell_core.Mask.CAUSAL else torch.ones_like(mask).tril()

    wrap(patch, EagerBatchCellCache, "_visible", visible)


def wrap_shared_mask(patch: Patch, change: Callable[..., None]) -> None:
    """Change each mask [rows, cells] behind which several sequences are read; it begins with the pool's first cell."""

    def visible(original: Any, self: Any, plan: Any, group: Any, read: Any) -> Any:
        mask = original(self, plan, group, read)
        if group.mask is cell_core.Mask.OWNED:
            change(self, plan, group, mask)
        return mask

    wrap(patch, EagerBatchCellCache, "_visible", visible)
    wrap(patch, MLXBatchCellCache, "_visible", visible)


def fork_sees_its_donors_later_tokens(patch: Patch) -> None:
    """A mask by the first cell: whoever shares it is taken for the same sequence."""

    def change(self: BatchCellCache, plan: Any, group: Any, mask: Any) -> None:
        row = 0
        for span in group.spans:
            mine = self._live[span.seq_id]
            kin = [entry for entry in self._live.values() if entry.cells and entry.cells[0] == mine.cells[0]]
            for position in plan.positions[span.start : span.stop]:
                oldest = 0 if plan.window is None else position - plan.window + 1
                for entry in kin:
                    for cell, its in zip(entry.cells, entry.positions, strict=True):
                        if oldest <= its <= position:
                            mask[row, cell] = True
                row += 1

    wrap_shared_mask(patch, change)


def neighbours_cells_are_visible(patch: Patch) -> None:
    def change(self: BatchCellCache, plan: Any, group: Any, mask: Any) -> None:
        mask[:, list(self._owners)] = True

    wrap_shared_mask(patch, change)


def masks_are_reused_between_steps(patch: Patch) -> None:
    """What a layer has found outlives its step, under a key that leaves the positions out; cells to gather, too."""

    def once(original: Any, self: Any, group: Any, num_keys: int, make: Any) -> Any:
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((group.spans, num_keys), original(self, group, num_keys, make))

    wrap(patch, MLXBatchCellCache, "_once", once)


def gathers_one_token_too_few(patch: Patch) -> None:
    def groups(original: Any, self: Any, *args: Any) -> Any:
        found = original(self, *args)
        return tuple(group if group.read else dataclasses.replace(group, tokens=_fewer(group)) for group in found)

    patch.setattr(MLXBatchCellCache, "gathers", True)
    wrap(patch, BatchCellCache, "_groups", groups)


def _fewer(group: Any) -> tuple[int, int]:
    first, length = group.tokens
    return first + 1, length - 1


def gathers_a_neighbours_cell(patch: Patch) -> None:
    def gathered(original: Any, self: Any, group: Any) -> Any:
        cells = original(self, group)
        others = self._owners.keys() - set(self.tokens(group.spans[0].seq_id).cells)
        cells[:1] = min(others, default=cells[0])
        return cells

    patch.setattr(MLXBatchCellCache, "gathers", True)
    wrap(patch, MLXBatchCellCache, "_gathered", gathered)


def kv_heads_interleaved(patch: Patch) -> None:
    def attention(q: Any, k: Any, v: Any, *, enable_gqa: bool, **rest: Any) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **rest)

    patch.setattr(reference, "F", types.SimpleNamespace(scaled_dot_product_attention=attention))


def kv_heads_interleaved_on_mlx(patch: Patch) -> None:
    def attention(original: Any, q: Any, k: Any, v: Any, **rest: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        return original(q, mx.tile(k, (1, group, 1, 1)), mx.tile(v, (1, group, 1, 1)), **rest)

    wrap(patch, mx.fast, "scaled_dot_product_attention", attention)


def outputs_in_order_of_sequences(patch: Patch) -> None:
    """Answers are joined sequence by sequence, not row by row."""

    def attend(original: Any, self: Any, plan: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        out = original(self, plan, q, k, v, scale)
        spans = [span for part in plan.parts for span in part.rows]
        return self._joined([out[:, :, span.start : span.stop] for span in spans])

    def attend_cells(original: Any, self: Any, plan: Any, *rest: Any) -> Any:
        groups = tuple(sorted(plan.groups, key=lambda group: group.spans[0].seq_id))
        return original(self, dataclasses.replace(plan, groups=groups), *rest)

    wrap(patch, BatchSequenceCache, "_attend", attend)
    wrap(patch, EagerBatchCellCache, "_attend", attend_cells)
    wrap(patch, MLXBatchCellCache, "_attend", attend_cells)


# -- growth ------------------------------------------------------------------


def growth_loses_the_rows(patch: Patch) -> None:
    def eager(original: Any, config: Any, layer: int, pools: Any, needed: int, most: int, device: Any) -> Any:
        grows = pools is not None and pools[0].shape[2] < needed
        grown = original(config, layer, pools, needed, most, device)
        return tuple(pool.zero_() for pool in grown) if grows else grown

    wrap(patch, reference, "_grown", eager)
    wrap(patch, mlx_pools, "_grown", lambda original, pool, *sizes: original(None, *sizes))


def growth_moves_the_rows(patch: Patch) -> None:
    def eager(original: Any, config: Any, layer: int, pools: Any, needed: int, most: int, device: Any) -> Any:
        grown = original(config, layer, pools, needed, most, device)
        added = grown[0].shape[2] - (0 if pools is None else pools[0].shape[2])
        return tuple(pool.roll(added, dims=2) for pool in grown) if pools is not None else grown

    def mlx(original: Any, pool: Any, heads: int, slots: int, dim: int, dtype: Any) -> Any:
        grown = original(pool, heads, slots, dim, dtype)
        return grown if pool is None else mx.roll(grown, slots - pool.shape[2], axis=2)

    wrap(patch, reference, "_grown", eager)
    wrap(patch, mlx_pools, "_grown", mlx)


def growth_comes_after_the_write(patch: Patch) -> None:
    """What no longer fits is written over the last rows of the old pool."""

    def write(original: Any, self: Any, layer: int, num_slots: int, runs: Sequence[Run], *rest: Any) -> Any:
        pair, length = self._pairs[layer], sum(run.length for run in runs)
        if runs and pair is not None and pair[0].shape[2] < num_slots:
            runs = [Run(max(0, pair[0].shape[2] - length), length)]
        return original(self, layer, num_slots, runs, *rest)

    wrap(patch, mlx_pools.Pools, "write", write)


def pool_is_the_callers_array(patch: Patch) -> None:
    def attend(original: Any, self: Any, plan: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        out = original(self, plan, q, k, v, scale)
        pools = self._pools[plan.layer]
        if k.shape == pools[0].shape and k.dtype is pools[0].dtype:
            self._pools[plan.layer] = (k, v)
        return out

    wrap(patch, EagerSequenceCache, "_attend", attend)
    wrap(patch, EagerBatchCellCache, "_attend", attend)


def clone_shares_its_donors_pool(patch: Patch) -> None:
    def copy(self: EagerSequenceCache, source: EagerSequenceCache, upto: int) -> None:
        self._pools = list(source._pools)

    patch.setattr(EagerSequenceCache, "_copy_prefix", copy)


def clone_copies_nothing(patch: Patch) -> None:
    def copy(original: Any, self: Any, source: Any, upto: int) -> None:
        original(self, source, upto)
        self._pools._pairs = [pair and tuple(mx.zeros_like(pool) for pool in pair) for pair in self._pools._pairs]

    wrap(patch, MLXSequenceCache, "_copy_prefix", copy)


# -- isolation ---------------------------------------------------------------


def freed_cells_are_not_zeroed(patch: Patch) -> None:
    def free(original: Any, self: BatchCellCache, entry: CellSequence, length: int) -> None:
        stale = list(self._stale)
        original(self, entry, length)
        self._stale = stale

    wrap(patch, BatchCellCache, "_free_tokens", free)


def aborted_cells_are_not_zeroed(patch: Patch) -> None:
    def roll_back(original: Any, self: BatchCellCache, step: Any) -> None:
        stale = list(self._stale)
        original(self, step)
        self._stale = stale

    wrap(patch, BatchCellCache, "_roll_back", roll_back)


def reads_round_up_without_a_mask(patch: Patch) -> None:
    """Reading to the end of the pool: what a longer history has left behind is read, too."""

    def read(original: Any, pool: Any, runs: Sequence[Run], num_queries: int) -> Any:
        last = runs[-1]
        return original(pool, [*runs[:-1], Run(last.slot, pool.shape[2] - last.slot)], num_queries)

    wrap(patch, mlx_sequence, "read", read)


def recycled_id_keeps_its_tokens(patch: Patch) -> None:
    ended: list[Any] = []
    patch.setattr(BatchSequenceCache, "_drop", lambda self, entry: ended.append(entry))
    wrap(patch, BatchSequenceCache, "_new", lambda original, self: ended.pop() if ended else original(self))


def recycled_id_keeps_its_cells(patch: Patch) -> None:
    ended: list[CellSequence] = []
    patch.setattr(BatchCellCache, "_drop", lambda self, entry: ended.append(entry))
    wrap(patch, BatchCellCache, "_new", lambda original, self: ended.pop() if ended else original(self))


def cells_are_freed_twice(patch: Patch) -> None:
    def give(original: Any, self: FreeCells, cells: Sequence[int]) -> None:
        original(self, cells)
        original(self, cells)

    wrap(patch, FreeCells, "give", give)


def shared_cells_are_freed_by_the_first_owner(patch: Patch) -> None:
    def free(original: Any, self: BatchCellCache, entry: CellSequence, length: int) -> None:
        for cell in entry.cells[length:]:
            self._owners[cell] = 1
        original(self, entry, length)

    wrap(patch, BatchCellCache, "_free_tokens", free)


def never_written_sequence_cannot_end(patch: Patch) -> None:
    def rm(original: Any, self: BatchCache[Any, Any], seq_id: int) -> bool:
        return bool(self.pos(seq_id)) and original(self, seq_id)

    wrap(patch, BatchCache, "seq_rm", rm)


def ended_sequences_stay_in_memory(patch: Patch) -> None:
    ended: list[Any] = []
    patch.setattr(BatchSequenceCache, "_drop", lambda self, entry: ended.append(entry))


def masks_stay_in_memory(patch: Patch) -> None:
    kept: list[Any] = []

    def once(original: Any, self: Any, *args: Any) -> Any:
        kept.append(mx.array(np.array(original(self, *args))))
        return kept[-1]

    wrap(patch, MLXBatchCellCache, "_once", once)


def negative_ids_count_from_the_end(patch: Patch) -> None:
    def pos(original: Any, self: BatchCache[Any, Any], seq_id: int) -> int | None:
        living = sorted(self._live)
        found: int | None = original(self, living[seq_id] if -len(living) <= seq_id < 0 else seq_id)
        return found

    wrap(patch, BatchCache, "pos", pos)


def one_sequence_too_many(patch: Patch) -> None:
    patch.setattr(BatchCache, "max_seqs", property(lambda self: self._max_seqs - 1))


def ids_are_never_recycled(patch: Patch) -> None:
    def rm(original: Any, self: BatchCache[Any, Any], seq_id: int) -> bool:
        granted: bool = original(self, seq_id)
        self._free_ids.clear()
        return granted

    wrap(patch, BatchCache, "seq_rm", rm)
    patch.setattr(BatchCache, "_invariants", lambda self: {})


def equal_caches_share_their_pools(patch: Patch) -> None:
    pools: dict[Any, Any] = {}

    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        self._pools = pools.setdefault((type(self), config), self._pools)

    for owner in (EagerSequenceCache, EagerBatchCellCache, MLXSequenceCache, MLXBatchCellCache):
        wrap(patch, owner, "__init__", init)


def threads_share_the_active_session(patch: Patch) -> None:
    patch.setattr(session, "active_key", lambda: next(reversed(session._installed), None))


# -- step boundaries ---------------------------------------------------------


def declaration_is_reused(patch: Patch) -> None:
    def begin(original: Any, self: BatchCache[Any, Any]) -> None:
        declared = self._declared
        original(self)
        self._declared = declared

    wrap(patch, BatchCache, "begin_step", begin)


def verbs_leave_the_declaration(patch: Patch) -> None:
    def verb(original: Any, self: BatchCache[Any, Any], *args: Any) -> Any:
        declared = self._declared
        answer = original(self, *args)
        self._declared = declared
        return answer

    for name in ("seq_clone", "rewind"):
        wrap(patch, BatchCache, name, verb)


def ended_sequence_stays_declared(patch: Patch) -> None:
    def rm(original: Any, self: BatchCache[Any, Any], seq_id: int) -> bool:
        declared = self._declared
        granted: bool = original(self, seq_id)
        self._declared = declared
        return granted

    wrap(patch, BatchCache, "seq_rm", rm)


def layer_called_twice_advances_twice(patch: Patch) -> None:
    def commit(original: Any, self: SequenceCache, plan: Any) -> None:
        assert self._step is not None
        again = plan.layer in self._step.written
        original(self, plan)
        self.__dict__["extra"] = plan.num_tokens if again else 0

    def advance(original: Any, self: SequenceCache, step: Any) -> None:
        original(self, step)
        self._position += self.__dict__.get("extra", 0)

    wrap(patch, SequenceCache, "_commit", commit)
    wrap(patch, SequenceCache, "_advance", advance)


def layer_called_twice_takes_cells_twice(patch: Patch) -> None:
    def commit(original: Any, self: BatchCellCache, plan: Any) -> None:
        assert self._step is not None
        if plan.layer in self._step.written:
            self._placement = self._draft = None
        original(self, plan)

    wrap(patch, BatchCellCache, "_commit", commit)


def verbs_are_allowed_inside_a_step(patch: Patch) -> None:
    patch.setattr(CacheLayout, "_check_outside_step", lambda self, verb: None)


def positions_are_not_checked(patch: Patch) -> None:
    patch.setattr(SequenceCache, "_check_step", lambda self, positions: None)
    patch.setattr(BatchCellCache, "_check_step", BatchCache._check_step)


def only_the_first_position_is_checked(patch: Patch) -> None:
    def check(original: Any, self: BatchCellCache, positions: tuple[int, ...]) -> None:
        original(self, tuple(range(positions[0], positions[0] + len(positions))))

    wrap(patch, BatchCellCache, "_check_step", check)


def token_count_is_not_checked(patch: Patch) -> None:
    def check(self: BatchCache[Any, Any], positions: tuple[int, ...]) -> None:
        if not self._spans:
            raise layout.StepError("the step was not declared")

    patch.setattr(BatchCache, "_check_step", check)


def steps_of_no_tokens_are_taken(patch: Patch) -> None:
    def ask(original: Any, self: BatchCache[Any, Any], ids: Sequence[int]) -> bool:
        return not ids or original(self, ids)

    wrap(patch, BatchCache, "can_step", ask)
    wrap(patch, layout, "host_positions", lambda original, given: () if len(given) == 0 else original(given))


def long_steps_are_taken(patch: Patch) -> None:
    def check(original: Any, self: SequenceCache, positions: tuple[int, ...]) -> None:
        limit, self._max_step = self._max_step, None
        try:
            original(self, positions)
        finally:
            self._max_step = limit

    def ask(self: BatchCache[Any, Any], ids: Sequence[int]) -> bool:
        return len(ids) <= self.free and all(seq_id in self._live for seq_id in ids)

    wrap(patch, SequenceCache, "_check_step", check)
    patch.setattr(BatchCache, "can_step", ask)


def full_cache_drops_tokens_quietly(patch: Patch) -> None:
    def attend(original: Any, self: Any, *args: Any) -> Any:
        try:
            return original(self, *args)
        except CacheFullError:
            return args[-2]

    wrap(patch, CacheLayout, "attend", attend)


def full_cache_admits_more(patch: Patch) -> None:
    wrap(patch, BatchCache, "can_step", lambda original, self, ids: not self.free or original(self, ids))


def forks_count_in_full_in_cells(patch: Patch) -> None:
    def free(self: BatchCellCache) -> int:
        return self.capacity - sum(len(entry.cells) for entry in self._live.values())

    patch.setattr(BatchCellCache, "free", property(free))


def zero_is_taken_for_a_size(patch: Patch) -> None:
    wrap(patch, config, "_require_int", lambda original, field, value, least: original(field, value, 0))


def window_of_one_sees_two(patch: Patch) -> None:
    def first_visible(self: RingPolicy, position: int) -> int:
        return max(0, position + 1 - max(2, self.window))

    patch.setattr(RingPolicy, "first_visible", first_visible)


# -- arguments ---------------------------------------------------------------


def q_is_scaled_in_place(patch: Patch) -> None:
    def attend(original: Any, self: Any, plan: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        return original(self, plan, q.mul_(scale), k, v, 1.0)

    wrap(patch, EagerSequenceCache, "_attend", attend)
    wrap(patch, EagerBatchCellCache, "_attend", attend)


def views_are_read_as_if_contiguous(patch: Patch) -> None:
    def write(original: Any, pools: Any, runs: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        original(
            pools, runs, *(part.transpose(1, 2).reshape(part.shape) if _swapped(part) else part for part in (k, v))
        )

    wrap(patch, reference, "_write", write)


def _swapped(array: torch.Tensor) -> bool:
    return not array.is_contiguous()


def out_has_the_storage_dtype(patch: Patch) -> None:
    def attend(original: Any, self: Any, plan: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        return original(self, plan, q, k, v, scale).astype(self._pools._dtype)

    wrap(patch, MLXSequenceCache, "_attend", attend)
    wrap(patch, MLXBatchCellCache, "_attend", attend)


def columns_of_positions_are_refused(patch: Patch) -> None:
    def host(original: Any, given: Any) -> Any:
        if getattr(given, "ndim", 1) != 1:
            raise ValueError("positions: expected [n]")
        return original(given)

    wrap(patch, layout, "host_positions", host)


WRONG_ANSWER = "Not equal to tolerance"
WRONG_VERDICT = r"answered (True|False|None|\d+)"
NOT_REFUSED = "DID NOT RAISE"
BROKEN = "cache integrity: "
DISAGREES = r"AssertionError: ( |$)"
EAGER, MLX = ("eager",), ("MLXBackend",)
BOTH = (*EAGER, *MLX)
SEQ, CELL, PRIVATE = "sequence", "batched-cell", "batched-sequence"
GATHERED, MASKED = OTHER_CELLS["eager"], OTHER_CELLS["MLXBackend"]  # on that backend only


class Mutant(NamedTuple):
    """A fault, where it must be noticed, and by what."""

    plant: Callable[[Patch], None]
    rows: tuple[int, ...]
    kinds: tuple[str, ...]
    backends: tuple[str, ...]
    match: str


MUTANTS = [
    # retention
    Mutant(ring_retains_everything, (1,), (PRIVATE,), EAGER, WRONG_VERDICT),
    Mutant(ring_retains_everything, (2,), (SEQ, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(ring_retains_its_window_only, (2,), (SEQ, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(window_of_one_refuses_a_rewind, (2,), (SEQ,), EAGER, WRONG_VERDICT),
    Mutant(clone_forgets_its_donors_floor, (1,), (PRIVATE,), BOTH, WRONG_VERDICT),
    Mutant(rewind_lowers_the_floor, (2,), (SEQ, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(abort_lowers_the_floor, (2,), (SEQ, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(rewind_past_the_end_is_granted, (10,), (SEQ, CELL, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(rewind_to_the_end_cancels_the_declaration, (10,), (CELL, PRIVATE), EAGER, "not declared"),
    Mutant(negative_rewind_is_refused_quietly, (10,), (SEQ,), EAGER, NOT_REFUSED),
    # atomicity
    Mutant(declare_destroys_the_earlier_declaration, (3,), (CELL, PRIVATE), BOTH, "not declared"),
    Mutant(refused_verbs_cancel_the_declaration, (3,), (CELL, PRIVATE), EAGER, "not declared"),
    Mutant(clone_ignores_upto, (4,), (CELL, PRIVATE), EAGER, DISAGREES),
    Mutant(clone_keeps_the_cells_past_upto, (4,), (CELL,), EAGER, BROKEN),
    Mutant(abort_advances, (25,), (SEQ, CELL, PRIVATE), EAGER, DISAGREES),
    Mutant(abort_keeps_its_cells, (25,), (CELL,), EAGER, BROKEN),
    Mutant(abort_keeps_its_rows, (25,), (SEQ, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(abort_ends_the_sequences_steps_only_when_committed, (25,), (PRIVATE,), EAGER, DISAGREES),
    # masks
    Mutant(window_off_by_one, (5, 6, 8), (SEQ, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(window_off_by_one, (5, 6, 8), (CELL, MASKED), MLX, WRONG_ANSWER),
    Mutant(window_of_masked_cells_off_by_one, (5, 6, 8, 11), (CELL,), EAGER, WRONG_ANSWER),
    Mutant(window_of_masked_cells_off_by_one, (5, 6, 8, 11), (MASKED,), MLX, WRONG_ANSWER),
    Mutant(window_of_masked_cells_off_by_one, (5, 6, 11), (GATHERED,), EAGER, WRONG_ANSWER),
    Mutant(window_of_masked_cells_off_by_one, (5, 6, 11), (CELL,), MLX, WRONG_ANSWER),
    Mutant(ring_one_slot_short, (5, 7), (SEQ, PRIVATE), MLX, WRONG_ANSWER),
    Mutant(ring_of_the_initial_capacity, (8,), (SEQ, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(cells_window_starts_with_the_initial_capacity, (8,), (CELL, GATHERED), EAGER, WRONG_ANSWER),
    Mutant(cells_window_starts_with_the_initial_capacity, (8,), (CELL, MASKED), MLX, WRONG_ANSWER),
    Mutant(causal_upper_left, (20,), (SEQ, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(causal_upper_left_in_cells, (20,), (CELL, GATHERED), EAGER, WRONG_ANSWER),
    Mutant(fork_sees_its_donors_later_tokens, (4,), (CELL,), EAGER, WRONG_ANSWER),
    Mutant(fork_sees_its_donors_later_tokens, (4,), (MASKED,), MLX, WRONG_ANSWER),
    Mutant(neighbours_cells_are_visible, (11, 12), (CELL,), EAGER, WRONG_ANSWER),
    Mutant(neighbours_cells_are_visible, (11, 12), (MASKED,), MLX, WRONG_ANSWER),
    Mutant(masks_are_reused_between_steps, (11,), (CELL, MASKED), MLX, WRONG_ANSWER),
    Mutant(gathers_one_token_too_few, (4, 6, 8, 11, 12), (GATHERED,), EAGER, WRONG_ANSWER),
    Mutant(gathers_one_token_too_few, (4, 6, 8, 11, 12), (CELL,), MLX, WRONG_ANSWER),
    Mutant(gathers_a_neighbours_cell, (4, 11, 12, 13), (CELL,), MLX, WRONG_ANSWER),
    Mutant(kv_heads_interleaved, (13,), (SEQ, CELL, PRIVATE), EAGER, WRONG_ANSWER),
    Mutant(kv_heads_interleaved_on_mlx, (13,), (SEQ, CELL, PRIVATE), MLX, WRONG_ANSWER),
    Mutant(outputs_in_order_of_sequences, (12,), (CELL, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(outputs_in_order_of_sequences, (12,), (GATHERED,), EAGER, WRONG_ANSWER),
    Mutant(outputs_in_order_of_sequences, (12,), (MASKED,), MLX, WRONG_ANSWER),
    # growth
    Mutant(growth_loses_the_rows, (21,), (SEQ, CELL, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(growth_moves_the_rows, (21,), (SEQ, CELL, PRIVATE), BOTH, WRONG_ANSWER),
    Mutant(growth_comes_after_the_write, (21,), (SEQ, CELL, PRIVATE), MLX, WRONG_ANSWER),
    Mutant(pool_is_the_callers_array, (21,), (SEQ, CELL, PRIVATE), EAGER, "Arrays are not equal"),
    Mutant(clone_shares_its_donors_pool, (4,), (PRIVATE,), EAGER, WRONG_ANSWER),
    Mutant(clone_copies_nothing, (1, 4), (PRIVATE,), MLX, WRONG_ANSWER),
    # isolation
    Mutant(freed_cells_are_not_zeroed, (19,), (CELL,), EAGER, WRONG_ANSWER),
    Mutant(freed_cells_are_not_zeroed, (19,), (MASKED,), MLX, WRONG_ANSWER),
    Mutant(aborted_cells_are_not_zeroed, (19,), (CELL,), EAGER, WRONG_ANSWER),
    Mutant(aborted_cells_are_not_zeroed, (19,), (MASKED,), MLX, WRONG_ANSWER),
    Mutant(reads_round_up_without_a_mask, (19,), (SEQ, PRIVATE), MLX, WRONG_ANSWER),
    Mutant(recycled_id_keeps_its_tokens, (16,), (PRIVATE,), EAGER, DISAGREES),
    Mutant(recycled_id_keeps_its_cells, (16,), (CELL,), EAGER, BROKEN),
    Mutant(cells_are_freed_twice, (15, 26), (CELL,), EAGER, f"{BROKEN}|free tokens are not constant"),
    Mutant(shared_cells_are_freed_by_the_first_owner, (4, 18), (CELL,), EAGER, BROKEN),
    Mutant(never_written_sequence_cannot_end, (12,), (CELL, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(ended_sequences_stay_in_memory, (26,), (PRIVATE,), MLX, "active memory is not constant"),
    Mutant(masks_stay_in_memory, (26,), (CELL, MASKED), MLX, "active memory is not constant"),
    Mutant(negative_ids_count_from_the_end, (16,), (CELL, PRIVATE), EAGER, DISAGREES),
    Mutant(one_sequence_too_many, (16,), (CELL, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(ids_are_never_recycled, (16,), (CELL, PRIVATE), EAGER, DISAGREES),
    Mutant(equal_caches_share_their_pools, (23,), (SEQ, CELL), BOTH, WRONG_ANSWER),
    Mutant(threads_share_the_active_session, (23,), (SEQ, CELL, PRIVATE), EAGER, "session"),
    # step boundaries
    Mutant(declaration_is_reused, (15,), (CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(verbs_leave_the_declaration, (15,), (CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(ended_sequence_stays_declared, (15,), (CELL, PRIVATE), EAGER, BROKEN),
    Mutant(layer_called_twice_advances_twice, (14,), (SEQ, PRIVATE), EAGER, DISAGREES),
    Mutant(layer_called_twice_takes_cells_twice, (14,), (CELL,), EAGER, BROKEN),
    Mutant(verbs_are_allowed_inside_a_step, (15,), (SEQ, CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(positions_are_not_checked, (17,), (SEQ, PRIVATE), EAGER, "an earlier step left this layer out"),
    Mutant(positions_are_not_checked, (17,), (CELL,), EAGER, NOT_REFUSED),
    Mutant(only_the_first_position_is_checked, (17,), (CELL,), EAGER, NOT_REFUSED),
    Mutant(token_count_is_not_checked, (15,), (CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(steps_of_no_tokens_are_taken, (27,), (CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(long_steps_are_taken, (7,), (SEQ,), MLX, NOT_REFUSED),
    Mutant(long_steps_are_taken, (7,), (PRIVATE,), EAGER, WRONG_VERDICT),
    Mutant(full_cache_drops_tokens_quietly, (18,), (SEQ,), BOTH, NOT_REFUSED),
    Mutant(full_cache_admits_more, (18,), (CELL, PRIVATE), EAGER, WRONG_VERDICT),
    Mutant(forks_count_in_full_in_cells, (18,), (CELL,), EAGER, DISAGREES),
    Mutant(zero_is_taken_for_a_size, (9,), (SEQ, CELL, PRIVATE), EAGER, NOT_REFUSED),
    Mutant(window_of_one_sees_two, (9,), (SEQ, PRIVATE), EAGER, WRONG_ANSWER),
    # arguments
    Mutant(q_is_scaled_in_place, (22,), (SEQ, CELL, PRIVATE), EAGER, "Arrays are not equal"),
    Mutant(views_are_read_as_if_contiguous, (22,), (SEQ, CELL, PRIVATE), EAGER, WRONG_ANSWER),
    Mutant(out_has_the_storage_dtype, (24,), (SEQ, CELL, PRIVATE), MLX, "out has another dtype"),
    Mutant(columns_of_positions_are_refused, (24,), (SEQ, CELL, PRIVATE), BOTH, r"expected \[n\]"),
]


@pytest.mark.parametrize(
    ("plant", "row", "kind", "backend", "match"),
    [
        pytest.param(plant, row, kind, backend, match, id=f"{plant.__name__}-{row:02}-{kind}-{backend}")
        for plant, rows, kinds, backends, match in MUTANTS
        for row in rows
        for kind in kinds
        for backend in backends
    ],
)
def test_public_case_notices_the_mutant(
    plant: Callable[[Patch], None], row: int, kind: str, backend: str, match: str, monkeypatch: Patch
) -> None:
    """Only a failed comparison, a missing refusal or a wrong one count; a mutant that crashes does not."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, CacheError, ValueError, pytest.fail.Exception)) as caught:
        CASES[row].check(backend, kind)
    reason = f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(match, reason), reason


def test_every_public_case_notices_some_mutant() -> None:
    assert {row for mutant in MUTANTS for row in mutant.rows} == set(CASES)
