"""What the tables of rows are written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder, scalar_type

# Past the end of any axis.
LIMIT = 2**31 - 1

Lower = Callable[[GraphBuilder, Node], None]
Check = Callable[[Node], "str | None"]


def _no_objection(node: Node) -> str | None:
    return None


@dataclass(frozen=True)
class Row:
    """How one operator is lowered.

    Attributes:
        lower: emits the node's instructions.
        check: returns why a node cannot be lowered, or None.
    """

    lower: Lower
    check: Check = _no_objection


def dtype_of(node: Any) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def rank_of(node: Node) -> int:
    """Return how many axes a node's tensor has."""
    return int(node.meta["val"].ndim)


def operand(builder: GraphBuilder, value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor operand in the dtype that an operation computes in; scalars become constants."""
    if isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor):
        return builder.cast(value, dtype_of(value), dtype)
    if isinstance(value, Node):
        return builder.compute("FullNode", shape=[], v=builder.read(value), scalar_type=scalar_type(dtype))
    return builder.scalar(value, dtype)


def emit_as(builder: GraphBuilder, node: Node, given: torch.dtype, kind: str, **fields: Any) -> None:
    """Emit the instruction of a node's result, which is cast where the instruction gives another dtype than torch.

    Args:
        builder: the builder.
        node: the node.
        given: what the instruction gives.
        kind: the instruction.
        fields: its fields, without ``out``.
    """
    if given == dtype_of(node):
        builder.emit(kind, out=builder.write(node), **fields)
    else:
        x = builder.compute(kind, **fields)
        builder.emit("AsTypeNode", x=x, out=builder.write(node), scalar_type=scalar_type(dtype_of(node)))


def sizes_of(builder: GraphBuilder, node: Node) -> list[Any]:
    """Return the sizes of a node's tensor: numbers, and values for dynamic ones."""
    return [size_of(builder, node, axis) for axis in range(rank_of(node))]


def size_of(builder: GraphBuilder, node: Node, axis: int) -> Any:
    """Return the size of one axis: a number, or a value for a dynamic one."""
    size = node.meta["val"].shape[axis]
    if isinstance(size, int):
        return size
    value = builder.value()
    builder.emit("SymSizeNode", a=builder.read(node), dim=axis, out=value)
    return value


def axis_of(node: Node, dim: int) -> int:
    """Return an axis of a node's tensor counted from the beginning; torch takes a scalar for a vector of one."""
    return dim % max(rank_of(node), 1)


def check_axes(node: Node) -> str | None:
    """Object to an operand without axes."""
    return None if rank_of(arguments(node)["self"]) else "its operand has no axes"
