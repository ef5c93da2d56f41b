"""Functions of each element."""

from __future__ import annotations

from collections.abc import Callable

import mlx.nn as nn

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, binary, dtype_of, fixed, get, unary


def _clip(node: Node, at: At) -> Step:
    x, out, low, high = at(node.x), at(node.out), get(node.a_min, at), get(node.a_max, at)

    def step(env: Env) -> None:
        env[out] = mx.clip(env[x], low(env), high(env))

    return step


def _gelu(approximate: str) -> Callable[[mx.array], mx.array]:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"GeluNode: approximate is 'none' or 'tanh', got {approximate!r}")
    gelu: Callable[[mx.array], mx.array] = nn.gelu if approximate == "none" else nn.gelu_approx
    return gelu


def _trunc(x: mx.array) -> mx.array:
    return mx.where(x < 0, mx.ceil(x), mx.floor(x))


def _where(node: Node, at: At) -> Step:
    condition, x, y, out = at(node.condition), at(node.x), at(node.y), at(node.out)

    def step(env: Env) -> None:
        env[out] = mx.where(env[condition], env[x], env[y])

    return step


KERNELS: dict[str, Row] = {
    # one operand
    "AbsNode": unary(mx.abs),
    "ArccosNode": unary(mx.arccos),
    "ArccoshNode": unary(mx.arccosh),
    "ArcsinNode": unary(mx.arcsin),
    "ArcsinhNode": unary(mx.arcsinh),
    "ArctanNode": unary(mx.arctan),
    "ArctanhNode": unary(mx.arctanh),
    "AsTypeNode": fixed(lambda n: (lambda dtype: lambda x: x.astype(dtype))(dtype_of(n.scalar_type))),
    "BitwiseInvertNode": unary(mx.bitwise_invert),
    "CeilNode": unary(mx.ceil),
    "CosNode": unary(mx.cos),
    "CoshNode": unary(mx.cosh),
    "ErfNode": unary(mx.erf),
    "ExpNode": unary(mx.exp),
    "Expm1Node": unary(mx.expm1),
    "FloorNode": unary(mx.floor),
    "GeluNode": fixed(lambda n: _gelu(n.approximate)),
    "IdCopyNode": unary(lambda x: x),
    "LogNode": unary(mx.log),
    "Log10Node": unary(mx.log10),
    "Log1pNode": unary(mx.log1p),
    "Log2Node": unary(mx.log2),
    "LogicalNotNode": unary(mx.logical_not),
    "NegNode": unary(mx.negative),
    "ReciprocalNode": unary(mx.reciprocal),
    "RoundNode": fixed(lambda n: lambda x: mx.round(x, n.decimals)),
    "RsqrtNode": unary(mx.rsqrt),
    "SigmoidNode": unary(mx.sigmoid),
    "SignNode": unary(mx.sign),
    "SiluNode": unary(lambda x: x * mx.sigmoid(x)),
    "SinNode": unary(mx.sin),
    "SinhNode": unary(mx.sinh),
    "SqrtNode": unary(mx.sqrt),
    "SquareNode": unary(mx.square),
    "TanNode": unary(mx.tan),
    "TanhNode": unary(mx.tanh),
    "TruncNode": unary(_trunc),
    # two operands
    "AddNode": binary(mx.add),
    "Atan2Node": binary(mx.arctan2),
    "BitwiseAndNode": binary(mx.bitwise_and),
    "BitwiseOrNode": binary(mx.bitwise_or),
    "BitwiseXorNode": binary(mx.bitwise_xor),
    "DivideNode": binary(mx.divide),
    "EqualNode": binary(mx.equal),
    "FloorDivideNode": binary(mx.floor_divide),
    "GreaterEqualNode": binary(mx.greater_equal),
    "GreaterNode": binary(mx.greater),
    "LessEqualNode": binary(mx.less_equal),
    "LessNode": binary(mx.less),
    "LogAddExpNode": binary(mx.logaddexp),
    "LogicalAndNode": binary(mx.logical_and),
    "LogicalOrNode": binary(mx.logical_or),
    "MaximumNode": binary(mx.maximum),
    "MinimumNode": binary(mx.minimum),
    "MultiplyNode": binary(mx.multiply),
    "NotEqualNode": binary(mx.not_equal),
    "PowerNode": binary(mx.power),
    "RemainderNode": binary(mx.remainder),
    "SubtractNode": binary(mx.subtract),
    # three
    "ClipNode": _clip,
    "WhereNode": _where,
}
