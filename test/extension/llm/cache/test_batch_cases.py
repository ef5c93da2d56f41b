"""Single cases of the batched layouts: ids, layers left out, lost bytes, steps that fail in odd places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from executorch_mlx.extension.llm.cache import CacheConfig, CacheLostError, LayerConfig, StepError, build
from executorch_mlx.extension.llm.cache.batch import LEAST_MAX_SEQS
from executorch_mlx.extension.llm.cache.cells import CellSequence
from oracles.batch_pair import SMALL_PAGES, BatchPair
from oracles.sequence_pair import InjectedError

BACKENDS = ("eager", "MLXBackend")
KINDS = ("batched-cell", "batched-sequence", SMALL_PAGES)

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("backend", BACKENDS)]


def pair_of(backend: str, kind: str, *windows: int | None, capacity: int = 64, num_seqs: int = 2) -> BatchPair:
    """Return a cache with a layer per window and sequences 0, 1, ..., beside its oracle."""
    layers = [LayerConfig(n_kv_heads=1, head_dim=4, window=window) for window in windows or (None,)]
    pair = BatchPair(backend, kind, CacheConfig(capacity, layers, "float32", max_write=4))
    assert [pair.new() for _ in range(num_seqs)] == list(range(num_seqs))
    return pair


def run_and(pair: BatchPair, ids: list[int], calls: Sequence[int], then: Callable[[], None]) -> None:
    """Run a declared step on the cache alone, and something else at its end."""
    at = pair.oracle.positions(ids)
    with pair.cache.step():
        for layer in calls:
            pair.attend(layer, pair.rows(layer, len(ids), poisoned=True), at)
        then()


# -- ids ---------------------------------------------------------------------------------------------


def test_ids_are_recycled_lowest_first_as_plain_integers(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind, num_seqs=5)
    for seq_id in (np.int64(3), torch.tensor(1), 4):
        assert pair.cache.seq_rm(seq_id)
        pair.oracle.rm(int(seq_id))
    new = [pair.new() for _ in range(4)]
    assert new == [1, 3, 4, 5]
    assert {type(seq_id) for seq_id in new} == {int}


@pytest.mark.parametrize("stranger", [-1, 2, 63, 64, 1 << 70, 1.0, "0", None, (0,)])
def test_verbs_of_what_is_no_living_id_answer_false_or_none(backend: str, kind: str, stranger: Any) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 1])
    cache = pair.cache
    assert cache.seq_rm(stranger) is False
    assert cache.rewind(stranger, 0) is False
    assert cache.rewind(stranger, -1) is False
    assert cache.seq_clone(stranger) is None
    assert cache.pos(stranger) is None
    assert cache.can_step([0, stranger]) is False
    assert cache.declare_step([stranger]) is False
    pair.check()


def test_number_of_sequences_is_bounded_by_the_configuration_only(backend: str, kind: str) -> None:
    layers = [LayerConfig(n_kv_heads=1, head_dim=4)]
    bounds = {
        CacheConfig(8, layers, "float32"): LEAST_MAX_SEQS,
        CacheConfig(5000, layers, "float32"): 5000,
        CacheConfig(5000, layers, "float32", max_seqs=70): 70,
    }
    for config, most in bounds.items():
        cache = build(backend, kind, config)
        assert cache.max_seqs == most
        assert [cache.seq_new() for _ in range(most)] == list(range(most))
        assert cache.seq_new() is None
        assert cache.seq_clone(0) is None
        cache.check_integrity()


@pytest.mark.parametrize("position", [1.5, "1", None])
def test_verbs_with_positions_that_are_no_integers_raise(backend: str, kind: str, position: Any) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 0, 0])
    with pytest.raises(TypeError):
        pair.cache.rewind(0, position)
    if position is not None:
        with pytest.raises(TypeError):
            pair.cache.seq_clone(0, position)
    pair.check()


# -- layers left out ----------------------------------------------------------------------------------


def test_layer_that_a_step_left_out_is_refused_until_rewound(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind, None, 3)
    pair.steps([0, 0, 1], [1, 0])
    for _ in range(2):
        assert pair.cache.declare_step([0])
        with pair.cache.step():
            pair.attend(0, pair.rows(0, 1), [pair.cache.pos(0)])
    pair.cache.check_integrity()
    assert pair.cache.pos(0) == 5
    assert pair.cache.declare_step([0])
    with (
        pytest.raises(StepError, match=r"layer 1 holds 3 of .*sequence.* 5 tokens.*left this layer out"),
        pair.cache.step(),
    ):
        pair.attend(1, pair.rows(1, 1), [5])
    for position in (4, 5):
        assert pair.cache.seq_clone(0, position) is None
    assert pair.cache.seq_clone(0) is None
    assert pair.cache.rewind(0, 4) is False
    assert pair.cache.rewind(0, 5) is True
    clone = pair.cache.seq_clone(0, 3)
    assert clone == 2
    pair.oracle.clone(0, clone, 3)
    assert pair.cache.rewind(0, 3)
    pair.check()
    pair.steps([0, 1, clone], [clone, clone, 0])


def test_cells_of_a_layer_left_out_are_zeroed_for_their_neighbours(backend: str, kind: str) -> None:
    """NaN of an ended sequence, cells taken over by a step that leaves a layer out, and a neighbour on that layer."""
    pair = pair_of(backend, kind, None, None, num_seqs=3)
    pair.steps([1])
    pair.commit_poison([0, 0, 0])
    pair.rm(0)
    assert pair.cache.declare_step([2, 2])
    with pair.cache.step():
        pair.attend(0, pair.rows(0, 2), [0, 1])
    pair.cache.check_integrity()
    assert pair.cache.rewind(2, 0)
    pair.steps([1], [1, 2])


# -- steps that fail ----------------------------------------------------------------------------------


def test_lost_cache_refuses_steps_and_copies_until_cleared(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 1])
    pair.cache.mark_lost("out of memory")
    assert pair.cache.seq_clone(7) is None
    with pytest.raises(CacheLostError, match=r"out of memory.*clear\(\)"):
        pair.cache.seq_clone(0)
    assert pair.cache.declare_step([0]) is False
    with pytest.raises(CacheLostError, match=r"out of memory.*clear\(\)"), pair.cache.step():
        pass
    pair.clear()
    assert (pair.new(), pair.new()) == (0, 1)
    pair.steps([0, 1, 0], [1])


def test_bytes_lost_inside_a_step_abort_it(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 1])
    assert pair.cache.declare_step([0])
    with pytest.raises(CacheLostError, match="device"):
        run_and(pair, [0], pair.layers, lambda: pair.cache.mark_lost("device error"))
    assert pair.cache.pos(0) == 1
    assert pair.cache.free == 62


def test_commit_that_fails_leaves_nothing_behind(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(backend, kind, None, 4)
    pair.steps([0, 1, 0])
    append = CellSequence.append

    def failing(self: CellSequence, positions: Any, cells: Any) -> None:
        append(self, positions, cells)
        self.positions.append(99)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CellSequence, "append", failing)
        patch.setattr(pair.cache, "_commit", pair.cache._commit if kind == "batched-cell" else _no_memory)
        assert pair.cache.declare_step([1, 0])
        with pytest.raises(MemoryError), pair.cache.step():
            pair.attend(0, pair.rows(0, 2, poisoned=True), [1, 2])
    pair.check()
    pair.steps([1, 0], [0, 0, 1])


def _no_memory(plan: Any) -> None:
    raise MemoryError


def test_interrupt_while_a_step_is_aborted_leaves_the_cache_usable(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    pair = pair_of(backend, kind, None, 4)
    pair.steps([0, 1, 0])
    with monkeypatch.context() as patch:
        patch.setattr(pair.cache, "_discard", interrupted)
        assert pair.cache.declare_step([1, 0, 1])
        with pytest.raises(KeyboardInterrupt):
            run_and(pair, [1, 0, 1], [0], lambda: pair.cache.fail_step())
    pair.check()
    pair.steps([1, 0, 1], [0, 0, 1])


def test_step_whose_failure_is_swallowed_cannot_be_committed(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 1])
    assert pair.cache.declare_step([0])
    with pytest.raises(StepError, match="failed in this step"):
        run_and(pair, [0], pair.layers, pair.cache.fail_step)
    pair.check()
    pair.steps([0, 1])


def test_step_that_fails_at_one_sequence_is_undone_for_all(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(backend, kind, None, 2)
    pair.steps([0, 1, 0], [1])
    calls = 0

    def failing(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InjectedError
        return original(*_)

    owner = type(pair.cache).sequence_type if kind == "batched-sequence" else type(pair.cache)
    original = owner._attend
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_attend", failing)
        assert pair.cache.declare_step([0, 1])
        with pytest.raises(InjectedError):
            run_and(pair, [0, 1], [*pair.layers, *pair.layers], lambda: None)
    pair.check()
    pair.steps([0, 1], [1, 1, 0])


def test_position_past_what_is_kept_is_refused(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind)
    for position in (2**63 - 1, 2**63, 2**80):
        assert pair.cache.declare_step([0])
        with pytest.raises(ValueError, match="position"), pair.cache.step():
            pair.cache.attend(0, (position,), *[pair.arrays.floats(part, "float32") for part in pair.rows(0, 1)], 1.0)
        pair.check()
    pair.steps([0])


@pytest.mark.parametrize("positions", [(0, 1.0), (0, True), [False, True], 0, [[0, 1]]])
def test_positions_that_are_no_integers_are_refused(backend: str, kind: str, positions: Any) -> None:
    pair = pair_of(backend, kind)
    assert pair.cache.declare_step([0, 0])
    arrays = [pair.arrays.floats(part, "float32") for part in pair.rows(0, 2)]
    with pytest.raises((TypeError, ValueError), match=r"positions|iterable"), pair.cache.step():
        pair.cache.attend(0, positions, *arrays, 1.0)
    pair.check()
    pair.steps([0, 0])


# -- integrity ----------------------------------------------------------------------------------------


def test_integrity_names_the_invariant_that_is_broken(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind)
    pair.steps([0, 1])
    pair.cache._next_id = 7
    with pytest.raises(AssertionError, match="each id that was used is live or free"):
        pair.cache.check_integrity()


# -- torch ---------------------------------------------------------------------------------------------


def test_steps_in_and_out_of_inference_mode_and_with_gradients_share_a_cache(backend: str, kind: str) -> None:
    pair = pair_of(backend, kind, None, 4)
    with torch.inference_mode():
        pair.steps([0, 1, 0])
        clone = pair.clone(0, 1)
        assert clone is not None
    pair.steps([1, 0, clone])
    with torch.no_grad():
        pair.steps([0, 0], [clone])
    if backend == "eager":
        assert pair.cache.declare_step([0])
        q, k, v = (torch.from_numpy(part).requires_grad_() for part in pair.rows(0, 1))
        with pair.cache.step():
            for layer in pair.layers:
                pair.cache.attend(layer, [pair.cache.pos(0)], q, k, v, 1.0)
        pair.cache.rewind(0, 0)
        pair.oracle.rewind(0, 0)
    with torch.inference_mode():
        pair.steps([0, 1], [clone])
