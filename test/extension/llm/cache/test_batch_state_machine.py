"""Random legal and illegal operations on the batched layouts, judged by the naive oracles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from executorch_mlx.extension.llm.cache import (
    BatchCache,
    BatchCellCache,
    BatchPagedCache,
    CacheConfig,
    SequenceCache,
    StepError,
)
from executorch_mlx.extension.llm.cache.reference import EagerBatchPagedCache
from oracles.batch_pair import KINDS, SMALL_PAGES, BatchPair
from oracles.cache_strategies import DTYPES, MUTANT_SEARCH, cache_configs
from oracles.sequence_pair import InjectedError

# Any order, and any layer may be asked again: taken modulo the number of layers by the rules.
layer_orders = st.permutations(range(3))
repeats = st.lists(st.integers(0, 2), max_size=2)
# Sequences by rank among the living; a few ids live nowhere.
sequences = st.integers(0, 5)
strangers = st.sampled_from([-1, 62, 63, 64, 1 << 40])
# A step as spans: which sequence, and how many tokens.
steps = st.lists(st.tuples(sequences, st.integers(1, 5)), min_size=1, max_size=5)
few = st.integers(0, 9)


class BatchMachine(RuleBasedStateMachine):
    """One cache and its oracle."""

    backend: ClassVar[str]
    kind: ClassVar[str]
    pair: BatchPair

    @initialize(
        config=cache_configs(40, st.none() | st.integers(1, 6)),
        group=st.integers(1, 3),
        q_dtype=st.sampled_from(("float32", *DTYPES)),
        seed=st.integers(0, 3),
        first=st.integers(1, 3),
    )
    def build(self, config: CacheConfig, group: int, q_dtype: str, seed: int, first: int) -> None:
        self.pair = BatchPair(self.backend, self.kind, config, group=group, q_dtype=q_dtype, seed=seed)
        for _ in range(first):
            self.pair.new()

    def alive(self) -> bool:
        return bool(self.pair.oracle.lengths)

    def some(self, rank: int) -> int:
        """Return a living sequence."""
        living = sorted(self.pair.oracle.lengths)
        return living[rank % len(living)]

    def ids(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return a step as one id per token."""
        return [self.some(rank) for rank, length in spans for _ in range(length)]

    def admitted(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return as many tokens of a step as are legal, perhaps none."""
        ids: list[int] = []
        for seq_id in self.ids(spans):
            if self.pair.oracle.admits([*ids, seq_id]):
                ids.append(seq_id)
        return ids

    def calls(self, order: Sequence[int], again: Sequence[int] = ()) -> list[int]:
        count = len(self.pair.layers)
        return [layer for layer in order if layer < count] + [layer % count for layer in again]

    def begun(self, ids: list[int]) -> list[int]:
        """Declare a step that is about to begin, and return its positions."""
        assert self.pair.declare(ids)
        self.pair.oracle.declared = None
        return self.pair.oracle.positions(ids)

    # -- verbs -------------------------------------------------------------

    @rule()
    def new(self) -> None:
        self.pair.new()

    @precondition(alive)
    @rule(rank=sequences, back=st.none() | st.integers(-2, 9))
    def clone(self, rank: int, back: int | None) -> None:
        src = self.some(rank)
        upto = None if back is None else self.pair.oracle.lengths[src] - back
        if upto is not None and upto < 0:
            with pytest.raises(ValueError, match="seq_clone"):
                self.pair.cache.seq_clone(src, upto)
        else:
            self.pair.clone(src, upto)

    @precondition(alive)
    @rule(rank=sequences, steps_back=st.lists(st.integers(0, 2), min_size=2, max_size=4))
    def clone_a_clone(self, rank: int, steps_back: list[int]) -> None:
        src: int | None = self.some(rank)
        for back in steps_back:
            assert src is not None
            src = self.pair.clone(src, max(0, self.pair.oracle.lengths[src] - back))
            if src is None:
                return

    @precondition(alive)
    @rule(rank=sequences)
    def rm(self, rank: int) -> None:
        self.pair.rm(self.some(rank))

    @precondition(alive)
    @rule(rank=sequences, back=st.integers(-2, 9))
    def rewind(self, rank: int, back: int) -> None:
        seq_id = self.some(rank)
        position = self.pair.oracle.lengths[seq_id] - back
        if position < 0:
            with pytest.raises(ValueError, match="rewind"):
                self.pair.cache.rewind(seq_id, position)
        else:
            self.pair.rewind(seq_id, position)

    @rule(stranger=strangers, rank=sequences)
    def verbs_of_a_stranger(self, stranger: int, rank: int) -> None:
        cache = self.pair.cache
        if stranger in self.pair.oracle.lengths:
            return
        assert cache.pos(stranger) is None
        assert cache.seq_rm(stranger) is False
        assert cache.seq_clone(stranger) is None
        assert cache.seq_clone(stranger, 0) is None
        assert cache.rewind(stranger, 0) is False
        known = [self.some(rank)] if self.alive() else []
        assert not self.pair.declare([*known, stranger])

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()

    # -- steps -------------------------------------------------------------

    @precondition(alive)
    @rule(
        spans=steps,
        order=layer_orders,
        again=repeats,
        position_dtype=st.sampled_from(["int32", "int64"]),
        column=st.booleans(),
    )
    def step(
        self, spans: list[tuple[int, int]], order: list[int], again: list[int], position_dtype: str, column: bool
    ) -> None:
        pair, ids = self.pair, self.ids(spans)
        if pair.declare(ids):
            calls = self.calls(order, again)
            pair.step(ids, calls=calls, declared=True, position_dtype=position_dtype, column=column)

    @precondition(alive)
    @rule(spans=steps, times=st.integers(1, 8))
    def decode(self, spans: list[tuple[int, int]], times: int) -> None:
        for _ in range(times):
            ids = self.admitted([(rank, 1) for rank, _ in spans])
            if ids:
                self.pair.step(ids)

    @precondition(alive)
    @rule(spans=steps, gaps=st.lists(st.integers(0, 3), min_size=25, max_size=25))
    def step_with_gaps(self, spans: list[tuple[int, int]], gaps: list[int]) -> None:
        """Positions need not be consecutive in cells; private histories refuse them."""
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        due = dict(pair.oracle.lengths)
        at = []
        for seq_id, gap in zip(ids, gaps, strict=False):
            at.append(due[seq_id] + gap)
            due[seq_id] = at[-1] + 1
        if "cell" in pair.kind or at == pair.oracle.positions(ids):
            pair.step(ids, at=at)
        else:
            self.refused(ids, at, ValueError, r"sequence \d+: position")

    @precondition(alive)
    @rule(spans=steps, by=st.integers(1, 3), which=few)
    def step_backwards(self, spans: list[tuple[int, int]], by: int, which: int) -> None:
        ids = self.admitted(spans)
        if ids:
            at = self.pair.oracle.positions(ids)
            at[which % len(ids)] -= by
            self.refused(ids, at, ValueError, "position")

    def refused(self, ids: list[int], at: list[int], error: type[Exception], match: str) -> None:
        """Declare a step and see its forward refused; nothing has changed but that the declaration is used up."""
        pair = self.pair
        assert pair.declare(ids)
        pair.oracle.declared = None
        with pytest.raises(error, match=match), pair.cache.step():
            pair.attend(0, pair.rows(0, len(at), poisoned=True), at)

    @precondition(alive)
    @rule(spans=steps, later=steps, rank=sequences)
    def declare(self, spans: list[tuple[int, int]], later: list[tuple[int, int]], rank: int) -> None:
        """A refused declaration leaves the one before; an accepted one replaces it."""
        self.pair.declare(self.ids(spans))
        self.pair.declare(self.ids(later))
        self.pair.declare([*self.ids(spans), 1 << 40])

    @precondition(alive)
    @rule(spans=steps, rank=sequences, back=st.integers(0, 3), verb=few)
    def declare_then_a_verb_then_forward(self, spans: list[tuple[int, int]], rank: int, back: int, verb: int) -> None:
        pair, seq_id = self.pair, self.some(rank)
        pair.declare(self.ids(spans))
        upto = max(0, pair.oracle.lengths[seq_id] - back)
        verbs = [lambda: pair.rewind(seq_id, upto), lambda: pair.clone(seq_id, upto), lambda: pair.rm(seq_id), pair.new]
        verbs[verb % len(verbs)]()
        self.forward_what_was_declared()

    @rule()
    def forward_what_was_declared(self) -> None:
        """Whatever happened since: a step runs if and only if its declaration still stands."""
        pair = self.pair
        if pair.oracle.declared is not None:
            pair.step(pair.oracle.declared, declared=True)
            return
        with pytest.raises(StepError, match="not declared"), pair.cache.step():
            pair.attend(0, pair.rows(0, 1, poisoned=True), [0])

    @precondition(alive)
    @rule(spans=steps, extra=st.sampled_from([-1, 1, 3]))
    def forward_of_another_size(self, spans: list[tuple[int, int]], extra: int) -> None:
        ids = self.admitted(spans)
        if ids and len(ids) + extra > 0:
            at = self.pair.oracle.positions(ids)
            self.refused(ids, [*at, *range(at[-1] + 1, at[-1] + 4)][: len(ids) + extra], StepError, "declared with")

    @precondition(alive)
    @rule(spans=steps, order=layer_orders, again=repeats, after=st.integers(0, 5), back=few, verb=few)
    def fail_after_some_layers(
        self, spans: list[tuple[int, int]], order: list[int], again: list[int], after: int, back: int, verb: int
    ) -> None:
        """What a failed step overwrote is gone, which a verb just after it must know."""
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        pair.poison(ids, self.calls(order, again)[:after])
        upto = max(0, pair.oracle.lengths[ids[0]] - back % 4)
        (pair.rewind, pair.clone)[verb % 2](ids[0], upto)

    @precondition(alive)
    @rule(spans=steps, times=st.integers(1, 2))
    def fail_and_run_again(self, spans: list[tuple[int, int]], times: int) -> None:
        ids = self.admitted(spans)
        if ids:
            for _ in range(times):
                self.pair.poison(ids, self.pair.layers)
            self.pair.step(ids)

    @precondition(alive)
    @rule(spans=steps, by_rm=st.booleans())
    def commit_poison_then_forget_it(self, spans: list[tuple[int, int]], by_rm: bool) -> None:
        """NaN of a live sequence may reach it, and in cells its neighbours; once forgotten it may reach nobody."""
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        before = pair.oracle.lengths
        pair.commit_poison(ids)
        for seq_id in set(ids):
            if by_rm:
                pair.rm(seq_id)
            else:
                assert pair.rewind(seq_id, before[seq_id]), "a step may always be taken back"

    @precondition(alive)
    @rule(spans=steps, verb=few, rank=sequences)
    def verb_inside_a_step(self, spans: list[tuple[int, int]], verb: int, rank: int) -> None:
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        seq_id = self.some(rank)
        verbs = [
            lambda: pair.cache.seq_new(),
            lambda: pair.cache.seq_clone(seq_id),
            lambda: pair.cache.seq_clone(1 << 40),
            lambda: pair.cache.seq_rm(seq_id),
            lambda: pair.cache.rewind(seq_id, 0),
            lambda: pair.cache.declare_step([seq_id]),
            lambda: pair.cache.clear(),
            lambda: pair.cache.step().__enter__(),
        ]
        at = self.begun(ids)
        with pair.cache.step():
            for layer in pair.layers:
                with pytest.raises(StepError, match="step"):
                    verbs[verb % len(verbs)]()
                pair.attend_both(layer, ids, pair.rows(layer, len(ids)), at)
                pair.cache.check_integrity()
        pair.oracle.commit(ids, at)

    @precondition(alive)
    @rule(spans=steps, layer=st.integers(0, 2), tensor=st.integers(0, 2))
    def wrong_shape_refused_and_the_step_goes_on(self, spans: list[tuple[int, int]], layer: int, tensor: int) -> None:
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        at = self.begun(ids)
        with pair.cache.step():
            for current in pair.layers:
                rows = pair.rows(current, len(ids))
                if current == layer % len(pair.layers):
                    wrong = list(rows)
                    wrong[tensor] = wrong[tensor][..., :-1]
                    with pytest.raises(ValueError, match=f"layer {current}: [qkv] has shape"):
                        pair.attend(current, tuple(wrong), at)
                pair.attend_both(current, ids, rows, at)
        pair.oracle.commit(ids, at)

    @precondition(alive)
    @rule(spans=steps, layer=st.integers(0, 2), shift=st.sampled_from([-1, 1]))
    def fail_by_other_positions_on_a_later_layer(self, spans: list[tuple[int, int]], layer: int, shift: int) -> None:
        pair, ids = self.pair, self.admitted(spans)
        if not ids:
            return
        at = self.begun(ids)
        rows, layer = pair.rows(0, len(ids), poisoned=True), layer % len(pair.layers)
        others = pair.rows(layer, len(ids), poisoned=True)
        with suppress(InjectedError), pair.cache.step():
            pair.attend(0, rows, at)
            pair.oracle.attend(0, ids, at, *rows, pair.scale(0))
            with pytest.raises(StepError, match="differ"):
                pair.attend(layer, others, [*at[:-1], at[-1] + shift])
            raise InjectedError
        pair.oracle.abort(ids)

    @precondition(alive)
    @rule(layer=st.integers(0, 2))
    def attend_outside_a_step(self, layer: int) -> None:
        layer %= len(self.pair.layers)
        with pytest.raises(StepError, match="outside a step"):
            self.pair.attend(layer, self.pair.rows(layer, 1, poisoned=True), [0])

    @rule()
    def step_of_nobody(self) -> None:
        for ask in (self.pair.cache.can_step, self.pair.cache.declare_step):
            with pytest.raises(ValueError, match="got none"):
                ask([])

    @rule(fail=st.booleans())
    def leave_an_empty_step(self, fail: bool) -> None:
        """It uses a declaration up."""
        self.pair.oracle.declared = None
        with suppress(InjectedError), self.pair.cache.step():
            if fail:
                raise InjectedError

    @invariant()
    def cache_and_oracle_agree(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


def machine_for(backend: str, kind: str) -> type[BatchMachine]:
    return type(f"{kind}On{backend}", (BatchMachine,), {"backend": backend, "kind": kind})


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for backend, kinds in KINDS.items() for kind in kinds],
)
def test_batch_under_random_operations_equals_naive_oracle(backend: str, kind: str) -> None:
    # Backends share the core, which eager kinds search for faults: half as many examples look at the other's bytes.
    share = 1 if backend == "eager" else 2
    run_state_machine_as_test(
        machine_for(backend, kind), settings=settings(max_examples=settings().max_examples // share)
    )


# -- tests of the test: each fault must be found -----------------------------------------------------------


def _declaration_lost_by_a_refused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchCache.declare_step

    def declare(self: BatchCache, seq_ids: Sequence[int]) -> bool:
        self._declared = ()
        return original(self, seq_ids)

    monkeypatch.setattr(BatchCache, "declare_step", declare)


def _declaration_that_outlives_a_rewind(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchCache.rewind

    def rewind(self: BatchCache, seq_id: int, position: int) -> bool:
        declared = self._declared
        granted = original(self, seq_id, position)
        self._declared = declared
        return granted

    monkeypatch.setattr(BatchCache, "rewind", rewind)


def _fork_without_its_donors_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceCache.fork

    def fork(self: SequenceCache, upto: int) -> SequenceCache | None:
        copy = original(self, upto)
        if copy is not None:
            copy._high = list(copy._filled)
        return copy

    monkeypatch.setattr(SequenceCache, "fork", fork)


def _freed_cells_that_are_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchCellCache, "_mark_stale", lambda self, cells: None)


def _fork_that_does_not_count_as_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchCellCache, "_fork", lambda self, source, upto: source.prefix(upto))
    monkeypatch.setattr(BatchCellCache, "check_integrity", lambda self: None)


def _shared_page_that_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBatchPagedCache, "_copy_pages", lambda self, window, copies, num_pages: None)


def _fork_that_does_not_hold_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchPagedCache._fork

    def fork(self: BatchPagedCache, source: Any, upto: int) -> Any:
        owners = {window: dict(pages.owners) for window, pages in self._pages.items()}
        copy = original(self, source, upto)
        for window, pages in self._pages.items():
            pages.owners = owners[window]
        return copy

    monkeypatch.setattr(BatchPagedCache, "_fork", fork)
    monkeypatch.setattr(BatchPagedCache, "check_integrity", lambda self: None)


@pytest.mark.parametrize(
    ("kind", "mutate"),
    [
        ("batched-cell", _declaration_lost_by_a_refused_one),
        ("batched-sequence", _declaration_that_outlives_a_rewind),
        ("batched-sequence", _fork_without_its_donors_floor),
        ("batched-cell", _freed_cells_that_are_not_zeroed),
        ("batched-cell", _fork_that_does_not_count_as_an_owner),
        (SMALL_PAGES, _shared_page_that_is_not_copied),
        (SMALL_PAGES, _fork_that_does_not_hold_its_pages),
    ],
)
def test_batch_state_machine_with_a_mutant_fails(kind: str, mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, StepError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(machine_for("eager", kind), settings=MUTANT_SEARCH)
