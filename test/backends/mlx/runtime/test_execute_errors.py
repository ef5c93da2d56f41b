"""Errors around ``execute``: they surface as themselves, say what was expected, and leave the method usable."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.backends.mlx.program import (
    Graph,
    InstructionChain,
    ProgramError,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    make_node,
    write_payload,
)
from executorch_mlx.backends.mlx.runtime.delegate import Delegate
from executorch_mlx.backends.mlx.runtime.kernels import KERNELS
from executorch_mlx.extension.llm.cache import CacheSession, build
from oracles.small_programs import (
    Function,
    affine,
    cache_config,
    export,
    export_function,
    pointwise,
    rows,
    tiny_lm,
    with_damaged_payload,
)

TOKENS, POSITIONS = torch.tensor([[1, 2, 3]]), torch.arange(3)
FLOAT32 = 6


class InjectedError(Exception):
    """Raised by a test inside the delegate."""


def fail_in_multiply(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> dict[str, bool]:
    """Let programs loaded from now on fail in their multiplications, as long as the returned switch is on."""
    original, switch = KERNELS["MultiplyNode"], {"on": True}

    def row(node: Any, at: Any) -> Any:
        step = original(node, at)

        def failing_step(env: Any) -> None:
            if switch["on"]:
                raise error
            step(env)

        return failing_step

    monkeypatch.setitem(KERNELS, "MultiplyNode", row)
    return switch


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what the package has logged as errors; exporting a program logs warnings."""
    return [record for record in caplog.records if record.name == "executorch_mlx" and record.levelno >= logging.ERROR]


# -- how an exception travels ------------------------------------------------------


@pytest.mark.parametrize(
    "error", [InjectedError("by the test"), ValueError("by the test"), KeyboardInterrupt("by the test")]
)
def test_execute_when_the_delegate_raises_raises_the_same_exception_from_executorchs(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_in_multiply(monkeypatch, error)
    program = load_program(pointwise())
    with pytest.raises(type(error), match="by the test") as raised:
        program.load_method("forward").execute([torch.ones(2, 3)])
    assert raised.value is error
    assert type(error.__cause__) is RuntimeError
    assert errors_logged(caplog) == []


def test_execute_after_a_failed_one_gives_the_right_result(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = fail_in_multiply(monkeypatch, InjectedError("by the test"))
    program = load_program(pointwise())
    method = program.load_method("forward")
    for num_rows in (2, 5, 1):
        x = torch.rand(num_rows, 3)
        switch["on"] = True
        with pytest.raises(InjectedError, match="by the test"):
            method.execute([x])
        switch["on"] = False
        assert torch.equal(method.execute([x])[0], x * 2)


def test_execute_refused_by_executorch_after_a_failed_delegate_does_not_raise_the_delegates_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_in_multiply(monkeypatch, InjectedError("by the test"))
    program = load_program(pointwise())
    method = program.load_method("forward")
    with pytest.raises(InjectedError, match="by the test"):
        method.execute([torch.ones(2, 3)])
    with pytest.raises(ValueError, match="takes 1 inputs, got 0"):
        method.execute([])


def test_stock_runtime_when_the_delegate_raises_raises_runtime_error_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = InjectedError("by the test")
    switch = fail_in_multiply(monkeypatch, error)
    program = Runtime.get().load_program(pointwise())
    method = program.load_method("forward")
    assert method is not None
    with pytest.raises(RuntimeError, match="error 0x1"):
        method.execute([torch.ones(2, 3)])
    (record,) = errors_logged(caplog)
    assert "InjectedError: by the test" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    switch["on"] = False
    assert torch.equal(method.execute([torch.ones(2, 3)])[0], torch.full((2, 3), 2.0))


def test_stock_runtime_with_a_damaged_payload_raises_runtime_error_and_logs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Runtime.get().load_program(with_damaged_payload(affine()))
    with pytest.raises(RuntimeError, match="0x:30"):
        program.load_method("forward")
    (record,) = errors_logged(caplog)
    assert "loading an MLX delegate failed: ProgramError: not an MLX delegate payload" in record.getMessage()


def test_stock_runtime_and_load_program_side_by_side_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "affine.pte").write_bytes(affine())
    x = torch.rand(3, 4)
    stock, ours = Runtime.get().load_program(tmp_path / "affine.pte"), load_program(tmp_path / "affine.pte")
    method = stock.load_method("forward")
    assert method is not None
    assert torch.equal(method.execute([x])[0], ours.load_method("forward").execute([x])[0])


# -- inputs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([torch.ones(2, 4, dtype=torch.float16)], TypeError, "input 0: expected float32, got float16"),
        ([torch.ones(2, 4, dtype=torch.int64)], TypeError, "input 0: expected float32, got int64"),
        ([], ValueError, "takes 1 inputs, got 0"),
        ([torch.ones(2, 4)] * 2, ValueError, "takes 1 inputs, got 2"),
        ([torch.ones(4)], ValueError, r"input 0: expected 2 dimensions, got shape \[4\]"),
        ([torch.ones(1, 2, 4)], ValueError, r"input 0: expected 2 dimensions, got shape \[1, 2, 4\]"),
        ([torch.ones(17, 4)], ValueError, r"input 0: shape \[17, 4\] exceeds the program's bound \[16, 4\]"),
        ([torch.ones(2, 5)], ValueError, "5"),
        ([3], TypeError, "input 0: expected float32"),
        ([None], TypeError, "input 0: expected float32"),
        (
            [torch.ones(4, 2).T],
            ValueError,
            r"input 0: expected a contiguous tensor, got shape \[2, 4\] with strides \[1, 2\]",
        ),
    ],
    ids=[
        "float16",
        "int64",
        "none given",
        "too many",
        "rank too low",
        "rank too high",
        "too many rows",
        "static dimension",
        "number for a tensor",
        "None for a tensor",
        "not contiguous",
    ],
)
def test_execute_with_a_wrong_input_says_what_was_expected_and_runs_afterwards(
    inputs: list[Any], error: type[Exception], message: str
) -> None:
    program = load_program(affine())
    method = program.load_method("forward")
    expected = method.execute([torch.ones(3, 4)])[0]
    with pytest.raises(error, match=message):
        method.execute(inputs)
    assert torch.equal(method.execute([torch.ones(3, 4)])[0], expected)


def test_execute_with_a_wrong_static_dimension_that_no_operator_minds_raises() -> None:
    """A sum over rows of 5 would fit the declared output, though the program was made for rows of 4."""
    program = load_program(export_function(lambda x: x.sum(-1), torch.zeros(2, 4), dynamic=True))
    with pytest.raises(ValueError, match=r"input 0.*\[2, 5\]"):
        program.load_method("forward").execute([torch.ones(2, 5)])


def test_execute_with_a_wrong_static_shape_raises() -> None:
    program = load_program(export_function(lambda x: x * 2, torch.zeros(2, 3)))
    with pytest.raises((ValueError, RuntimeError)):
        program.load_method("forward").execute([torch.ones(1, 3)])


def test_execute_with_a_tensor_where_a_number_is_due_raises_naming_the_input() -> None:
    program = load_program(export_function(lambda x, factor: x * factor, torch.zeros(2, 3), 2.5))
    method = program.load_method("forward")
    with pytest.raises((TypeError, ValueError, RuntimeError), match="input"):
        method.execute([torch.ones(2, 3), torch.ones(1)])
    assert torch.equal(method.execute([torch.ones(2, 3), 2.5])[0], torch.full((2, 3), 2.5))


def test_execute_without_rows_where_the_program_takes_one_or_more_leaves_the_method_usable() -> None:
    """Whether no rows are refused is open: torch's exporter does not hand that bound on to the delegate."""
    program = load_program(pointwise())
    method = program.load_method("forward")
    with contextlib.suppress(ValueError):
        assert method.execute([torch.ones(0, 3)])[0].shape == (0, 3)
    assert torch.equal(method.execute([torch.ones(4, 3)])[0], torch.full((4, 3), 2.0))


def test_execute_without_rows_where_the_program_allows_it_returns_none() -> None:
    module = Function(lambda x: x * 2)
    program = load_program(export({"forward": (module, (torch.zeros(2, 3),), ({0: rows(least=0)},))}))
    method = program.load_method("forward")
    for num_rows in (3, 0, 1):
        assert torch.equal(method.execute([torch.ones(num_rows, 3)])[0], torch.full((num_rows, 3), 2.0))


# -- caches ------------------------------------------------------------------------


def test_execute_of_attention_without_a_session_raises_lookup_error() -> None:
    program = load_program(tiny_lm())
    with pytest.raises(LookupError, match="no session is active"):
        program.load_method("forward").execute([TOKENS, POSITIONS])


def test_execute_of_attention_with_an_eager_cache_raises_type_error() -> None:
    program = load_program(tiny_lm())
    method = program.load_method("forward")
    with (
        CacheSession(build("eager", "sequence", cache_config())) as session,
        pytest.raises(TypeError, match="build it for 'MLXBackend'"),
    ):
        method.execute([TOKENS, POSITIONS])
    assert session.control.position == 0


def test_execute_with_an_eager_cache_of_a_program_that_uses_none_runs() -> None:
    program = load_program(pointwise())
    with CacheSession(build("eager", "sequence", cache_config())):
        (out,) = program.load_method("forward").execute([torch.ones(2, 3)])
    assert torch.equal(out, torch.full((2, 3), 2.0))


# -- payloads that cannot be run ---------------------------------------------------


def unary_graph(kind: str, **fields: Any) -> Graph:
    """A graph of one instruction from its one input to its one output, float32 [2]."""
    meta = TensorMeta(shape=[ShapeDim(2)], scalar_type=FLOAT32, dim_order=[0])
    return Graph(
        version="1",
        num_input_tensors=1,
        num_output_tensors=1,
        instruction_chains=[InstructionChain([make_node(kind, x=Tid(0), out=Tid(1), **fields)])],
        input_map=[SlotVariant(0, SlotType.TensorSlot)],
        output_map=[SlotVariant(1, SlotType.TensorSlot)],
        tensor_meta=[meta, meta],
    )


def test_load_method_with_an_instruction_that_is_not_implemented_raises_naming_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(KERNELS, "MultiplyNode")
    program = load_program(pointwise())
    with pytest.raises(ProgramError, match="does not implement MultiplyNode"):
        program.load_method("forward")
    monkeypatch.undo()
    assert torch.equal(program.load_method("forward").execute([torch.ones(1, 3)])[0], torch.full((1, 3), 2.0))


def test_delegate_with_an_instruction_that_is_not_implemented_raises_naming_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = write_payload(unary_graph("AbsNode"))
    Delegate(payload, None, None)
    monkeypatch.delitem(KERNELS, "AbsNode")
    with pytest.raises(ProgramError, match="does not implement AbsNode"):
        Delegate(payload, None, None)


def test_delegate_with_an_instruction_that_the_format_does_not_know_raises() -> None:
    payload = bytearray(write_payload(unary_graph("NegNode")))
    renumbered = write_payload(unary_graph("AbsNode"))
    (tag_at,) = (at for at, (a, b) in enumerate(zip(payload, renumbered, strict=True)) if a != b)
    payload[tag_at] = 255
    with pytest.raises(ProgramError, match="unknown instruction 255"):
        Delegate(bytes(payload), None, None)


def test_delegate_of_another_format_version_raises() -> None:
    graph = unary_graph("NegNode")
    graph.version = "2"
    with pytest.raises(ProgramError, match="version: expected '1', got '2'"):
        Delegate(write_payload(graph), None, None)
