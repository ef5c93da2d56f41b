"""Functions of each element."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.nn as nn

from ...program import Node
from ..device import is_cpu, mx
from .base import HALVES, At, Env, Row, Step, binary, dtype_of, fixed, get, in_float32, unary

Operation = Callable[[mx.array, mx.array], mx.array]


def _clip(node: Node, at: At) -> Step:
    x, out, low, high = at(node.x), at(node.out), get(node.a_min, at), get(node.a_max, at)

    def step(env: Env) -> None:
        env[out] = mx.clip(env[x], low(env), high(env))

    return step


# Compiled, the casts are part of the one kernel.
_GELU = {
    "none": mx.compile(in_float32(nn.gelu), shapeless=True),
    "tanh": mx.compile(in_float32(nn.gelu_approx), shapeless=True),
}


def _gelu(approximate: str) -> Callable[[mx.array], mx.array]:
    if approximate not in _GELU:
        raise ValueError(f"GeluNode: approximate is 'none' or 'tanh', got {approximate!r}")
    return _GELU[approximate]


def _round(decimals: int) -> Callable[[mx.array], mx.array]:
    # Times a power of ten, halves overflow.
    return in_float32(lambda x: mx.round(x, decimals)) if decimals else mx.round


def _trunc(x: mx.array) -> mx.array:
    return mx.where(x < 0, mx.ceil(x), mx.floor(x))


def _where(node: Node, at: At) -> Step:
    condition, x, y, out = at(node.condition), at(node.x), at(node.y), at(node.out)

    def step(env: Env) -> None:
        env[out] = mx.where(env[condition], env[x], env[y])

    return step


def _arithmetic(function: Operation, of_integers: Operation, of_floats: Operation | None = None) -> Row:
    """A function of two tensors that has its own form for signed integers, and perhaps for floats."""

    def run(a: mx.array, b: mx.array) -> mx.array:
        dtype = mx.result_type(a, b)
        if mx.issubdtype(dtype, mx.signedinteger):
            return of_integers(a.astype(dtype), b.astype(dtype))
        if of_floats is not None and mx.issubdtype(dtype, mx.floating):
            wide = mx.float32 if dtype in HALVES else dtype
            return of_floats(a.astype(wide), b.astype(wide)).astype(dtype)
        return function(a, b)

    return binary(run)


# The least integer by -1 has no quotient: an x86 processor ends the process that asks for it. Here it wraps around.


def _floor_divide_integers(a: mx.array, b: mx.array) -> mx.array:
    is_negated = b == -1
    return mx.floor_divide(mx.where(is_negated, -a, a), mx.where(is_negated, 1, b))


def _remainder_integers(a: mx.array, b: mx.array) -> mx.array:
    return mx.remainder(a, mx.where(b == -1, 1, b))


def _floor_divide_floats(a: mx.array, b: mx.array) -> mx.array:
    """The whole number that the remainder leaves, as in torch and Python: 1.0 // 0.1 is 9, and a / b rounds to 10."""
    rest = mx.remainder(mx.abs(a), mx.abs(b))
    whole = mx.round((mx.abs(a) - rest) / mx.abs(b))
    signed = mx.where((a < 0) == (b < 0), whole, -whole - (rest != 0))
    return mx.where((a == 0) | (b == 0), a / b, signed)


def _power_integers(a: mx.array, b: mx.array) -> mx.array:
    """Of 1 and -1 also to negative powers, which are 0 for all others."""
    return mx.power(a, mx.where(mx.abs(a) == 1, b & 1, b))


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _silu_on_cpu(x: mx.array) -> mx.array:
    """As exact as ``_silu``, in less than half the time: of MLX's exponentials on the CPU, powers are the fastest."""
    return _silu(x) if x.dtype != mx.float32 else x / (1 + mx.power(2.0, x * -math.log2(math.e)))


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
    "RoundNode": fixed(lambda n: _round(n.decimals)),
    "RsqrtNode": unary(mx.rsqrt),
    "SigmoidNode": unary(mx.sigmoid),
    "SignNode": unary(mx.sign),
    "SiluNode": unary(_silu_on_cpu if is_cpu() else _silu),
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
    "FloorDivideNode": _arithmetic(mx.floor_divide, _floor_divide_integers, _floor_divide_floats),
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
    "PowerNode": _arithmetic(mx.power, _power_integers),
    "RemainderNode": _arithmetic(mx.remainder, _remainder_integers),
    "SubtractNode": binary(mx.subtract),
    # three
    "ClipNode": _clip,
    "WhereNode": _where,
}
