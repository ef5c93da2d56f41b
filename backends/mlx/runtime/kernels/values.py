"""Scalar values."""

from __future__ import annotations

import operator

from ...program import Node
from .base import At, Env, Row, Step, scalar_binary


def _item_int(node: Node, at: At) -> Step:
    x, out = at(node.x), at(node.out)

    def step(env: Env) -> None:
        env[out] = int(env[x].item())

    return step


def _sym_size(node: Node, at: At) -> Step:
    a, dim, out = at(node.a), node.dim, at(node.out)

    def step(env: Env) -> None:
        env[out] = env[a].shape[dim]

    return step


KERNELS: dict[str, Row] = {
    "AddIntNode": scalar_binary(operator.add),
    "FloorDivideIntNode": scalar_binary(operator.floordiv),
    "ItemIntNode": _item_int,
    "ModIntNode": scalar_binary(operator.mod),
    "MultiplyIntNode": scalar_binary(operator.mul),
    "NoopNode": lambda node, at: lambda env: None,
    "SubtractIntNode": scalar_binary(operator.sub),
    "SymSizeNode": _sym_size,
}
