"""Outlining: a program that goes to the delegate whole crosses ExecuTorch's exporter as one call.

Each of the exporter's passes traces every node anew with symbolic shapes, some milliseconds each: half a minute for a
language model of 30 layers. Where every call of a program has a lowering, and the outputs' shapes follow from the
inputs' plainly, the graph is put aside and one operator stands for it until ``preprocess`` lowers it.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import uuid
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from .graph import copy_program, is_functional, keep_names, target_of
from .passes.evaluate import constants_of

_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, eq=False)
class Outlined:
    """A graph put aside with its constants; it is found by its key for as long as this object is held.

    Attributes:
        key: names it in the call.
        program: the graph.
        inputs: the user's inputs that it uses, by name; the call's arguments.
        outputs: of each its dtype and its shape, as JSON: a size, or (input, dimension, a, b) for a * that size + b.
    """

    key: str
    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: str


_outlined: WeakValueDictionary[str, Outlined] = WeakValueDictionary()


@functools.cache
def _operator(num_outputs: int) -> torch._ops.OpOverload:
    """Return the operator that stands for graphs of so many outputs.

    An operator per number: ExecuTorch's verifier makes the inputs of one that returns a list static.
    """
    name = f"executorch_mlx::outlined_{num_outputs}"
    returns = ", ".join(["Tensor"] * num_outputs)
    torch.library.define(name, f"(str key, Tensor[] inputs, str outputs) -> ({returns})")
    torch.library.impl(name, "CompositeExplicitAutograd", _run)
    torch.library.register_fake(name, _fake)
    operator_: torch._ops.OpOverload = getattr(torch.ops.executorch_mlx, f"outlined_{num_outputs}").default
    return operator_


def _aside(key: str) -> Outlined:
    aside = _outlined.get(key)
    if aside is None:
        raise RuntimeError(
            "this program stands for a graph that its MLXPartitioner held, which is gone: keep the partitioner for as"
            " long as the program is lowered or run in Python, or say MLXPartitioner(outline=False)"
        )
    return aside


def _run(key: str, inputs: list[torch.Tensor], outputs: str) -> Any:
    """Run the graph put aside under ``key``."""
    aside = _aside(key)
    given = {**constants_of(aside.program), **dict(zip(aside.inputs, inputs, strict=True))}
    arguments = [given.get(node.name) for node in aside.program.graph.nodes if node.op == "placeholder"]
    results = [result.clone() for result in aside.program.graph_module(*arguments)]
    return results[0] if len(results) == 1 else tuple(results)


def _fake(key: str, inputs: list[torch.Tensor], outputs: str) -> Any:
    # Shapes are asked for long after the graph has been lowered, and may be gone.
    results = [
        inputs[0].new_empty(
            [size if isinstance(size, int) else size[2] * inputs[size[0]].shape[size[1]] + size[3] for size in shape],
            dtype=getattr(torch, dtype),
        )
        for dtype, shape in json.loads(outputs)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def outline(program: ExportedProgram) -> tuple[ExportedProgram, Outlined] | None:
    """Put a program's graph aside, with its constants.

    Args:
        program: every call of it has a lowering. It belongs to the result.

    Returns:
        A program of the same inputs and outputs that is one call, and the graph, to be held until it is
        lowered; or None if the graph changes an operand, an output is an input, or an output's size is none that
        grows with one size of an input.
    """
    signature = program.graph_signature
    kinds = {spec.kind for spec in signature.input_specs} - {InputKind.USER_INPUT, *_CONSTANT_KINDS}
    if kinds or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    given = set(signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.name in given and node.users]
    results = program.graph.output_node().args[0]
    are_new = all(isinstance(node, Node) and node.op == "call_function" for node in results)
    if not inputs or not are_new or len(set(results)) != len(results) or not is_functional(program):
        return None
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in (*inputs, *results)):
        return None
    sources = {
        size.node.expr: (index, dim)
        for index, node in enumerate(inputs)
        for dim, size in enumerate(node.meta["val"].shape)
        if not isinstance(size, int)
    }
    outputs = [_described(node.meta["val"], sources) for node in results]
    if any(None in shape for _, shape in outputs):
        return None
    aside = Outlined(uuid.uuid4().hex, program, tuple(node.name for node in inputs), json.dumps(outputs))
    _outlined[aside.key] = aside
    return _calling(aside), aside


def is_outlined(node: Any) -> bool:
    """Whether a node calls a graph put aside."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.startswith("executorch_mlx::outlined_")


def restored(program: ExportedProgram) -> ExportedProgram:
    """Return the graph that a delegated program calls, with the program's order of inputs and outputs.

    A program that calls none is returned as it is.

    Raises:
        RuntimeError: there is more in it than the call.
    """
    calls = [node for node in program.graph.nodes if is_outlined(node)]
    if not calls:
        return program
    call, *others = calls
    results = program.graph.output_node().args[0]
    is_plain = not others and all(
        result is call or (target_of(result) is operator.getitem and result.args[0] is call) for result in results
    )
    if not is_plain or any(node.op == "placeholder" and node not in call.args[1] for node in program.graph.nodes):
        raise RuntimeError(
            "a pass has changed a program that goes to the delegate whole, without seeing its operators: use"
            " MLXPartitioner(outline=False)"
        )
    key, arguments, _ = call.args
    aside = _aside(key)
    names = dict(zip(arguments, aside.inputs, strict=True))
    order = [names[node] for node in program.graph.nodes if node.op == "placeholder"]
    # The single result of a call is itself; several are picked from a tuple.
    picks = [0 if result is call else result.args[1] for result in results]
    restored = copy_program(aside.program)
    graph = restored.graph
    places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name in order:
        first.prepend(places[name])
    for spec in restored.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT and spec.arg.name not in order:
            graph.erase_node(places[spec.arg.name])
    output = graph.output_node()
    output.args = (tuple(output.args[0][index] for index in picks),)
    return restored


def _described(value: torch.Tensor, sources: dict[Any, tuple[int, int]]) -> tuple[str, list[Any]]:
    shape = [size if isinstance(size, int) else _followed(size.node.expr, sources) for size in value.shape]
    return str(value.dtype).removeprefix("torch."), shape


def _followed(expression: Any, sources: dict[Any, tuple[int, int]]) -> tuple[int, int, int, int] | None:
    """Return the input and the dimension whose size gives a size, its factor and what is added; None if none does."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    if symbol not in sources or not expression.is_polynomial(symbol) or expression.as_poly(symbol).degree() != 1:
        return None
    factor, added = expression.as_poly(symbol).all_coeffs()
    return (*sources[symbol], int(factor), int(added)) if factor.is_integer and added.is_integer else None


def _calling(aside: Outlined) -> ExportedProgram:
    """Return a program of the same inputs and outputs that calls the graph; it has no constants."""
    program = aside.program
    signature = copy.deepcopy(program.graph_signature)
    signature.input_specs[:] = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    given = {spec.arg.name for spec in signature.input_specs}
    graph = Graph()
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in given]
    places = {node.name: graph.node_copy(node) for node in placeholders}
    keep_names(placeholders, places.values())
    results = program.graph.output_node().args[0]
    arguments = [places[name] for name in aside.inputs]
    call = graph.call_function(_operator(len(results)), (aside.key, arguments, aside.outputs))
    # What a delegate gives is contiguous.
    values = [node.meta["val"].contiguous() for node in results]
    call.meta["val"] = tuple(values)
    picks = [call]
    if len(results) > 1:
        picks = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for pick, value, spec in zip(picks, values, signature.output_specs, strict=True):
        pick.meta["val"] = value
        spec.arg.name = pick.name
    graph.output(tuple(picks))
    return program._update(GraphModule({}, graph), signature, state_dict={}, constants={})
