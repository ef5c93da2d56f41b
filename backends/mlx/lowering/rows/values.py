"""Scalar values, and results out of several."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..builder import GraphBuilder
from .base import Row, rank_of


def _symbolic(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        a, b = (builder.read(value) for value in node.args)
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    def check(node: Node) -> str | None:
        return None if isinstance(node.meta.get("val"), (int, torch.SymInt)) else "it is no integer arithmetic"

    return Row(lower, check)


def _sym_size(builder: GraphBuilder, node: Node) -> None:
    source, dim = node.args[:2]
    builder.emit("SymSizeNode", a=builder.read(source), dim=dim % rank_of(source), out=builder.write(node))


def _getitem(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, builder.read(node.args[0])[node.args[1]])


ROWS: dict[str, Row] = {
    "getitem": Row(_getitem),
    "aten.sym_size.int": Row(_sym_size),
    "add": _symbolic("AddIntNode"),
    "sub": _symbolic("SubtractIntNode"),
    "mul": _symbolic("MultiplyIntNode"),
    "floordiv": _symbolic("FloorDivideIntNode"),
    "mod": _symbolic("ModIntNode"),
}
