"""A program whose scores give way to the index of the highest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import nn
from torch.export import ExportedProgram

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.passes.argmax_output import argmax_output
from oracles.small_programs import MAX_ROWS, Affine, Counting, Function, rows


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


def traced(module: nn.Module, *inputs: torch.Tensor, dynamic: bool = True) -> ExportedProgram:
    shapes: Any = ({0: rows()},) if dynamic else None
    shapes = {"inputs": shapes} if shapes and isinstance(module, Function) else shapes
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x * 2, (3, 5)),
        (lambda x: -x, (2, 3, 7)),
        (lambda x: x[:, None] @ x[:, :, None], (4, 6)),
        (lambda x: x.half() + 1, (3, 9)),
        (lambda x: (x * 10).to(torch.int64), (3, 9)),
        (lambda x: x, (3, 5)),
    ],
    ids=["two_axes", "three_axes", "one_score", "half_precision", "integers", "input"],
)
def test_argmax_output_gives_torch_s_index_at_each_size(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    program = argmax_output(traced(Function(function), scores(*shape)))
    program.validate()
    for n in (shape[0], 1, MAX_ROWS):
        x = scores(n, *shape[1:], seed=n)
        got = program.module()(x)
        assert got.dtype == torch.int64
        assert torch.equal(got, function(x).argmax(-1))
        assert torch.equal(program.graph_module(x)[0], got)


def test_argmax_output_of_one_axis_gives_a_number() -> None:
    x = scores(8)
    got = argmax_output(traced(Function(lambda x: x + 1), x, dynamic=False)).module()(x)
    assert (got.dtype, got.shape) == (torch.int64, ())
    assert got == x.argmax()


def test_argmax_output_of_an_input_that_is_named_like_python_s_own_is_right() -> None:
    linear, x = nn.Linear(4, 5), scores(3, 4)
    program = argmax_output(traced(linear, x))
    assert torch.equal(program.module()(x), linear(x).argmax(-1))


def test_argmax_output_of_equal_scores_is_the_first() -> None:
    program = argmax_output(traced(Function(lambda x: x * 1), scores(2, 5)))
    assert program.module()(torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0] * 5])).tolist() == [1, 0]


def test_argmax_output_leaves_the_given_program_as_it_was_and_shares_its_tensors() -> None:
    module, x = Affine(), scores(3, 4)
    program = traced(module, x)
    before = program.graph_module.code, str(program.graph), str(program.graph_signature)
    greedy = argmax_output(program)
    assert (program.graph_module.code, str(program.graph), str(program.graph_signature)) == before
    torch.testing.assert_close(program.module()(x), module(x))
    assert greedy.state_dict.keys() == program.state_dict.keys()
    for name, tensor in program.state_dict.items():
        assert greedy.state_dict[name].data_ptr() == tensor.data_ptr()


def test_argmax_output_names_its_output_in_the_signature() -> None:
    greedy = argmax_output(traced(Affine(), scores(3, 4)))
    (name,) = greedy.graph_signature.user_outputs
    (result,) = greedy.graph.output_node().args[0]
    assert result.name == name
    assert result.meta["val"].dtype == torch.int64
    assert result.meta["val"].ndim == 1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Function(lambda x: (x + 1, x + 2)), "expected a program with one output, got USER_OUTPUT, USER_OUTPUT"),
        (Function(lambda x: [x + 1, x + 2, x]), "one output"),
        (Function(lambda x: []), "got none"),
        (Counting(), "BUFFER_MUTATION"),
    ],
    ids=["two", "three", "none", "buffer"],
)
def test_argmax_output_of_another_number_of_outputs_is_refused(module: nn.Module, message: str) -> None:
    program = traced(module, scores(2, 3), dynamic=False).run_decompositions({})
    with pytest.raises(ValueError, match=message):
        argmax_output(program)


@pytest.mark.parametrize("outline", [True, False])
def test_argmax_output_exported_beside_the_original_gives_its_index(outline: bool) -> None:
    module, x = Affine(), scores(3, 4)
    program = traced(module, x)
    programs = {"forward": program, "greedy": argmax_output(program)}
    partitioners = {name: MLXPartitioner(outline=outline) for name in programs}
    edge = to_edge_transform_and_lower(
        programs,
        partitioner={name: [partitioner] for name, partitioner in partitioners.items()},
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    content = bytes(edge.to_executorch().buffer)
    assert all(partitioner.not_delegated == [] for partitioner in partitioners.values())
    # Both methods' weights are one.
    assert content.count(module.linear.weight.detach().numpy().tobytes()) == 1
    loaded = load_program(content)
    forward, greedy = loaded.load_method("forward"), loaded.load_method("greedy")
    for n in (3, 1, MAX_ROWS):
        x = scores(n, 4, seed=n) * 5
        expected = module(x).detach()
        torch.testing.assert_close(forward.execute([x])[0], expected)
        (index,) = greedy.execute([x])
        assert index.dtype == torch.int64
        assert torch.equal(index, expected.argmax(-1))
