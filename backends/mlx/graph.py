"""What the passes ask of fx nodes, the same for ATen and edge graphs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def target_of(node: Any) -> Any:
    """Return a call's operator, an edge operator's ATen one; None for anything but a call."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    return getattr(node.target, "_op", node.target)


def arguments(node: Node) -> dict[str, Any]:
    """Return a call's arguments by their names in the operator's schema, defaults filled in."""
    schema = target_of(node)._schema
    given: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            given[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            given[argument.name] = node.kwargs[argument.name]
        else:
            given[argument.name] = argument.default_value
    return given


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    target = target_of(node)
    return target is not None and any(target is wanted for wanted in targets)


def is_plain_add(node: Any) -> bool:
    """Whether a node adds two operands without scaling one."""
    return is_call(node, aten.add.Tensor, aten.add.Scalar) and arguments(node).get("alpha", 1) == 1


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return a node's shape, with symbols for dynamic dimensions."""
    return tuple(node.meta["val"].shape)


def module_of(node: Node) -> str:
    """Return the path of the module that made a node, such as "model.layers.3.self_attn", for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return paths[-1] if paths else "the model"


_CASTS = frozenset(
    {
        "aten::_to_copy",
        "aten::alias",
        "aten::alias_copy",
        "aten::clone",
        "aten::contiguous",
        "aten::to",
        "aten::type_as",
        "dim_order_ops::_clone_dim_order",
        "dim_order_ops::_to_dim_order_copy",
    }
)


def through_casts(node: Any, *, also: tuple[Any, ...] = ()) -> Any:
    """Return what a chain of copies and floating-point casts (and of the operators of ``also``) starts from."""
    while True:
        target = target_of(node)
        if not isinstance(target, torch._ops.OpOverload) or not (target._schema.name in _CASTS or target in also):
            return node
        source = node.args[0]
        if node.meta["val"].dtype != source.meta["val"].dtype and not (
            node.meta["val"].is_floating_point() and source.meta["val"].is_floating_point()
        ):
            return node
        node = source


def ancestors(node: Node) -> Iterator[Node]:
    """Yield a node and everything it is computed from, each once."""
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        yield current
        new = [parent for parent in current.all_input_nodes if parent not in seen]
        seen.update(new)
        pending += new


def flat_positions(position: Node) -> Node:
    """Return an input of positions, [n] or [1, n], as [n]; one node serves all who ask."""
    if position.meta["val"].ndim == 1:
        return position
    for user in position.users:
        if is_call(user, aten.squeeze.dims) and list(user.args[1]) == [0]:
            return user
    graph = position.graph
    after = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    with graph.inserting_after(after):
        flat = graph.call_function(aten.squeeze.dims, (position, [0]))
    flat.meta = {"val": position.meta["val"].squeeze(0)}
    return flat


def keep_names(originals: Iterable[Node], copies: Iterable[Node]) -> None:
    """Give copies of nodes their originals' names, by which the signature knows them.

    fx gives a copy another name where that is one of Python's own, such as ``input``.
    """
    for original, copied in zip(originals, copies, strict=True):
        copied.name = original.name


def copy_program(program: ExportedProgram) -> ExportedProgram:
    """Return a copy whose graph, signature and table of constants may be changed; the tensors are shared."""
    module = copy.deepcopy(program.graph_module)
    keep_names(program.graph.nodes, module.graph.nodes)
    module.recompile()
    return program._update(
        module,
        copy.deepcopy(program.graph_signature),
        constants=dict(program.constants),
    )


def plain_copy(program: ExportedProgram) -> ExportedProgram:
    """Return a copy that may be changed, made of plain operators that change none of their operands."""
    # Decomposing re-traces the model, which takes as long again as exporting it.
    return copy_program(program) if is_functional(program) else program.run_decompositions({})


def is_functional(program: ExportedProgram) -> bool:
    """Whether a graph is made of plain operators that change none of their operands, nor take subclasses apart."""
    return all(
        not (target._schema.is_mutable or target.namespace == "export")
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__module__", None) in ("_operator", "torch", "math")
        for target in (node.target for node in program.graph.nodes if node.op == "call_function")
    )


def replace(program: ExportedProgram, old: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """Put a call of ``target`` in a node's place, as a program's output too, and return it."""
    graph = old.graph
    with graph.inserting_before(old):
        new = graph.call_function(target, args)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
    graph.erase_node(old)
    return new


def lift_constant(program: ExportedProgram, name: str, value: torch.Tensor) -> Node:
    """Add a tensor constant to a program, under a name like the given one, and return its placeholder."""
    graph = program.graph
    taken = {*program.constants, *program.state_dict, *(node.name for node in graph.nodes)}
    names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
    name = next(free for free in names if free not in taken)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(first):
        node = graph.placeholder(name)
    fake_mode = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    node.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
    specs = program.graph_signature.input_specs
    specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name, None))
    program.constants[name] = value
    return node


def remove_dead_code(module: GraphModule) -> None:
    """Erase what nothing uses, the exporter's metadata assertions included."""
    graph = module.graph
    for node in reversed(graph.nodes):
        if is_call(node, aten._assert_tensor_metadata.default):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
