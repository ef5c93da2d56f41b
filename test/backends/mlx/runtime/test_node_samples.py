"""Every node kind against eager torch; the state that programs keep between runs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from executorch_mlx.backends.mlx.program import (
    Graph,
    InstructionChain,
    Node,
    ProgramError,
    ShapeDim,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    verify_graph,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from oracles.hand_built import described, hand_built, slot_variant
from oracles.sample_graphs import sample_graph
from samples.nodes import SAMPLES, SIZES, TOLERANCE, Sample, code, dequantized, packed

pytestmark = pytest.mark.usefixtures("on_cpu")

CASES = [pytest.param(s, d, id=f"{s.kind}-{s.label}-{str(d)[6:]}") for s in SAMPLES for d in s.dtypes]

# Whose zeros may have another sign than torch's, whose own differ between processors for the last two:
# docs/differences.md.
OWN_ZEROS = {"ClipNode", "CumsumNode", "ErfNode", "LogAddExpNode", "MaximumNode", "MinimumNode", "SinNode"}
OWN_ZEROS |= {"ConvTranspose3DNode", "GeluNode"}


def to_mlx(tensor: torch.Tensor) -> mx.array:
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def to_torch(array: mx.array) -> torch.Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def program(sample: Sample) -> CompiledProgram:
    """Compile a sample's graph."""
    return CompiledProgram(sample_graph(sample), {})


def assert_same(got: Any, expected: Any, tolerance: float) -> None:
    """Same dtype, shape and numbers, within a multiple of the dtype's tolerance."""
    if not isinstance(expected, torch.Tensor):
        assert (type(got), got) == (type(expected), expected)
        return
    assert (got.dtype, tuple(got.shape)) == (expected.dtype, tuple(expected.shape))
    bound = TOLERANCE.get(expected.dtype, 0) * tolerance
    kind = torch.float64 if expected.dtype.is_floating_point else torch.int64
    torch.testing.assert_close(got.to(kind), expected.to(kind), rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize(("sample", "dtype"), CASES)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_node_computes_what_torch_does(sample: Sample, dtype: torch.dtype) -> None:
    compiled = program(sample)
    for size in SIZES:
        tensors = sample.make_inputs(dtype, size)
        expected = sample.expected(*tensors, *sample.values)
        results = compiled([*map(to_mlx, tensors), *sample.values])
        wanted = expected if isinstance(expected, list) else [expected]
        assert len(results) == len(wanted)
        for result, want in zip(results, wanted, strict=True):
            got = to_torch(result) if isinstance(result, mx.array) else result
            if sample.seen is not None:
                got, want = sample.seen(got, *tensors), sample.seen(want, *tensors)
            assert_same(got, want, sample.tolerance)
            if sample.kind not in OWN_ZEROS and isinstance(want, torch.Tensor):
                zeros = want == 0
                assert torch.equal(got.signbit() & zeros, want.signbit() & zeros), "zeros of another sign"


def test_codes_come_back_as_they_were_packed() -> None:
    words = packed(2, 64, bits=4)(torch.Generator().manual_seed(0), torch.float32, 0)
    ones = torch.ones(2, 2)
    codes = dequantized(words, ones, 0 * ones, 4, 32)
    again = sum(codes.long().reshape(2, 8, 8)[..., place] << (4 * place) for place in range(8))
    assert torch.equal(again, words.long())


# -- random bits --------------------------------------------------------------


def random_bits(shape: list[int], width: int, seed: int | None) -> torch.Tensor:
    fields = {"shape": shape, "width": width, **({} if seed is None else {"seed": Vid(0)})}
    values = () if seed is None else (seed,)
    (bits,) = program(Sample("RandomBitsNode", lambda: None, fields=fields, values=values))([*values])
    return to_torch(bits).long()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_random_bits_are_spread_and_follow_from_their_seed(width: int) -> None:
    bits = random_bits([100, 101], width, 7)
    assert torch.equal(bits, random_bits([100, 101], width, 7))
    assert not torch.equal(bits, random_bits([100, 101], width, 8))
    for bit in range(8 * width):
        assert 0.47 < ((bits >> bit) & 1).double().mean() < 0.53
    assert len(bits.unique()) > (250 if width == 1 else 9000)


def test_random_bits_without_a_seed_differ_from_run_to_run() -> None:
    assert not torch.equal(random_bits([64], 4, None), random_bits([64], 4, None))
    assert random_bits([0, 3], 4, 1).shape == (0, 3)


# -- constants ------------------------------------------------------------------


def test_view_of_a_constant_in_an_input_s_slot_is_what_runs_after_it_read() -> None:
    nodes = [
        make_node("TransposeNode", x=Tid(0), out=Tid(1), perm=[1, 0]),
        make_node("AddNode", a=Tid(1), b=Tid(1), out=Tid(2)),
    ]
    graph = hand_built([nodes], [Tid(1)], [Tid(2)], [described([2, 3], "float32")])
    (got,) = CompiledProgram(graph, {0: mx.arange(6.0).reshape(2, 3)})([mx.zeros((1, 1))])
    assert got.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


# -- mutable buffers ------------------------------------------------------------


def counting(after: list[Node], init: list[Node] | None = None) -> CompiledProgram:
    """A program that adds its input, slot 0, to its buffer, slot 1, and puts out the sum; ``after`` follows that."""
    meta = TensorMeta(shape=[ShapeDim(2)], scalar_type=SCALAR_TYPE_CODES["float32"])
    nodes = [make_node("AddNode", a=Tid(1), b=Tid(0), out=Tid(1)), *after]
    graph = Graph(
        version="1",
        num_input_tensors=1,
        num_mutable_buffer_tensors=1,
        num_temp_tensors=1,
        instruction_chains=[InstructionChain(nodes), *([] if init is None else [InstructionChain(init)])],
        init_chain_idx=-1 if init is None else 1,
        input_map=[slot_variant(Tid(0))],
        output_map=[slot_variant(Tid(1))],
        mutable_buffer_map=[slot_variant(Tid(1))],
        tensor_meta=[None, meta],
    )
    verify_graph(graph)
    return CompiledProgram(graph, {})


def test_buffer_keeps_what_a_run_wrote_once_that_is_committed() -> None:
    compiled, one = counting([]), mx.array([1.0, 2.0])
    for _ in range(2):
        (got,) = compiled([one])
        assert got.tolist() == [1.0, 2.0]
    (written,) = compiled.pending()
    assert written.tolist() == [1.0, 2.0]
    compiled.commit()
    assert compiled.pending() == []
    for expected in ([2.0, 4.0], [3.0, 6.0]):
        (got,) = compiled([one])
        assert got.tolist() == expected
        compiled.commit()


def test_failed_run_changes_no_buffer() -> None:
    compiled = counting([make_node("ReshapeNode", x=Tid(0), out=Tid(2), shape=[2])])
    compiled([mx.array([1.0, 1.0])])
    compiled.commit()
    with pytest.raises(ValueError, match="ReshapeNode"):
        compiled([mx.array([[1.0, 1.0], [1.0, 1.0]])])
    compiled.commit()
    assert compiled([mx.array([1.0, 1.0])])[0].tolist() == [2.0, 2.0]


def test_failed_run_leaves_nothing_of_the_run_before_to_commit() -> None:
    compiled = counting([make_node("ReshapeNode", x=Tid(0), out=Tid(2), shape=[2])])
    compiled([mx.array([1.0, 1.0])])
    with pytest.raises(ValueError, match="ReshapeNode"):
        compiled([mx.array([[1.0, 1.0], [1.0, 1.0]])])
    assert compiled.pending() == []


def test_init_chain_fills_a_buffer() -> None:
    fill = make_node("FullNode", out=Tid(1), shape=[2], v=5.0, scalar_type=code(torch.float32))
    compiled = counting([], [fill])
    assert compiled([mx.array([1.0, 2.0])])[0].tolist() == [6.0, 7.0]


def test_metal_source_is_refused_by_the_kernel_s_name() -> None:
    node = make_node(
        "MetalKernelNode",
        name="my_kernel",
        source="",
        inputs=[Tid(0)],
        input_names=["x"],
        outputs=[Tid(1)],
        output_names=["y"],
        output_shapes_flat=[2],
        output_shape_lengths=[1],
        output_dtypes=[code(torch.float32)],
        grid=[1, 1, 1],
        threadgroup=[1, 1, 1],
    )
    graph = hand_built([[node]], [Tid(0)], [Tid(1)])
    with pytest.raises(ProgramError, match="my_kernel"):
        CompiledProgram(graph, {})
