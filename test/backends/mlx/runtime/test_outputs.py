"""Outputs of every kind: shapes that change, dtypes, inputs passed through, numbers, several delegates and programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executorch_mlx.backends.mlx import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID, MLXPartitioner, load_program
from executorch_mlx.backends.mlx.runtime import delegate
from executorch_mlx.extension.llm.cache import CacheSession, build
from oracles.small_programs import (
    Affine,
    Function,
    affine,
    cache_config,
    export,
    export_function,
    num_delegates,
    outside_the_delegate,
    pointwise,
    rows,
    tiny_lm,
)


def assert_equal(outputs: Any, expected: Any) -> None:
    """Values, dtypes and shapes."""
    assert len(outputs) == len(expected)
    for out, want in zip(outputs, expected, strict=True):
        if isinstance(want, torch.Tensor):
            assert (out.dtype, out.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(out, want)
        else:
            assert (type(out), out) == (type(want), want)


# -- shapes and dtypes ---------------------------------------------------------------


def test_execute_with_a_static_shape_returns_it_each_time() -> None:
    program = load_program(export_function(lambda x: x.T + 1, torch.zeros(2, 3)))
    method = program.load_method("forward")
    for _ in range(3):
        x = torch.rand(2, 3)
        assert_equal(method.execute([x]), [x.T + 1])


def test_execute_with_rows_that_grow_shrink_and_grow_returns_as_many() -> None:
    program = load_program(affine())
    method, eager = program.load_method("forward"), Affine()
    for num_rows in (2, 16, 1, 7, 16, 3):
        x = torch.rand(num_rows, 4)
        assert_equal(method.execute([x]), [eager(x).detach()])


def test_execute_with_more_rows_out_than_in_returns_all() -> None:
    program = load_program(export_function(lambda x: torch.cat([x, x + 1, x], 0), torch.zeros(2, 3), dynamic=True))
    method = program.load_method("forward")
    for num_rows in (2, 16, 1):
        x = torch.rand(num_rows, 3)
        assert_equal(method.execute([x]), [torch.cat([x, x + 1, x], 0)])


def test_execute_with_a_result_without_dimensions_returns_it() -> None:
    program = load_program(export_function(lambda x: x.sum([0, 1]), torch.zeros(2, 3)))
    assert_equal(program.load_method("forward").execute([torch.ones(2, 3)]), [torch.tensor(6.0)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32", "bool"])
def test_execute_with_inputs_and_outputs_of_a_dtype_keeps_it(dtype: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.logical_not(x) if x.dtype is torch.bool else x + x

    x = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, dtype))
    program = load_program(export_function(function, x, dynamic=True))
    method = program.load_method("forward")
    for part in (x, x[:1]):
        assert_equal(method.execute([part]), [function(part)])


def test_execute_with_outputs_of_several_dtypes_returns_each() -> None:
    def function(x: torch.Tensor) -> Any:
        return x > 0.5, x.to(torch.float16), x.to(torch.bfloat16), x.argmax(-1), x * 2

    x = torch.tensor([[0.25, 0.75], [1.5, 0.0]])
    program = load_program(export_function(function, x))
    assert_equal(program.load_method("forward").execute([x]), function(x))


def test_execute_returns_memory_of_its_own_each_time() -> None:
    program = load_program(pointwise())
    method = program.load_method("forward")
    (first,) = method.execute([torch.ones(2, 3)])
    (second,) = method.execute([torch.zeros(2, 3)])
    assert torch.equal(first, torch.full((2, 3), 2.0))
    assert torch.equal(second, torch.zeros(2, 3))


# -- what an output may be -----------------------------------------------------------


def shared_result(x: torch.Tensor) -> Any:
    """The same tensor twice, and a view of it."""
    y = x * 2
    return y, y, y.reshape(-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, x + 1),
        lambda x: (x + 1, x, x),
        shared_result,
        lambda x: (x.reshape(3, 2), x[:1]),
    ],
    ids=["input", "input twice", "result twice", "views of the input"],
)
def test_execute_with_outputs_that_share_a_value_returns_each(function: Any) -> None:
    x = torch.rand(2, 3)
    program = load_program(export_function(function, torch.zeros(2, 3)))
    assert_equal(program.load_method("forward").execute([x]), function(x))


class WithBuffer(torch.nn.Module):
    """Adds a buffer; returns it, as it is or computed from, as well."""

    def __init__(self, *, computed: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
        self._computed = computed

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.table, self.table * 1 if self._computed else self.table


@pytest.mark.parametrize("computed", [True, False])
def test_execute_with_an_output_that_is_constant_returns_it(computed: bool) -> None:
    module, x = WithBuffer(computed=computed), torch.rand(2, 3)
    program = load_program(export({"forward": (module, (x,), None)}))
    assert_equal(program.load_method("forward").execute([x]), module(x))


def test_execute_of_a_method_without_inputs_returns_its_result() -> None:
    program = load_program(export({"forward": (Function(lambda: torch.ones(3) + 1), (), None)}))
    assert_equal(program.load_method("forward").execute([]), [torch.full((3,), 2.0)])


def test_execute_with_a_size_among_the_outputs_returns_numbers() -> None:
    program = load_program(
        export_function(lambda x: (x + 1, x.shape[0], x.shape[0] * 2 + 1), torch.zeros(2, 3), dynamic=True)
    )
    method = program.load_method("forward")
    for num_rows in (2, 16, 1):
        x = torch.rand(num_rows, 3)
        assert_equal(method.execute([x]), (x + 1, num_rows, 2 * num_rows + 1))


def test_execute_with_a_number_read_from_an_input_uses_it() -> None:
    """The number is read outside the delegate and reaches it as a value."""
    x = torch.rand(2, 3)
    program = load_program(export_function(lambda x, y: x * y.item(), x, torch.tensor(4)))
    method = program.load_method("forward")
    for number in (4, 7, -2):
        assert_equal(method.execute([x, torch.tensor(number)]), [x * number])


def test_execute_with_a_fixed_number_among_the_inputs_takes_that_number() -> None:
    x = torch.rand(2, 3)
    program = load_program(export_function(lambda x, factor: x * factor, x, 2.5))
    assert_equal(program.load_method("forward").execute([x, 2.5]), [x * 2.5])


# -- several delegates, methods and programs -------------------------------------------


def test_execute_of_several_delegates_passes_results_between_them() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x * 2 + 1
        z = outside_the_delegate(y) * y
        return outside_the_delegate(z) - z, y

    content = export_function(function, torch.zeros(2, 4), dynamic=True)
    assert num_delegates(content) >= 2
    program = load_program(content)
    method = program.load_method("forward")
    for num_rows in (2, 16, 1, 5):
        x = torch.rand(num_rows, 4)
        assert_equal(method.execute([x]), function(x))


def test_program_whose_methods_share_weights_imports_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[int, ...]] = []
    original = delegate._import
    monkeypatch.setattr(delegate, "_import", lambda tensor: imported.append(tuple(tensor.shape)) or original(tensor))
    program = load_program(tiny_lm())
    forward = program.load_method("forward")
    num_weights = len(imported)
    assert num_weights >= 8
    greedy = program.load_method("forward_greedy")
    assert imported[num_weights:] == []
    tokens, positions = torch.tensor([[1, 2, 3, 4]]), torch.arange(4)
    with CacheSession(build("MLXBackend", "sequence", cache_config())) as session:
        (logits,) = forward.execute([tokens, positions])
        session.control.clear()
        (greediest,) = greedy.execute([tokens, positions])
    assert torch.equal(greediest, logits.argmax(-1))


def test_programs_loaded_together_keep_their_own_weights() -> None:
    modules = [Affine() for _ in range(3)]
    for index, module in enumerate(modules):
        torch.nn.init.constant_(module.linear.weight, float(index))
    programs = [
        load_program(export({"forward": (module, (torch.zeros(2, 4),), ({0: rows()},))})) for module in modules[1:]
    ]
    programs += [load_program(affine()), load_program(affine())]
    expected = [*modules[1:], Affine(), Affine()]
    methods = [program.load_method("forward") for program in programs]
    for num_rows in (1, 3):
        x = torch.rand(num_rows, 4)
        for method, module in zip(methods, expected, strict=True):
            assert_equal(method.execute([x]), [module(x).detach()])


def test_program_loaded_after_another_was_dropped_runs() -> None:
    for _ in range(3):
        program = load_program(affine())
        x = torch.rand(2, 4)
        assert_equal(program.load_method("forward").execute([x]), [Affine()(x).detach()])
        del program


# -- backend ids -------------------------------------------------------------------------


@pytest.mark.parametrize("backend_id", [UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID])
def test_program_exported_for_either_id_names_it_and_runs(backend_id: str) -> None:
    content = affine(backend_id)
    other = {UPSTREAM_BACKEND_ID: PLUGIN_BACKEND_ID, PLUGIN_BACKEND_ID: UPSTREAM_BACKEND_ID}[backend_id]
    assert backend_id.encode() in content
    assert other.encode() not in content
    program = load_program(content)
    x = torch.rand(3, 4)
    assert_equal(program.load_method("forward").execute([x]), [Affine()(x).detach()])


@pytest.mark.parametrize("backend_id", ["x", "", "mlxbackend"])
def test_partitioner_with_an_unknown_id_raises_naming_the_known(backend_id: str) -> None:
    with pytest.raises(ValueError, match=rf"expected one of MLXBackend, MLX_Plugin, got '{backend_id}'"):
        MLXPartitioner(backend_id=backend_id)
