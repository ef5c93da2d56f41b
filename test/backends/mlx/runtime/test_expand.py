"""Weights expanded when a program is loaded: the same products, whatever feeds them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from executorch_mlx.backends.mlx.program import Graph, InstructionChain, Node, ProgramError, Tid, make_node
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.runtime import expand as expand_module
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.expand import expand
from oracles.hand_built import assembled
from oracles.written_calls import described_as

pytestmark = pytest.mark.usefixtures("on_cpu")

W, SCALES, BIASES, X = (Tid(index) for index in range(4))
OUT, OTHER, CAST, BIASES_CAST = (Tid(index) for index in range(4, 8))
DESCRIBED = [described_as(text) for text in ("uint32[16, 8]", "float32[16, 2]", "float32[16, 2]")]


def product(out: Tid, **fields: Any) -> Node:
    slots = {"x": X, "w": W, "scales": SCALES, "biases": BIASES, **fields}
    return make_node("QuantizedMatmulNode", **slots, out=out, group_size=32, bits=4, mode="affine", transpose=True)


def cast(x: Tid, out: Tid, dtype: str) -> Node:
    return make_node("AsTypeNode", x=x, out=out, scalar_type=SCALAR_TYPE_CODES[dtype])


HALVES = [cast(SCALES, CAST, "float16"), cast(BIASES, BIASES_CAST, "float16")]
# Instructions, outputs, how many products are expanded, which constants are still read.
PROGRAMS: dict[str, tuple[list[Node], list[Tid], int, set[int]]] = {
    "plain": ([product(OUT)], [OUT], 1, set()),
    "twice": ([product(OUT), product(OTHER)], [OUT, OTHER], 2, set()),
    "rounded": ([*HALVES, product(OUT, scales=CAST, biases=BIASES_CAST)], [OUT], 1, set()),
    "one_rounded": ([HALVES[0], product(OUT, scales=CAST)], [OUT], 1, set()),
    "rounded_and_returned": ([HALVES[0], product(OUT, scales=CAST)], [OUT, CAST], 1, {1}),
    "read_elsewhere": (
        [product(OUT), make_node("AddNode", a=SCALES, b=BIASES, out=OTHER)],
        [OUT, OTHER],
        1,
        {1, 2},
    ),
    "computed": ([make_node("AbsNode", x=SCALES, out=CAST), product(OUT, scales=CAST)], [OUT], 0, {0, 1, 2}),
}


def constants() -> dict[int, mx.array]:
    mx.random.seed(3)
    return dict(enumerate(mx.quantize(mx.random.normal((16, 64)), group_size=32, bits=4)))


def program(nodes: list[Node], outputs: list[Tid]) -> Graph:
    return assembled([nodes], [X], outputs, DESCRIBED, [described_as("float32[0..20, 64]")])


def results(compiled: CompiledProgram, rows: int) -> list[mx.array]:
    mx.random.seed(rows)
    return compiled([mx.random.normal((rows, 64))])


@pytest.mark.parametrize("name", PROGRAMS)
def test_expanded_products_are_the_stored_ones(name: str) -> None:
    nodes, outputs, number, read = PROGRAMS[name]
    graph = program(nodes, outputs)
    expansion = expand(graph, constants(), {})
    assert (len(expansion.factors), set(expansion.constants)) == (number, read)
    stored, expanded = CompiledProgram(graph, constants()), CompiledProgram(graph, constants(), expansion=expansion)
    for rows in (1, 3, 20):
        for got, wanted in zip(results(expanded, rows), results(stored, rows), strict=True):
            assert got.dtype == wanted.dtype
            assert mx.allclose(got, wanted, rtol=1e-5, atol=1e-5).item()


def test_programs_share_what_is_expanded() -> None:
    shared: dict[tuple[Any, ...], mx.array] = {}
    for name in ("plain", "twice", "read_elsewhere"):
        expand(program(*PROGRAMS[name][:2]), constants(), shared)
    assert len(shared) == 1
    expand(program(*PROGRAMS["rounded"][:2]), constants(), shared)
    assert len(shared) == 2


def test_a_constant_that_the_init_chain_writes_is_not_expanded() -> None:
    graph = program(*PROGRAMS["plain"][:2])
    graph.instruction_chains.append(InstructionChain([make_node("IdCopyNode", x=BIASES, out=SCALES)]))
    graph.init_chain_idx = 1
    expansion = expand(graph, constants(), {})
    assert not expansion.factors
    assert set(expansion.constants) == {0, 1, 2}


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_module, "MEMORY_BYTES", 4 * 16 * 64 - 1)
    with pytest.raises(
        ProgramError, match=r"take 4096 bytes or more, there are 4095: load it with cpu_weights='stored'"
    ):
        expand(program(*PROGRAMS["plain"][:2]), constants(), {})
