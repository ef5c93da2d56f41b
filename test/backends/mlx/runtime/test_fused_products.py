"""Products of one operand are one product, and the same numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.program import Graph, Node, Tid, make_node
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.expand import expand
from executorch_mlx.backends.mlx.runtime.fuse import fuse
from oracles.hand_built import assembled
from oracles.written_calls import described_as

pytestmark = pytest.mark.usefixtures("on_cpu")

# Weights of 3, 5 and 5 columns, biases of 3 and 5; then the input.
CONSTANTS = ("float32[3, 8]", "float32[5, 8]", "float32[5, 8]", "float32[3]", "float32[5]")
W, V, U, B, C, X = (Tid(index) for index in range(6))
TURNED, OUT = [Tid(index) for index in range(6, 9)], [Tid(index) for index in range(9, 12)]


def turn(weight: Tid, out: Tid) -> Node:
    return make_node("TransposeNode", x=weight, out=out, perm=[1, 0])


def product(weight: Tid, out: Tid, bias: Tid | None = None, x: Tid = X, **scales: float) -> Node:
    fields = {"alpha": 1.0, "beta": 1.0, **scales}
    return make_node("AddmmNode", mat1=x, mat2=weight, out=out, bias=bias, **fields)


def linears(*pairs: tuple[Tid, Tid | None], **scales: float) -> list[Node]:
    """A product for each weight and bias."""
    nodes = []
    for index, (weight, bias) in enumerate(pairs):
        nodes += [turn(weight, TURNED[index]), product(TURNED[index], OUT[index], bias, **scales)]
    return nodes


# Instructions, how many results, and how many of their products are fused.
PROGRAMS: dict[str, tuple[list[Node], int, int]] = {
    "two": (linears((W, None), (V, None)), 2, 2),
    "three": (linears((W, None), (V, None), (U, None)), 3, 3),
    "biased": (linears((W, B), (V, C)), 2, 2),
    "one_biased": (linears((W, B), (V, None)), 2, 0),
    "alone": (linears((W, None)), 1, 0),
    "scaled": (linears((W, None), (V, None), alpha=2.0), 2, 0),
    "weight_read_twice": (linears((V, None), (V, None)), 2, 0),
    "bias_read_twice": (linears((V, C), (U, C)), 2, 0),
    "of_another_operand": (
        [
            make_node("AbsNode", x=X, out=OUT[2]),
            *linears((W, None)),
            turn(V, TURNED[1]),
            product(TURNED[1], OUT[1], x=OUT[2]),
        ],
        2,
        0,
    ),
    "result_written_again": ([*linears((W, None), (V, None)), make_node("AbsNode", x=OUT[0], out=OUT[0])], 2, 0),
}


def graph_of(nodes: list[Node], num_results: int) -> Graph:
    descriptions = [described_as(text) for text in CONSTANTS]
    return assembled([nodes], [X], OUT[:num_results], descriptions, [described_as("float32[0..9, 8]")])


def constants() -> dict[int, mx.array]:
    mx.random.seed(1)
    shapes = [(3, 8), (5, 8), (5, 8), (3,), (5,)]
    return {index: mx.random.normal(shape) for index, shape in enumerate(shapes)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fused_products_are_the_single_ones(name: str) -> None:
    nodes, num_results, num_fused = PROGRAMS[name]
    graph = graph_of(nodes, num_results)
    left = constants()
    fusion = fuse(graph, left, None, {})
    assert sum(len(its.parts) for its in fusion.products.values()) == num_fused
    assert len(left) == 5 - num_fused * (2 if name == "biased" else 1)
    single, fused = CompiledProgram(graph, constants()), CompiledProgram(graph, left, fusion=fusion)
    for rows in (1, 4):
        x = mx.random.normal((rows, 8))
        for expected, out in zip(single([x]), fused([x]), strict=True):
            np.testing.assert_allclose(np.array(out), np.array(expected), rtol=1e-5, atol=1e-5)


def test_programs_share_what_is_fused() -> None:
    shared: dict[tuple[Any, ...], mx.array] = {}
    nodes, num_results, _ = PROGRAMS["biased"]
    weights = []
    for _ in range(2):
        graph = graph_of(nodes, num_results)
        (its,) = fuse(graph, constants(), None, shared).products.values()
        weights.append(its.weight)
    assert weights[0] is weights[1]


def quantized_graph() -> Graph:
    """Two products with quantized weights of 8 and 16 columns."""
    texts = ("uint32[8, 8]", "float32[8, 2]", "float32[8, 2]", "uint32[16, 8]", "float32[16, 2]", "float32[16, 2]")
    how = {"group_size": 32, "bits": 4, "mode": "affine", "transpose": True}
    nodes = [
        make_node(
            "QuantizedMatmulNode", x=X_OF_SIX, w=Tid(at), scales=Tid(at + 1), biases=Tid(at + 2), out=Tid(out), **how
        )
        for at, out in ((0, 7), (3, 8))
    ]
    described, given = [described_as(text) for text in texts], [described_as("float32[0..9, 64]")]
    return assembled([nodes], [X_OF_SIX], [Tid(7), Tid(8)], described, given)


def quantized_constants() -> dict[int, mx.array]:
    mx.random.seed(2)
    packed = [mx.quantize(mx.random.normal((columns, 64)), group_size=32, bits=4) for columns in (8, 16)]
    return dict(enumerate(array for parts in packed for array in parts))


def test_expanded_weights_are_fused() -> None:
    graph, arrays = quantized_graph(), quantized_constants()
    expansion = expand(graph, arrays, {})
    fusion = fuse(graph, expansion.constants, expansion, {})
    assert (len(fusion.products), expansion.factors) == (1, {})
    stored = CompiledProgram(graph, arrays)
    fused = CompiledProgram(graph, expansion.constants, expansion=expansion, fusion=fusion)
    x = mx.random.normal((3, 64))
    for expected, out in zip(stored([x]), fused([x]), strict=True):
        np.testing.assert_allclose(np.array(out), np.array(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [None, 1, 2])
def test_programs_share_expanded_products_of_the_same_parameters_only(other: int | None) -> None:
    """``other``: which parameter of the first weight, scales or biases, has another name in the second program."""
    shared: dict[tuple[Any, ...], mx.array] = {}
    products = []
    for renamed in (None, other):
        graph, arrays = quantized_graph(), quantized_constants()
        if renamed is not None:
            (constant,) = (it for it in graph.named_slots if it.slot.idx == renamed)
            constant.name = "another"
            arrays[renamed] = arrays[renamed] * 2
        expansion = expand(graph, arrays, shared)
        (its,) = fuse(graph, expansion.constants, expansion, shared).products.values()
        products.append(its.weight)
    assert (products[0] is products[1]) == (other is None)


X_OF_SIX = Tid(6)
