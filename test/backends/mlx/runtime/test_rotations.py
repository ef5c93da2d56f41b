"""Rotary positions on the CPU against MLX's own ``mx.fast.rope``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.program import (
    Node,
    Tid,
    Vid,
    make_node,
)
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.device import dtype_name
from oracles.hand_built import described, hand_built

pytestmark = pytest.mark.usefixtures("on_cpu")

Array = np.ndarray[Any, np.dtype[Any]]


# Angles may differ by so much, for positions below 64: frequencies are computed in another order.
ANGLE_ERROR = 5e-5
# What rounding a number to a dtype once may change of it.
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def run(nodes: list[Node], inputs: list[Any], outputs: list[int], constants: Sequence[mx.array] = ()) -> list[mx.array]:
    """Run instructions. Tensor slots are the constants, then the array inputs, then all others; values are numbers."""
    slots: list[Tid | Vid] = []
    for value in inputs:
        is_array = isinstance(value, mx.array)
        before = sum(isinstance(slot, Tid) == is_array for slot in slots)
        slots.append(Tid(len(constants) + before) if is_array else Vid(before))
    meta = [described(array.shape, dtype_name(array.dtype)) for array in constants]
    graph = hand_built([nodes], slots, [Tid(index) for index in outputs], meta)
    results: list[mx.array] = CompiledProgram(graph, dict(enumerate(constants)))(inputs)
    mx.eval(results)
    return results


def rope_node(x: int, out: int, offset: Tid | Vid, **fields: Any) -> Node:
    return make_node("RopeNode", x=Tid(x), out=Tid(out), offset=offset, **fields)


def assert_rotated(
    got: mx.array, x: mx.array, dims: int, *, offset: Any, freqs: mx.array | None = None, **how: Any
) -> None:
    """What MLX computes in float32, rounded once to the dtype of x; the entries past ``dims`` are those of x."""
    base = None if freqs is not None else how.get("base", 10000.0)
    expected = mx.fast.rope(
        x.astype(mx.float32),
        dims,
        traditional=how.get("traditional", False),
        base=base,
        scale=how.get("scale", 1.0),
        offset=offset,
        freqs=freqs,
    )
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    value, wanted = (np.array(array.astype(mx.float32), dtype=np.float64) for array in (got, expected))
    # A pair of entries of at most 1 moves by at most sqrt(2) times the angle's error.
    bound = np.sqrt(2) * ANGLE_ERROR
    assert np.all(np.abs(value - wanted) <= ROUNDING[x.dtype] * (np.abs(wanted) + bound) + bound)
    assert np.array_equal(value[..., dims:], np.array(x.astype(mx.float32))[..., dims:])


def entries(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Numbers between -1 and 1."""
    return mx.array(np.random.default_rng([*shape, seed]).uniform(-1, 1, shape).astype(np.float32)).astype(dtype)


FREQS = {4: [1.0, 7.5], 6: [1.0, 3.0, 50.0], 8: [1.0, 2.5, 20.0, 1000.0]}
OFFSETS = {
    "zero": lambda batch: 0,
    "number": lambda batch: 37,
    "array_without_axes": lambda batch: mx.array(11),
    "array_of_one": lambda batch: mx.array([5], dtype=mx.int32),
    "array_per_entry": lambda batch: mx.array([(17 * entry + 3) % 60 for entry in range(batch)], dtype=mx.int32),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("dims", "width"), [(8, 8), (8, 10), (4, 8), (6, 6)], ids=str)
def test_rotation_is_mlx_s(dims: int, width: int, offset: str, dtype: mx.Dtype) -> None:
    freqs = mx.array(FREQS[dims])
    for batch, heads, length, scale, base in itertools.product((1, 3), (1, 2), (1, 4), (1.0, 0.25), (None, 100.0, 5e5)):
        x, start = entries(batch, heads, length, width, dtype=dtype), OFFSETS[offset](batch)
        how = {"scale": scale} if base is None else {"scale": scale, "base": base}
        constants = [freqs] if base is None else []
        first = len(constants)
        # Slots: frequencies, x, the offset where it is an array, the result.
        at = Tid(first + 1) if isinstance(start, mx.array) else Vid(0)
        out = first + 2 if isinstance(start, mx.array) else first + 1
        node = rope_node(first, out, at, dims=dims, freqs=Tid(0) if constants else None, **how)
        (got,) = run([node], [x, start], [out], constants)
        assert_rotated(got, x, dims, offset=start, freqs=freqs if base is None else None, **how)


@pytest.mark.parametrize(
    ("shape", "traditional"), [((2, 3, 4, 8), True), ((3, 4, 8), False), ((2, 2, 3, 4, 8), False)], ids=str
)
def test_rotation_of_neighbours_or_of_other_ranks_is_mlx_s(shape: tuple[int, ...], traditional: bool) -> None:
    x = entries(*shape)
    (got,) = run([rope_node(0, 1, Vid(0), dims=8, base=100.0, traditional=traditional)], [x, 9], [1])
    assert_rotated(got, x, 8, offset=9, base=100.0, traditional=traditional)


@pytest.mark.parametrize("is_array", [True, False])
def test_layers_with_different_offsets_are_each_rotated_by_their_own(is_array: bool) -> None:
    q, k = entries(1, 2, 3, 8), entries(1, 1, 3, 8, seed=1)
    first, second = (mx.array([4]), mx.array([50])) if is_array else (4, 50)
    # Slots: q, k, the offsets where they are arrays, the results.
    offsets: list[Any] = [Tid(2), Tid(3)] if is_array else [Vid(0), Vid(1)]
    outs = [4, 5, 6, 7] if is_array else [2, 3, 4, 5]
    nodes = [
        rope_node(0, outs[0], offsets[0], dims=8, base=100.0),
        rope_node(1, outs[1], offsets[0], dims=8, base=100.0),
        rope_node(0, outs[2], offsets[1], dims=8, base=100.0),
        rope_node(1, outs[3], offsets[1], dims=8, base=100.0),
    ]
    results = run(nodes, [q, k, first, second], outs)
    for got, x, offset in zip(results, (q, k, q, k), (first, first, second, second), strict=True):
        assert_rotated(got, x, 8, offset=offset, base=100.0)


def test_layers_with_one_offset_and_other_parameters_are_each_rotated_by_their_own() -> None:
    x, longer, offset = entries(1, 2, 3, 8), entries(1, 2, 5, 8), mx.array([13])
    constants = [mx.array([1.0, 2.5, 20.0, 1000.0]), mx.array([2.0, 3.0, 5.0, 7.0]), mx.array([1.0, 9.0])]
    # Slots: 0, 1 and 2 are frequencies, 3 is x, 4 the longer one, 5 the offset.
    layers: list[tuple[int, int, dict[str, Any]]] = [
        (3, 8, {"freqs": 0}),
        (3, 8, {"freqs": 1}),
        (3, 4, {"freqs": 2}),
        (3, 8, {"freqs": 0, "scale": 0.5}),
        (4, 8, {"freqs": 0}),
        (3, 8, {"base": 100.0}),
        (3, 8, {"base": 1000.0}),
        (3, 8, {"base": 100.0, "scale": 0.5}),
        (3, 4, {"base": 100.0}),
        (4, 4, {"base": 100.0}),
    ]
    nodes = [
        rope_node(slot, 6 + index, Tid(5), dims=dims, **{**how, "freqs": Tid(how["freqs"]) if "freqs" in how else None})
        for index, (slot, dims, how) in enumerate(layers)
    ]
    results = run(nodes, [x, longer, offset], [6 + index for index in range(len(layers))], constants)
    for got, (slot, dims, how) in zip(results, layers, strict=True):
        freqs = constants[how["freqs"]] if "freqs" in how else None
        assert_rotated(got, x if slot == 3 else longer, dims, offset=offset, **{**how, "freqs": freqs})


def test_offsets_computed_into_the_same_slots_are_never_taken_for_each_other() -> None:
    x, num_layers = entries(1, 1, 2, 8), 40
    # Slots: 0 is zero, 1 is one, 2 is x, 3 the first offset, then the same offset in slots that each layer writes anew.
    slots, nodes = range(4, 16), []
    for layer in range(num_layers):
        for slot in slots:
            before, step = (slot - 1, 0) if slot > slots.start else (slots.start if layer else 3, 1)
            nodes.append(make_node("AddNode", a=Tid(before), b=Tid(step), out=Tid(slot)))
        nodes.append(rope_node(2, slots.stop + layer, Tid(slots[layer % len(slots)]), dims=8, base=100.0))
    outs = [slots.stop + layer for layer in range(num_layers)]
    results = run(nodes, [x, mx.array([10])], outs, [mx.array([0]), mx.array([1])])
    for layer, got in enumerate(results):
        assert_rotated(got, x, 8, offset=11 + layer, base=100.0)


def test_runs_of_one_program_do_not_share_their_rotations() -> None:
    x = entries(1, 2, 3, 8)
    graph = hand_built([[rope_node(0, 2, Tid(1), dims=8, base=100.0)]], [Tid(0), Tid(1)], [Tid(2)])
    program = CompiledProgram(graph, {})
    for start in range(30):
        (got,) = program([x, mx.array([start])])
        assert_rotated(got, x, 8, offset=start, base=100.0)
