"""Fuses root mean square normalisation.

Before (casts to float32 and back may stand anywhere between)::

    mul(weight, mul(x, rsqrt(add(mean(pow(x, 2), [-1], True), eps))))

After::

    rms_norm(x, [dim], weight, eps)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph import aten, is_call, is_plain_add, remove_dead_code, replace, shape_of, through_casts
from .evaluate import constants_of


def fuse_rms_norm(program: ExportedProgram) -> None:
    """Replace each match, in place."""
    constants = constants_of(program)
    for node in list(program.graph.nodes):
        match = _match(node, constants)
        if match is None:
            continue
        x, weight, eps = match
        replace(program, node, aten.rms_norm.default, (x, [shape_of(x)[-1]], weight, eps))
    remove_dead_code(program.graph_module)


def _match(node: Node, constants: Mapping[str, Any]) -> tuple[Node, Node, float] | None:
    """Return (x, weight, eps) if a node ends the pattern."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for weight, scaled in (node.args, reversed(node.args)):
        found = _match_scaled(through_casts(scaled), constants)
        if found is None:
            continue
        x, eps = found
        is_weight = isinstance(weight, Node) and shape_of(weight) == shape_of(x)[-1:]
        # The fused kernel returns x's dtype; a model that goes on in another is left as it is.
        if is_weight and node.meta["val"].dtype == x.meta["val"].dtype == weight.meta["val"].dtype:
            return x, weight, eps
    return None


def _match_scaled(node: Any, constants: Mapping[str, Any]) -> tuple[Node, float] | None:
    """Match mul(x, rsqrt(mean(x^2) + eps))."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, factor in (node.args, reversed(node.args)):
        eps = _match_factor(through_casts(factor), through_casts(x), constants)
        if eps is not None:
            return through_casts(x), eps
    return None


def _match_factor(node: Any, x: Any, constants: Mapping[str, Any]) -> float | None:
    if not is_call(node, aten.rsqrt.default):
        return None
    total = through_casts(node.args[0])
    if not is_plain_add(total):
        return None
    eps = _number(total.args[1], constants)
    if eps is None:
        return None
    mean = through_casts(total.args[0])
    if not is_call(mean, aten.mean.dim) or len(mean.args) < 3 or not mean.args[2]:
        return None
    if list(mean.args[1]) not in ([-1], [len(shape_of(mean)) - 1]):
        return None
    square = through_casts(mean.args[0])
    if is_call(square, aten.pow.Tensor_Scalar):
        is_square = _number(square.args[1], constants) == 2
    else:
        is_square = is_call(square, aten.mul.Tensor) and square.args[0] is square.args[1]
    return eps if is_square and through_casts(square.args[0]) is x else None


def _number(value: Any, constants: Mapping[str, Any]) -> float | None:
    """Return a literal or a constant without dimensions as a number."""
    if isinstance(value, Node):
        value = constants.get(value.name)
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None
