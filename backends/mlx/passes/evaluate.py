"""Runs a part of an exported graph on chosen inputs.

What a mask or a table of angles *means* is found by computing it, not by recognising how a model writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_aggregate

from ..graph import target_of, through_casts


class NotEvaluableError(ValueError):
    """A node depends on an input that was given no value."""


def constants_of(program: ExportedProgram) -> dict[str, Any]:
    """Return the parameters, buffers and lifted constants of a program by placeholder name."""
    signature = program.graph_signature
    values: dict[str, Any] = {}
    for placeholder, target in {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }.items():
        values[placeholder] = program.state_dict[target] if target in program.state_dict else program.constants[target]
    return values


def evaluate(
    node: Node,
    feeds: Mapping[str, Any],
    integers: Callable[[int], int] = lambda value: value,
    *,
    casts: bool = True,
) -> Any:
    """Compute one node.

    Args:
        node: what to compute.
        feeds: a value per placeholder name; constants included.
        integers: applied to every literal whole number of every call, and to whole constants of one element.
        casts: whether floats are cast to other floats.

    Raises:
        NotEvaluableError: the node depends on a placeholder without a value.
    """
    known: dict[Node, Any] = {}

    def literal(value: Any) -> Any:
        if isinstance(value, Node):
            return known[value]
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            return float(integers(int(value)))
        return integers(value) if type(value) is int else value

    pending = [node]
    with torch.no_grad():
        while pending:
            current = pending[-1]
            missing = [parent for parent in current.all_input_nodes if parent not in known]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current in known:
                continue
            if current.op == "placeholder":
                known[current] = _fed(current.name, feeds, integers)
            elif not casts and through_casts(current) is not current:
                known[current] = known[through_casts(current)]
            elif current.op == "call_function":
                args = map_aggregate(current.args, literal)
                kwargs = map_aggregate(current.kwargs, literal)
                known[current] = target_of(current)(*args, **kwargs)
            else:
                raise NotEvaluableError(f"{current.name} is a {current.op}")
    return known[node]


def _fed(name: str, feeds: Mapping[str, Any], integers: Callable[[int], int]) -> Any:
    if name not in feeds:
        raise NotEvaluableError(name)
    value = feeds[name]
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool
    if is_number and float(value).is_integer() and abs(float(value)) < 2**53:
        return torch.full_like(value, integers(int(value)))
    return value
