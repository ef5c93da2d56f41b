"""Indices past the end of what they index: of inputs, of constants, and computed by the program itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.program import Node, ProgramError, Tid, make_node
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from oracles.hand_built import assembled, described, hand_built, slot_variant

X, INDEX, UPDATE, OUT, COMPUTED = map(Tid, range(5))
TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)

# What reads or writes four rows at an index, with the shape of the index and the least and greatest that may be given.
READERS: dict[str, tuple[Callable[[Tid], Node], tuple[int, ...], int, int]] = {
    "take": (lambda i: make_node("TakeNode", x=X, index=i, out=OUT, axis=0), (2,), -4, 3),
    "take_along": (lambda i: make_node("TakeAlongAxisNode", x=X, indices=i, out=OUT, axis=0), (2, 3), -4, 3),
    "gather": (
        lambda i: make_node("GatherNode", x=X, indices=[i], out=OUT, axes=[0], slice_sizes=[2, 3]),
        (2,),
        -4,
        2,
    ),
    "index_copy": (lambda i: make_node("IndexCopyNode", dst=X, update=UPDATE, indices=i, out=OUT, axis=0), (2,), -4, 3),
    "scatter_add": (
        lambda i: make_node("ScatterAddNode", x=X, indices=i, updates=UPDATE, out=OUT, axis=0),
        (2, 3),
        -4,
        3,
    ),
}
READERS_BY_NAME = pytest.mark.parametrize("name", READERS)


def run(name: str, index: int, source: str) -> tuple[CompiledProgram, list[Any]]:
    """Run a reader on indices that are all the same; what it computed is evaluated, and not yet checked."""
    make, shape, _, _ = READERS[name]
    array = mx.full(shape, index, dtype=mx.int64)
    table, update = mx.array(TABLE), mx.ones((2, 3))
    if source == "constant":
        # Constants come first: the table is moved behind them.
        graph = hand_built(
            [[make_node("IdCopyNode", x=Tid(1), out=Tid(5)), *_moved(make(Tid(0)))]],
            [Tid(1), Tid(2)],
            [OUT],
            [described(shape, "int64")],
        )
        program, inputs = CompiledProgram(graph, {0: array}), [table, update]
    else:
        nodes = [make_node("NegNode", x=INDEX, out=COMPUTED), make(COMPUTED)]
        graph = hand_built([nodes if source == "computed" else [make(INDEX)]], [X, INDEX, UPDATE], [OUT])
        given = -array if source == "computed" else array
        program, inputs = CompiledProgram(graph, {}), [table, given, update]
    outputs = program(inputs)
    mx.eval(outputs, program.pending())
    return program, outputs


def _moved(node: Node) -> list[Node]:
    """Return a node that reads the table from where it was copied to."""
    for name, slot in list(node.slots()):
        if slot == X and name in ("x", "dst"):
            setattr(node, name, Tid(5))
    return [node]


@READERS_BY_NAME
@pytest.mark.parametrize("source", ["input", "constant"])
def test_index_that_is_there_is_compared_before_it_is_used(name: str, source: str) -> None:
    *_, low, high = READERS[name]
    for index in (low, high):
        run(name, index, source)
    for index in (low - 1, high + 1, 10**9, -(10**9)):
        with pytest.raises(IndexError, match=f"index outside {low}..{high}: they go from {index}"):
            run(name, index, source)


@READERS_BY_NAME
def test_computed_index_is_confined_and_reported(name: str) -> None:
    *_, low, high = READERS[name]
    for index in (low, high):
        program, _ = run(name, index, "computed")
        program.check()
    for index, nearest in ((low - 1, low), (high + 1, high), (10**9, high)):
        program, (got,) = run(name, index, "computed")
        _, (expected,) = run(name, nearest, "input")
        assert np.array_equal(np.array(got), np.array(expected))
        with pytest.raises(IndexError, match=f"index outside {low}..{high}: they go from {index}"):
            program.check()


def test_an_axis_without_elements_has_no_index() -> None:
    graph = hand_built(
        [[make_node("NegNode", x=INDEX, out=COMPUTED), READERS["take_along"][0](COMPUTED)]], [X, INDEX], [OUT]
    )
    with pytest.raises(IndexError, match="no elements"):
        CompiledProgram(graph, {})([mx.zeros((0, 3)), mx.zeros((2, 3), dtype=mx.int64)])


@pytest.mark.parametrize("source", ["input", "computed"])
def test_an_unsigned_index_does_not_wrap_around(source: str) -> None:
    # As 64 bits with a sign it is -1, which counts from the end.
    copy = make_node("BitwiseOrNode", a=INDEX, b=INDEX, out=COMPUTED)
    nodes = [copy, READERS["take"][0](COMPUTED)] if source == "computed" else [READERS["take"][0](INDEX)]
    program = CompiledProgram(hand_built([nodes], [X, INDEX], [OUT]), {})

    def call(index: int) -> mx.array:
        (out,) = program([mx.array(TABLE), mx.array(np.full(2, index, dtype=np.uint64))])
        mx.eval(out, program.pending())
        program.check()
        return out

    assert np.array_equal(np.array(call(3)), TABLE[[3, 3]])
    with pytest.raises(IndexError, match=r"index outside -4\.\.3"):
        call(2**64 - 1)


@pytest.mark.parametrize("step", [1, 10**8])
def test_constant_index_that_the_init_chain_changes_is_compared_each_time(step: int) -> None:
    # Slots: index, table, what the scan goes over, the step by which the index grows, the buffer.
    index, table, rounds, grown, buffer, out, sliced, taken = map(Tid, range(8))
    body = [
        make_node("TakeNode", x=table, index=index, axis=0, out=taken),
        make_node("AddNode", a=index, b=grown, out=index),
    ]
    init = [
        make_node(
            "ScanNode", originals=[rounds], sliced=[sliced], outputs=[taken], carry=[], body_chain_idx=2, scan_axis=0
        ),
        make_node("IdCopyNode", x=taken, out=buffer),
    ]
    shapes = (("int32", 1), ("float32", 4), ("float32", 3), ("int32", 1))
    graph = assembled(
        [[make_node("IdCopyNode", x=buffer, out=out)], init, body], [], [out], [described([n], d) for d, n in shapes]
    )
    graph.num_mutable_buffer_tensors, graph.num_temp_tensors = 1, graph.num_temp_tensors - 1
    graph.mutable_buffer_map = [slot_variant(buffer)]
    graph.tensor_meta.append(described([3, 1], "float32"))
    graph.init_chain_idx = 1
    numbers = [mx.array([0]), mx.array([1.0, 2.0, 3.0, 4.0]), mx.zeros(3), mx.array([step])]
    if step == 1:
        (got,) = CompiledProgram(graph, dict(enumerate(numbers)))([])
        assert got.tolist() == [[1.0], [2.0], [3.0]]
    else:
        with pytest.raises(IndexError, match=r"index outside -4\.\.3"):
            CompiledProgram(graph, dict(enumerate(numbers)))


def test_computed_index_past_the_end_is_an_error_of_the_call_and_the_next_one_runs() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, places + 1)

    x, good, bad = torch.arange(12.0).view(4, 3), torch.tensor([0, 2]), torch.tensor([0, 3])
    exported = torch.export.export(Module(), (x, good))
    program = load_program(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    method = program.load_method("forward")
    for _ in range(2):
        torch.testing.assert_close(method.execute([x, good])[0], x[[1, 3]])
        with pytest.raises(IndexError, match=r"index outside -4\.\.3: they go from 1 to 4"):
            method.execute([x, bad])


# -- kernels that a program brings ------------------------------------------------


def metal_program() -> Any:
    node = make_node(
        "MetalKernelNode",
        name="doubled",
        source="out[i] = N * x[i];",
        inputs=[Tid(0)],
        outputs=[Tid(1)],
        grid=[4, 1, 1],
        threadgroup=[4, 1, 1],
        input_names=["x"],
        output_names=["out"],
        output_shapes_flat=[2, 2],
        output_shape_lengths=[2],
        output_dtypes=[6],
        template_arg_names=["N", "F", "T"],
        template_arg_kinds=[0, 1, 2],
        template_arg_values=[2, 1, 6],
    )
    return hand_built([[node]], [Tid(0)], [Tid(1)])


def test_metal_source_is_refused_by_the_kernel_s_name_unless_it_is_allowed_where_metal_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(ProgramError, match=r"doubled.*allow_kernels=True"):
        CompiledProgram(metal_program(), {})
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(ProgramError, match=r"doubled.*no Metal here"):
        CompiledProgram(metal_program(), {}, allow_kernels=True)


def test_allowed_kernel_gets_what_the_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # Metal is on Apple's machines only: what MLX is asked for is compared.
    made: list[dict[str, Any]] = []
    called: list[dict[str, Any]] = []

    def metal_kernel(**options: Any) -> Callable[..., list[mx.array]]:
        made.append(options)

        def kernel(**operands: Any) -> list[mx.array]:
            called.append(operands)
            return [2 * operands["inputs"][0].reshape(operands["output_shapes"][0])]

        return kernel

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    (got,) = CompiledProgram(metal_program(), {}, allow_kernels=True)([mx.array([1.0, 2.0, 3.0, 4.0])])
    assert got.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    (options,), (operands,) = made, called
    assert (options["name"], options["source"], options["header"]) == ("doubled", "out[i] = N * x[i];", "")
    assert (options["input_names"], options["output_names"]) == (["x"], ["out"])
    assert operands["template"] == [("N", 2), ("F", True), ("T", mx.float32)]
    assert (operands["grid"], operands["threadgroup"]) == ((4, 1, 1), (4, 1, 1))
    assert (operands["output_shapes"], operands["output_dtypes"]) == ([(2, 2)], [mx.float32])
    assert "init_value" not in operands
