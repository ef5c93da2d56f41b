"""Quantized weights: one instruction with the product or the lookup that uses them, if all their uses are such."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...graph import arguments, aten, is_call, target_of
from ..builder import GraphBuilder
from .base import Row, rank_of

_NAME = "executorch_mlx.dequantize.default"


def is_quantized(node: Any) -> bool:
    """Whether a node is a quantized weight."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and str(target) == _NAME


def multiply(builder: GraphBuilder, x: Any, weight: Node, out: Any) -> None:
    """Emit the product of x and the transposed weight."""
    builder.emit("QuantizedMatmulNode", x=x, out=out, transpose=True, **_parts(builder, weight))


def look_up(builder: GraphBuilder, weight: Node, index: Any, out: Any) -> None:
    """Emit the lookup of some rows of a weight."""
    parts = _parts(builder, weight)
    for name in ("w", "scales", "biases"):
        rows = builder.temp()
        builder.emit("TakeNode", x=parts[name], index=index, out=rows, axis=0)
        parts[name] = rows
    builder.emit("DequantizeNode", out=out, **parts)


def _parts(builder: GraphBuilder, weight: Node) -> dict[str, Any]:
    given = arguments(weight)
    return {
        "w": builder.constant(given["weight"], builder.stored(given["weight"]).view(torch.uint32)),
        "scales": _parameter(builder, given["scales"]),
        "biases": _parameter(builder, given["biases"]),
        "group_size": given["group_size"],
        "bits": given["bits"],
        "mode": "affine",
    }


def _parameter(builder: GraphBuilder, node: Node) -> Any:
    """Read scales or biases, which are stored in half precision where that holds them: those of GGUF's are halves."""
    tensor = builder.stored(node)
    if tensor.dtype is not torch.float32:
        return builder.read(node)
    half = tensor.half()
    if not torch.equal(half.float(), tensor):
        return builder.read(node)
    return builder.cast(builder.constant(node, half), torch.float16, torch.float32)


def _dequantize(builder: GraphBuilder, node: Node) -> None:
    if not all(_is_used_whole(node, user) for user in node.users):
        builder.emit("DequantizeNode", out=builder.write(node), **_parts(builder, node))


def _is_used_whole(node: Node, user: Node) -> bool:
    if is_call(user, aten.linear.default):
        return node not in (user.args[0], *user.args[2:])
    return is_call(user, aten.embedding.default) and bool(rank_of(user.args[1]))


def _check_constants(node: Node) -> str | None:
    is_constant = all(operand.op == "placeholder" for operand in node.all_input_nodes)
    return None if is_constant else "its operands are computed, and are packed when the program is made"


ROWS: dict[str, Row] = {_NAME: Row(_dequantize, _check_constants)}
