"""Inputs taken from public bug reports (and their kin), on the ``sequence`` layout of each backend."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from executorch_mlx.extension.llm.cache import (
    CacheConfig,
    CacheFullError,
    CacheLostError,
    LayerConfig,
    StepError,
)
from oracles.sequence_pair import InjectedError, Rows, SequencePair

pytestmark = pytest.mark.parametrize("backend", ["eager", "MLXBackend"])

DTYPES = ("float32", "float16", "bfloat16")


def pair_of(
    backend: str,
    *windows: int | None,
    capacity: int = 32,
    max_write: int | None = None,
    initial_capacity: int = 512,
    kv_dtype: str = "float32",
    q_dtype: str = "float32",
    v_head_dim: int | None = 4,
    seed: int = 0,
) -> SequencePair:
    """Return a cache with a layer per window (None: full history), beside its oracle."""
    layers = [LayerConfig(n_kv_heads=2, head_dim=8, v_head_dim=v_head_dim, window=window) for window in windows]
    config = CacheConfig(capacity, layers, kv_dtype, initial_capacity, max_write)
    return SequencePair(backend, config, q_dtype=q_dtype, seed=seed)


def visible_keys(pair: SequencePair, layer: int, num_tokens: int) -> list[set[int]]:
    """Run a step and return the positions that each of its queries sees.

    Every value is one-hot in its position, so that the weights can be read off the output: v_head_dim is the
    capacity, and all tokens come from here.
    """
    start = pair.oracle.length
    q, k, _ = pair.rows(layer, num_tokens)
    v = np.zeros((1, 2, num_tokens, pair.config.capacity), dtype=np.float32)
    for row in range(num_tokens):
        v[:, :, row, start + row] = 1
    with pair.cache.step():
        out = pair.attend_both(layer, (q, k, v))
    pair.oracle.commit()
    pair.check()
    return [set(np.flatnonzero(out[0, 0, row]).tolist()) for row in range(num_tokens)]


def step_that_fails(
    pair: SequencePair, rows: Sequence[Rows], layers: Iterable[int], error: type[BaseException]
) -> None:
    """Run a step that raises after some layers, on both sides."""
    try:
        with pair.cache.step():
            for layer in layers:
                pair.attend_both(layer, rows[layer])
            raise error
    finally:
        pair.oracle.abort()
        pair.check()


# -- retention -------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "max_write", "written", "rewinds"),
    [
        (4, 1, 10, {9: True}),
        (4, 1, 10, {10: True, 9: True, 8: False, 7: False}),
        (4, 1, 10, {8: False}),
        (2, 1, 3, {1: False, 0: True}),
        (4, 2, 12, {11: True, 10: True, 9: False}),
        (4, 2, 12, {9: False}),
        (4, 4, 4, {3: True, 2: True, 1: True}),
        (1, 1, 9, {5: True, 1: True}),
        (1, 3, 9, {8: True, 1: True, 0: True}),
        (4, 3, 6, {1: True}),
        (4, 3, 7, {4: True, 3: False}),
        (4, 3, 8, {5: True, 4: False}),
        (4, 3, 8, {0: True}),
    ],
)
def test_rewind_on_a_ring_is_granted_exactly_where_the_keys_are_held(
    backend: str, window: int, max_write: int, written: int, rewinds: dict[int, bool]
) -> None:
    pair = pair_of(backend, window, max_write=max_write)
    pair.steps([1] * written)
    for position, granted in rewinds.items():
        assert pair.rewind(position) is granted
    pair.steps([1] * 12)


def test_rewind_twice_past_the_ring_is_refused_and_decoding_goes_on_exactly(backend: str) -> None:
    pair = pair_of(backend, 4, None, max_write=1)
    pair.steps([1] * 10)
    assert pair.rewind(9)
    assert not pair.rewind(8)
    pair.steps([1] * 6)


def test_rewind_on_flat_layers_to_any_position_is_granted(backend: str) -> None:
    pair = pair_of(backend, None, None)
    pair.steps([12])
    for position in (11, 7, 1):
        assert pair.rewind(position)
        pair.steps([1])
    assert pair.rewind(0)
    pair.steps([5, 1])


def test_rewind_with_mixed_layers_is_bounded_by_the_narrowest_ring(backend: str) -> None:
    pair = pair_of(backend, None, 8, 2, max_write=2)
    pair.steps([1] * 12)
    assert pair.rewind(11)
    assert pair.rewind(10)
    assert not pair.rewind(9)
    pair.steps([2, 2, 1])


def test_rewind_after_an_aborted_step_knows_what_it_overwrote(backend: str) -> None:
    aborted, clean = (pair_of(backend, 4, max_write=2) for _ in range(2))
    for pair in (aborted, clean):
        pair.steps([1] * 10)
    aborted.poison(2, [0])
    assert clean.rewind(9)
    assert not aborted.rewind(9)
    aborted.steps([1, 2, 2])


def test_rewind_after_an_aborted_step_that_wrote_one_layer_counts_that_layer(backend: str) -> None:
    pair = pair_of(backend, 8, 4, max_write=2)
    pair.steps([1] * 12)
    pair.poison(2, [0])
    assert not pair.rewind(11)
    assert pair.rewind(12)
    pair.steps([2, 1])


def test_rewind_after_an_aborted_first_step_is_as_in_a_fresh_cache(backend: str) -> None:
    pair = pair_of(backend, 2, max_write=1)
    pair.poison(1, [0])
    pair.steps([1, 1])
    assert pair.rewind(1)


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 3)])
def test_rewind_at_the_edges_refuses_raises_or_does_nothing(backend: str, windows: tuple[int | None, ...]) -> None:
    pair = pair_of(backend, *windows, max_write=4)
    pair.steps([3, 2])
    assert pair.cache.rewind(6) is False
    with pytest.raises(ValueError, match=r"rewind: .*-1"):
        pair.cache.rewind(-1)
    assert pair.cache.rewind(5) is True
    pair.check()
    pair.steps([1, 3])


def test_rewind_of_a_fresh_cache_to_zero_is_granted(backend: str) -> None:
    pair = pair_of(backend, 4)
    assert pair.rewind(0)
    assert not pair.rewind(1)


# -- windows ---------------------------------------------------------------


def test_ring_given_a_chunk_after_single_tokens_shows_each_query_its_newest(backend: str) -> None:
    pair = pair_of(backend, 4, capacity=16, max_write=3, v_head_dim=16)
    for position in range(4):
        assert visible_keys(pair, 0, 1) == [set(range(position + 1))]
    assert visible_keys(pair, 0, 3) == [{1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}]


def test_ring_when_decoding_at_the_window_sees_its_newest_keys_only(backend: str) -> None:
    pair = pair_of(backend, 3, capacity=16, v_head_dim=16)
    visible_keys(pair, 0, 3)
    assert visible_keys(pair, 0, 1) == [{1, 2, 3}]


@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1, 1), (3, 1), (1, 3), (2, 2)])
def test_ring_fed_in_any_split_answers_alike(backend: str, sizes: tuple[int, ...]) -> None:
    pair = pair_of(backend, 3, capacity=16, max_write=4, v_head_dim=16)
    seen = [keys for num_tokens in sizes for keys in visible_keys(pair, 0, num_tokens)]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}]


@pytest.mark.parametrize("windows", [(4,), (None, 4), (4, None), (8, 4)])
def test_step_longer_than_a_ring_takes_is_refused_before_anything_changes(
    backend: str, windows: tuple[int | None, ...]
) -> None:
    pair = pair_of(backend, *windows, max_write=4)
    for expected in (0, 3):
        with pytest.raises(StepError, match=r"5 tokens.*at most 4"), pair.cache.step():
            pair.attend(0, pair.rows(0, 5, poisoned=True))
        assert pair.cache.position == expected
        pair.check()
        pair.steps([3])
    pair.steps([4, 1, 4])


@pytest.mark.parametrize("windows", [(2, 6), (6, 2), (None, 6, 2)])
def test_max_step_without_max_write_is_the_narrowest_window(backend: str, windows: tuple[int | None, ...]) -> None:
    pair = pair_of(backend, *windows)
    assert pair.cache.max_step == 2
    with pytest.raises(StepError, match="at most 2"), pair.cache.step():
        pair.attend(0, pair.rows(0, 3, poisoned=True))
    pair.steps([2, 2, 1, 2, 2])


def test_max_step_without_rings_is_none(backend: str) -> None:
    assert pair_of(backend, None, max_write=2).cache.max_step is None


def test_max_step_with_max_write_above_the_window_is_max_write(backend: str) -> None:
    pair = pair_of(backend, 2, max_write=5)
    assert pair.cache.max_step == 5
    pair.steps([5, 1, 5, 4])


def test_ring_with_a_larger_initial_capacity_equals_a_dense_window(backend: str) -> None:
    pair = pair_of(backend, 8, initial_capacity=256)
    pair.steps([1] * 12)


@pytest.mark.parametrize("max_write", [1, 3])
def test_window_of_one_answers_with_the_tokens_own_value(backend: str, max_write: int) -> None:
    pair = pair_of(backend, 1, max_write=max_write)
    for num_tokens in (1, max_write, 1, max_write, max_write):
        rows = pair.rows(0, num_tokens)
        with pair.cache.step():
            out = pair.attend_both(0, rows)
        pair.oracle.commit()
        np.testing.assert_allclose(out, np.repeat(rows[2], 2, axis=1), rtol=1e-6, atol=1e-6)


def test_ring_wider_than_the_capacity_holds_the_whole_sequence(backend: str) -> None:
    pair = pair_of(backend, 8, capacity=5, max_write=8)
    pair.steps([3, 2])
    assert pair.rewind(1)
    pair.steps([4])


def test_chunk_on_top_of_history_is_lower_right_causal(backend: str) -> None:
    pair = pair_of(backend, None, capacity=16, v_head_dim=16)
    visible_keys(pair, 0, 5)
    assert visible_keys(pair, 0, 3) == [set(range(6)), set(range(7)), set(range(8))]


# -- admission -------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 4)])
@pytest.mark.parametrize("positions", [[7], [5, 5], [6, 5], [4], [5, 7], [-1], [6], [5, 4], [0, 1]])
def test_step_at_positions_that_do_not_continue_is_refused_with_the_cause(
    backend: str, windows: tuple[int | None, ...], positions: list[int]
) -> None:
    pair = pair_of(backend, *windows, max_write=5)
    pair.steps([5])
    with pytest.raises(ValueError, match=r"position -?\d+ where \d was due.*holds 5"), pair.cache.step():
        pair.attend(0, pair.rows(0, len(positions), poisoned=True), pair.arrays.positions(positions))
    pair.check()
    pair.steps([2, 1])


def test_capacity_when_full_refuses_until_rewound(backend: str) -> None:
    pair = pair_of(backend, None, capacity=8)
    pair.steps([8])
    assert pair.cache.can_extend() is False
    assert pair.cache.can_extend(0) is True
    with pytest.raises(CacheFullError, match="8 of 8"), pair.cache.step():
        pair.attend(0, pair.rows(0, 1, poisoned=True))
    pair.check()
    assert pair.rewind(7)
    assert pair.cache.can_extend() is True
    assert pair.cache.can_extend(2) is False
    pair.steps([1])


def test_capacity_bounds_a_sequence_of_rings_too(backend: str) -> None:
    pair = pair_of(backend, 2, capacity=8, max_write=2)
    pair.steps([2, 2, 2, 1])
    with pytest.raises(CacheFullError, match=r"7 of 8.*2"), pair.cache.step():
        pair.attend(0, pair.rows(0, 2, poisoned=True))
    pair.steps([1])


@pytest.mark.parametrize("in_a_step_with_tokens", [False, True])
def test_step_of_no_tokens_raises_before_anything_changes(backend: str, in_a_step_with_tokens: bool) -> None:
    pair = pair_of(backend, None, 4)
    pair.steps([3])
    with pair.cache.step():
        with pytest.raises(ValueError, match=r"one or more.*got none"):
            pair.attend(0, pair.rows(0, 0), pair.arrays.positions([]))
        if in_a_step_with_tokens:
            for layer in pair.layers:
                pair.attend_both(layer, pair.rows(layer, 2))
    if in_a_step_with_tokens:
        pair.oracle.commit()
    pair.check()
    pair.steps([1])


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_step_on_an_unknown_layer_raises_naming_the_known(backend: str, layer: int) -> None:
    pair = pair_of(backend, None, 4)
    with pytest.raises(ValueError, match=rf"layer {layer}: .*0\.\.1"), pair.cache.step():
        pair.attend(layer, pair.rows(0, 1, poisoned=True))
    pair.check()
    pair.steps([1])


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("q", (1, 3, 2, 8)),
        ("q", (1, 4, 2, 9)),
        ("q", (1, 4, 3, 8)),
        ("q", (2, 4, 2, 8)),
        ("q", (4, 2, 8)),
        ("k", (1, 4, 2, 8)),
        ("k", (1, 2, 2, 4)),
        ("k", (1, 2, 3, 8)),
        ("k", (2, 2, 2, 8)),
        ("v", (1, 2, 2, 8)),
        ("v", (1, 1, 2, 4)),
        ("v", (1, 2, 1, 4)),
        ("v", (2, 2, 4)),
    ],
)
def test_step_with_a_wrong_shape_is_refused_naming_the_tensor(
    backend: str, tensor: str, shape: tuple[int, ...]
) -> None:
    pair = pair_of(backend, None)
    rows = dict(zip("qkv", pair.rows(0, 2), strict=True))
    rows[tensor] = np.full(shape, np.nan, dtype=np.float32)
    with pytest.raises(ValueError, match=f"layer 0: {tensor} has shape"), pair.cache.step():
        pair.attend(0, (rows["q"], rows["k"], rows["v"]), pair.arrays.positions([0, 1]))
    pair.check()
    pair.steps([2, 1])


# -- pools -----------------------------------------------------------------


@pytest.mark.parametrize("initial_capacity", [3, 0, 1, 10, 11, 4096])
@pytest.mark.parametrize("sizes", [(1,) * 10, (2, 3, 5), (10,), (4, 4, 1, 1)])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_growth_answers_bit_for_bit_as_a_pool_that_never_grew(
    backend: str, initial_capacity: int, sizes: tuple[int, ...], kv_dtype: str
) -> None:
    growing, whole = (
        pair_of(backend, None, capacity=10, initial_capacity=initial, kv_dtype=kv_dtype)
        for initial in (initial_capacity, 10)
    )
    for num_tokens in sizes:
        for grown, kept in zip(growing.step(num_tokens), whole.step(num_tokens), strict=True):
            np.testing.assert_array_equal(grown, kept)


@pytest.mark.parametrize("num_tokens", [10, 4])
@pytest.mark.parametrize("window", [None, 10])
def test_pool_written_by_the_first_step_leaves_the_callers_arrays_alone(
    backend: str, num_tokens: int, window: int | None
) -> None:
    """A write of a pool's full extent must not make the caller's array the pool."""
    pair = pair_of(backend, window, capacity=10, initial_capacity=num_tokens)
    rows = pair.rows(0, num_tokens)
    arrays = [pair.arrays.floats(part, "float32") for part in rows]
    with pair.cache.step():
        pair.cache.attend(0, pair.arrays.positions(range(num_tokens)), *arrays, pair.scale(0))
    pair.oracle.attend(0, *rows, pair.scale(0))
    pair.oracle.commit()
    pair.rewind(2)
    pair.steps([1, 3, 2])
    for array, part in zip(arrays, rows, strict=True):
        np.testing.assert_array_equal(pair.arrays.numpy(array), part)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("windows", [(None,), (4,), (None, 3)])
def test_nan_of_aborted_and_rewound_steps_never_reaches_an_output(
    backend: str, windows: tuple[int | None, ...], kv_dtype: str
) -> None:
    pair = pair_of(backend, *windows, max_write=3, kv_dtype=kv_dtype, q_dtype=kv_dtype)
    for sizes in ((3,), (1, 1), (3, 2, 1), (2, 3)):
        pair.poison(3, pair.layers)
        pair.poison(2, [0])
        pair.steps(sizes)
    start = pair.oracle.length
    with pair.cache.step():
        for layer in pair.layers:
            rows = pair.rows(layer, 3, poisoned=True)
            pair.attend(layer, rows)
            pair.oracle.attend(layer, *rows, pair.scale(layer))
    pair.oracle.commit()
    assert pair.rewind(start)
    for answer in (*pair.step(1), *pair.step(3)):
        assert np.isfinite(answer).all()


def test_clear_leaves_nothing_of_the_sequence(backend: str) -> None:
    pair = pair_of(backend, None, 2, max_write=2)
    pair.steps([2, 2, 1])
    pair.clear()
    assert pair.cache.position == 0
    pair.steps([1, 2])
    assert pair.rewind(1)
    pair.steps([2])


# -- arguments -------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (3,)])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_attend_on_transposed_views_equals_contiguous_and_leaves_q(
    backend: str, windows: tuple[int | None, ...], num_tokens: int
) -> None:
    pair = pair_of(backend, *windows, max_write=5)
    for _ in range(3):
        rows = pair.rows(0, num_tokens)
        views = [
            pair.arrays.swapped(pair.arrays.floats(np.ascontiguousarray(part.swapaxes(1, 2)), "float32"))
            for part in rows
        ]
        start = pair.oracle.length
        with pair.cache.step():
            positions = pair.arrays.positions(range(start, start + num_tokens))
            out = pair.cache.attend(0, positions, *views, pair.scale(0))
        expected = pair.oracle.attend(0, *rows, pair.scale(0))
        pair.oracle.commit()
        np.testing.assert_allclose(pair.arrays.numpy(out), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(pair.arrays.numpy(views[0]), rows[0])
        np.testing.assert_allclose(pair.arrays.numpy(views[0] + views[0]), rows[0] * 2, rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("windows", [(None,), (3,)])
def test_attend_with_any_dtypes_answers_in_qs(
    backend: str, kv_dtype: str, q_dtype: str, windows: tuple[int | None, ...]
) -> None:
    pair = pair_of(backend, *windows, max_write=4, kv_dtype=kv_dtype, q_dtype=q_dtype)
    pair.steps([4, 1, 1, 3])


@pytest.mark.parametrize("position_dtype", ["int32", "int64"])
@pytest.mark.parametrize("column", [False, True])
def test_attend_with_any_form_of_positions_answers_alike(backend: str, position_dtype: str, column: bool) -> None:
    pair = pair_of(backend, None, 3)
    for num_tokens in (3, 1, 2):
        pair.step(num_tokens, position_dtype=position_dtype, column=column)


@pytest.mark.parametrize("positions", [[0.0, 1.0], [[0, 1]], [[0, 1], [2, 3]], [0]])
def test_attend_with_unusable_positions_raises_and_changes_nothing(backend: str, positions: list[Any]) -> None:
    pair = pair_of(backend, None)
    with pytest.raises((ValueError, TypeError), match="positions"), pair.cache.step():
        pair.attend(0, pair.rows(0, 2, poisoned=True), positions)
    pair.check()
    pair.steps([2])


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 3)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_layer_asked_again_in_a_step_answers_the_same_and_advances_once(
    backend: str, windows: tuple[int | None, ...], num_tokens: int
) -> None:
    pair = pair_of(backend, *windows, max_write=3)
    pair.steps([3, 2])
    rows = [pair.rows(layer, num_tokens) for layer in pair.layers]
    with pair.cache.step():
        first = [pair.attend_both(layer, rows[layer]) for layer in pair.layers]
        again = [pair.attend_both(layer, rows[layer]) for layer in reversed(pair.layers)]
    pair.oracle.commit()
    pair.check()
    for answer, repeated in zip(first, reversed(again), strict=True):
        np.testing.assert_array_equal(answer, repeated)
    assert pair.cache.position == 5 + num_tokens
    pair.steps([1, 3])


# -- steps -----------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None, None), (4, 4), (None, 3), (3, None), (1, 2)])
@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_step_that_failed_part_way_runs_again_as_if_it_had_not(
    backend: str, windows: tuple[int | None, ...], written: int, num_tokens: int
) -> None:
    failed, clean = (pair_of(backend, *windows, max_write=3, seed=7) for _ in range(2))
    for pair in (failed, clean):
        pair.steps([3, 2, 1])
    retried = [failed.rows(layer, num_tokens) for layer in failed.layers]
    with pytest.raises(InjectedError):
        step_that_fails(failed, retried, range(written), InjectedError)
    answers = []
    for pair in (failed, clean):
        with pair.cache.step():
            answers.append([pair.attend_both(layer, retried[layer]) for layer in pair.layers])
        pair.oracle.commit()
        pair.check()
    for after_failure, untroubled in zip(*answers, strict=True):
        np.testing.assert_array_equal(after_failure, untroubled)
    assert failed.cache.position == clean.cache.position == 6 + num_tokens


def test_step_that_grew_its_pools_and_failed_runs_again(backend: str) -> None:
    pair = pair_of(backend, None, None, initial_capacity=2)
    pair.steps([2])
    pair.poison(7, [0])
    pair.poison(3, [1, 0])
    pair.steps([1, 5, 1])


def test_step_cancelled_by_a_base_exception_aborts(backend: str) -> None:
    pair = pair_of(backend, None)
    pair.steps([2])
    with pytest.raises(KeyboardInterrupt):
        step_that_fails(pair, [pair.rows(0, 2)], [0], KeyboardInterrupt)
    pair.steps([1])


@pytest.mark.parametrize("verb", ["clear", "rewind", "step"])
@pytest.mark.parametrize("after_first_layer", [False, True])
def test_verb_inside_a_step_raises_and_the_step_goes_on(backend: str, verb: str, after_first_layer: bool) -> None:
    pair = pair_of(backend, None, 3)
    pair.steps([3])
    verbs = {
        "clear": pair.cache.clear,
        "rewind": lambda: pair.cache.rewind(0),
        "step": lambda: pair.cache.step().__enter__(),
    }
    with pair.cache.step():
        if after_first_layer:
            pair.attend_both(0, pair.rows(0, 2))
        with pytest.raises(StepError, match="step"):
            verbs[verb]()
        assert pair.cache.in_step
        for layer in pair.layers[1:] if after_first_layer else pair.layers:
            pair.attend_both(layer, pair.rows(layer, 2))
    pair.oracle.commit()
    pair.check()
    pair.steps([1])


def test_call_that_failed_inside_a_step_never_answers_with_its_rows(backend: str) -> None:
    """The step may go on with the right answer, or refuse to; the failed call's NaN must not stay."""
    pair = pair_of(backend, None)
    pair.steps([2])
    q, k, v = pair.rows(0, 1, poisoned=True)
    broken = [pair.arrays.floats(q, "int32"), *(pair.arrays.floats(part, "float32") for part in (k, v))]
    try:
        with pair.cache.step():
            with pytest.raises((ValueError, TypeError, RuntimeError), match="type"):
                pair.cache.attend(0, [2], *broken, 1.0)
            pair.attend_both(0, pair.rows(0, 1))
        pair.oracle.commit()
    except StepError:
        pair.oracle.abort()
    pair.check()
    pair.steps([1, 2])


def test_attend_outside_a_step_raises(backend: str) -> None:
    pair = pair_of(backend, None)
    with pytest.raises(StepError, match="outside a step"):
        pair.attend(0, pair.rows(0, 1, poisoned=True))
    pair.check()
    pair.steps([1])


@pytest.mark.parametrize("windows", [(None, None), (None, 4)])
def test_layer_with_other_positions_than_the_steps_is_refused(backend: str, windows: tuple[int | None, ...]) -> None:
    pair = pair_of(backend, *windows)
    pair.steps([3])
    rows = [pair.rows(0, 2), pair.rows(1, 1)]
    with pair.cache.step():
        pair.attend_both(0, rows[0])
        with pytest.raises(StepError, match="differ"):
            pair.attend(1, rows[1])
        pair.attend_both(1, pair.rows(1, 2))
    pair.oracle.commit()
    pair.check()
    pair.steps([2, 1])


def test_layer_that_a_committed_step_left_out_is_refused_until_rewound(backend: str) -> None:
    pair = pair_of(backend, None, None)
    pair.steps([2])
    with pair.cache.step():
        pair.attend(0, pair.rows(0, 1))
    with (
        pytest.raises(StepError, match=r"layer 1 holds 2 of the sequence.s 3 tokens.*left this layer out"),
        pair.cache.step(),
    ):
        pair.attend(1, pair.rows(1, 1), pair.arrays.positions([3]))
    assert pair.cache.rewind(2)
    pair.check()
    pair.steps([1, 2])


@pytest.mark.parametrize("windows", [(None,), (3,)])
def test_cache_with_lost_bytes_refuses_steps_until_cleared(backend: str, windows: tuple[int | None, ...]) -> None:
    pair = pair_of(backend, *windows)
    pair.steps([3])
    pair.cache.mark_lost("out of memory")
    with pytest.raises(CacheLostError, match=r"out of memory.*clear\(\)"), pair.cache.step():
        pass
    pair.clear()
    pair.steps([2, 1])


# -- threads ---------------------------------------------------------------


def in_threads(*work: Any) -> None:
    """Run each callable in a thread of its own, all at once; raise the first error."""
    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_cache_built_in_one_thread_and_stepped_in_another_answers_alike(backend: str) -> None:
    pair = pair_of(backend, None, 3)
    pair.steps([3])
    in_threads(lambda: pair.steps([1, 2]))
    pair.steps([1])


def test_caches_stepped_in_two_threads_at_once_are_never_crossed(backend: str) -> None:
    pairs = [pair_of(backend, None, 3, seed=seed) for seed in range(2)]
    in_threads(*(lambda pair=pair: pair.steps([1, 2, 3] * 4) for pair in pairs))
