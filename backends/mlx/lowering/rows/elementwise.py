"""Functions of each element, casts and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder, scalar_type
from .base import Row, dtype_of, emit_as, operand, sizes_of


def _unary(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        # torch computes transcendental functions of integers in floating point.
        x = builder.cast(node.args[0], dtype_of(node.args[0]), dtype_of(node))
        builder.emit(kind, x=x, out=builder.write(node))

    return Row(lower)


def _check_alpha(node: Node) -> str | None:
    alpha = arguments(node).get("alpha", 1)
    return None if alpha in (1, 1.0, None) else f"alpha is {alpha}"


def _binary(kind: str, *, swapped: bool = False) -> Row:
    """Arithmetic: computed in the result's dtype."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        dtype = torch.float32 if _has_wide_number(node) else dtype_of(node)
        a, b = _operands(builder, node, dtype)
        emit_as(builder, node, dtype, kind, a=b if swapped else a, b=a if swapped else b)

    return Row(lower, _check_alpha)


def _has_wide_number(node: Node) -> bool:
    """Whether halves meet a number that they cannot hold, or a tensor without axes in float32.

    Torch rounds neither before it computes.
    """
    dtype = dtype_of(node)
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    for value in node.args[:2]:
        if isinstance(value, Node):
            tensor = value.meta["val"]
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 0 and tensor.dtype is torch.float32:
                return True
        elif math.isfinite(value):
            rounded = float(torch.tensor(value, dtype=torch.float32).to(dtype))
            if not math.isfinite(rounded) or bool(rounded) != bool(value):
                return True
    return False


def _operands(builder: GraphBuilder, node: Node, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a call's first two operands in a dtype."""
    a, b = (operand(builder, value, dtype) for value in node.args[:2])
    return a, b


def _comparison(kind: str) -> Row:
    """Comparison: computed in the operands' common dtype, the result is bool."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        values = [value.meta["val"] if isinstance(value, Node) else value for value in node.args[:2]]
        a, b = _operands(builder, node, torch.result_type(*values))
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    return Row(lower)


def _logical(kind: str) -> Row:
    """Logic: whatever the operands are, their truth is what counts."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        a, b = _operands(builder, node, torch.bool)
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    return Row(lower)


def _with_constant(kind: str, value: float, *, is_first: bool = False) -> Row:
    """A function of an element and a constant."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        dtype = dtype_of(node)
        x, constant = builder.cast(node.args[0], dtype_of(node.args[0]), dtype), builder.scalar(value, dtype)
        builder.emit(kind, a=constant if is_first else x, b=x if is_first else constant, out=builder.write(node))

    return Row(lower)


def _clip(low: str | float, high: str | float) -> Row:
    """Bounds, of which one may be absent: the names of their arguments, or what they are."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given, dtype = arguments(node), dtype_of(node)
        bounds = {
            name: given.get(bound) if isinstance(bound, str) else bound
            for name, bound in (("a_min", low), ("a_max", high))
        }
        builder.emit(
            "ClipNode",
            x=operand(builder, given["self"], dtype),
            out=builder.write(node),
            **{name: None if value is None else operand(builder, value, dtype) for name, value in bounds.items()},
        )

    return Row(lower)


# -- quotients ------------------------------------------------------------------


def _quotient(builder: GraphBuilder, node: Node) -> None:
    """A division that may round: down, or towards zero."""
    mode, dtype = arguments(node)["rounding_mode"], dtype_of(node)
    if mode == "trunc" and dtype.is_floating_point:
        # In half precision the quotient would be rounded before it is.
        a, b = _operands(builder, node, torch.float32)
        emit_as(builder, node, torch.float32, "TruncNode", x=builder.compute("DivideNode", a=a, b=b))
        return
    a, b = _operands(builder, node, dtype)
    if mode == "trunc":
        _truncated_quotient(builder, node, a, b)
    else:
        builder.emit("DivideNode" if mode is None else "FloorDivideNode", a=a, b=b, out=builder.write(node))


def _truncated_quotient(builder: GraphBuilder, node: Node, a: Any, b: Any) -> None:
    """Of integers: the quotient that is rounded down, and one more where that is negative and leaves a remainder."""
    dtype = dtype_of(node)
    zero, code = builder.scalar(0, dtype), scalar_type(dtype)
    quotient = builder.compute("FloorDivideNode", a=a, b=b)
    whole = builder.compute("MultiplyNode", a=quotient, b=b)
    is_negative = builder.compute("LessNode", a=quotient, b=zero)
    is_rounded = builder.compute("NotEqualNode", a=whole, b=a)
    is_low = builder.compute("LogicalAndNode", a=is_negative, b=is_rounded)
    more = builder.compute("AsTypeNode", x=is_low, scalar_type=code)
    builder.emit("AddNode", a=quotient, b=more, out=builder.write(node))


# -- activations ----------------------------------------------------------------


def _gelu(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit("GeluNode", x=builder.read(given["self"]), out=builder.write(node), approximate=given["approximate"])


def _leaky_relu(builder: GraphBuilder, node: Node) -> None:
    given, dtype = arguments(node), dtype_of(node)
    x = builder.read(given["self"])
    builder.emit(
        "WhereNode",
        condition=builder.compute("GreaterNode", a=x, b=builder.scalar(0, dtype)),
        x=x,
        y=builder.compute("MultiplyNode", a=x, b=builder.scalar(given["negative_slope"], dtype)),
        out=builder.write(node),
    )


def _softplus(builder: GraphBuilder, node: Node) -> None:
    given, dtype = arguments(node), dtype_of(node)
    beta, threshold = (builder.scalar(given[name], dtype) for name in ("beta", "threshold"))
    x = builder.read(given["self"])
    scaled = builder.compute("MultiplyNode", a=x, b=beta)
    # log(1 + exp(x)), without its overflow.
    soft = builder.compute("LogAddExpNode", a=scaled, b=builder.scalar(0, dtype))
    builder.emit(
        "WhereNode",
        condition=builder.compute("GreaterNode", a=scaled, b=threshold),
        x=x,
        y=builder.compute("DivideNode", a=soft, b=beta),
        out=builder.write(node),
    )


# -- what kind of number ----------------------------------------------------------


def _sign(builder: GraphBuilder, node: Node) -> None:
    """NaN's is 0 in torch, and 1 in MLX."""
    dtype, x = dtype_of(node), builder.read(node.args[0])
    if not dtype.is_floating_point:
        builder.emit("SignNode", x=x, out=builder.write(node))
        return
    builder.emit(
        "WhereNode",
        condition=builder.compute("EqualNode", a=x, b=x),
        x=builder.compute("SignNode", x=x),
        y=builder.scalar(0, dtype),
        out=builder.write(node),
    )


def _is_nan(builder: GraphBuilder, node: Node) -> None:
    x = builder.read(node.args[0])
    builder.emit("NotEqualNode", a=x, b=x, out=builder.write(node))


def _against_infinity(kind: str) -> Row:
    """Compare magnitudes with infinity; NaN is neither equal to it nor less."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        dtype = dtype_of(node.args[0])
        if not dtype.is_floating_point:
            dtype = torch.float32
        x = builder.compute("AbsNode", x=operand(builder, node.args[0], dtype))
        builder.emit(kind, a=x, b=builder.scalar(math.inf, dtype), out=builder.write(node))

    return Row(lower)


# -- choices --------------------------------------------------------------------


def _choice(name: str, x: str, y: str) -> Row:
    """One or the other, by the names of the condition's argument and of theirs."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given, dtype = arguments(node), dtype_of(node)
        builder.emit(
            "WhereNode",
            condition=builder.read(given[name]),
            x=operand(builder, given[x], dtype),
            y=operand(builder, given[y], dtype),
            out=builder.write(node),
        )

    return Row(lower)


# -- casts and copies -------------------------------------------------------------


def _cast(builder: GraphBuilder, node: Node) -> None:
    source = node.args[0]
    if dtype_of(source) == dtype_of(node):
        builder.alias(node, builder.read(source))
    else:
        builder.emit(
            "AsTypeNode",
            x=builder.read(source),
            out=builder.write(node),
            scalar_type=scalar_type(dtype_of(node)),
        )


def _alias(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, builder.read(node.args[0]))


def _check_dropout(node: Node) -> str | None:
    given = arguments(node)
    return "it is in training mode" if given["train"] and given["p"] else None


def _copy(builder: GraphBuilder, node: Node) -> None:
    """The source in the shape and the dtype of what it would overwrite."""
    target, source = node.args[:2]
    x = builder.cast(source, dtype_of(source), dtype_of(node))
    if _names(source) == _names(target):
        builder.alias(node, x)
    else:
        builder.emit("BroadcastToNode", x=x, out=builder.write(node), shape=sizes_of(builder, target))


def _names(node: Node) -> Sequence[str]:
    """Return sizes as texts: comparing symbols would fix them."""
    return [str(size) for size in node.meta["val"].shape]


def _named(maker: Callable[[str], Row], kinds: dict[str, str]) -> dict[str, Row]:
    """Return rows of operators by what follows "aten." in their names, with the default overload where none does."""
    return {f"aten.{name if '.' in name else f'{name}.default'}": maker(kind) for name, kind in kinds.items()}


ROWS: dict[str, Row] = {
    # one operand
    **_named(
        _unary,
        {
            "abs": "AbsNode",
            "acos": "ArccosNode",
            "acosh": "ArccoshNode",
            "asin": "ArcsinNode",
            "asinh": "ArcsinhNode",
            "atan": "ArctanNode",
            "atanh": "ArctanhNode",
            "bitwise_not": "BitwiseInvertNode",
            "ceil": "CeilNode",
            "cos": "CosNode",
            "cosh": "CoshNode",
            "erf": "ErfNode",
            "exp": "ExpNode",
            "expm1": "Expm1Node",
            "floor": "FloorNode",
            "log": "LogNode",
            "log10": "Log10Node",
            "log1p": "Log1pNode",
            "log2": "Log2Node",
            "logical_not": "LogicalNotNode",
            "neg": "NegNode",
            "reciprocal": "ReciprocalNode",
            "round": "RoundNode",
            "rsqrt": "RsqrtNode",
            "sigmoid": "SigmoidNode",
            "silu": "SiluNode",
            "sin": "SinNode",
            "sinh": "SinhNode",
            "sqrt": "SqrtNode",
            "square": "SquareNode",
            "tan": "TanNode",
            "tanh": "TanhNode",
            "trunc": "TruncNode",
        },
    ),
    "aten.exp2.default": _with_constant("PowerNode", 2, is_first=True),
    "aten.gelu.default": Row(_gelu),
    "aten.leaky_relu.default": Row(_leaky_relu),
    "aten.relu.default": _with_constant("MaximumNode", 0),
    "aten.softplus.default": Row(_softplus),
    "aten.sign.default": Row(_sign),
    "aten.isnan.default": Row(_is_nan),
    "aten.isinf.default": _against_infinity("EqualNode"),
    "aten.isfinite.default": _against_infinity("LessNode"),
    # two operands
    **{
        f"aten.{name}.{overload}": _binary(kind)
        for name, kind in {
            "add": "AddNode",
            "sub": "SubtractNode",
            "subtract": "SubtractNode",
            "mul": "MultiplyNode",
            "multiply": "MultiplyNode",
            "div": "DivideNode",
            "divide": "DivideNode",
            "true_divide": "DivideNode",
            "remainder": "RemainderNode",
        }.items()
        for overload in ("Tensor", "Scalar")
    },
    **_named(
        _binary,
        {
            "atan2": "Atan2Node",
            "floor_divide": "FloorDivideNode",
            "floor_divide.Scalar": "FloorDivideNode",
            "logaddexp": "LogAddExpNode",
            "max.other": "MaximumNode",
            "maximum": "MaximumNode",
            "min.other": "MinimumNode",
            "minimum": "MinimumNode",
            "pow.Scalar": "PowerNode",
            "pow.Tensor_Scalar": "PowerNode",
            "pow.Tensor_Tensor": "PowerNode",
            "remainder.Scalar_Tensor": "RemainderNode",
        },
    ),
    "aten.rsub.Scalar": _binary("SubtractNode", swapped=True),
    **{
        f"aten.{name}.{overload}_mode": Row(_quotient)
        for name in ("div", "divide")
        for overload in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.{overload}": _comparison(kind)
        for name, kind in {
            "eq": "EqualNode",
            "ne": "NotEqualNode",
            "lt": "LessNode",
            "le": "LessEqualNode",
            "gt": "GreaterNode",
            "ge": "GreaterEqualNode",
        }.items()
        for overload in ("Tensor", "Scalar")
    },
    **_named(
        _logical,
        {"logical_and": "LogicalAndNode", "logical_or": "LogicalOrNode", "logical_xor": "NotEqualNode"},
    ),
    **{
        f"aten.{name}": _binary(kind)
        for operation, kind in {"and": "BitwiseAndNode", "or": "BitwiseOrNode", "xor": "BitwiseXorNode"}.items()
        for name in (
            f"bitwise_{operation}.Tensor",
            f"bitwise_{operation}.Scalar",
            f"bitwise_{operation}.Scalar_Tensor",
            f"__{operation}__.Tensor",
            f"__{operation}__.Scalar",
        )
    },
    # three
    **dict.fromkeys(
        (
            "aten.clamp.default",
            "aten.clamp.Tensor",
            "aten.clamp_min.default",
            "aten.clamp_min.Tensor",
            "aten.clamp_max.default",
            "aten.clamp_max.Tensor",
        ),
        _clip("min", "max"),
    ),
    "aten.hardtanh.default": _clip("min_val", "max_val"),
    "aten.relu6.default": _clip(0, 6),
    **{
        f"aten.where.{overload}": _choice("condition", "self", "other")
        for overload in ("self", "ScalarOther", "ScalarSelf", "Scalar")
    },
    **{f"aten.masked_fill.{overload}": _choice("mask", "value", "self") for overload in ("Scalar", "Tensor")},
    # dtypes and copies
    **dict.fromkeys(
        (
            "aten._to_copy.default",
            "aten.to.device",
            "aten.to.dtype",
            "aten.to.dtype_layout",
            "aten.to.other",
            "aten.type_as.default",
            "dim_order_ops._to_dim_order_copy.default",
        ),
        Row(_cast),
    ),
    **dict.fromkeys(
        (
            "aten.alias.default",
            "aten.alias_copy.default",
            "aten.clone.default",
            "aten.contiguous.default",
            "aten.detach.default",
            "aten.detach_copy.default",
            "aten.lift_fresh_copy.default",
            "dim_order_ops._clone_dim_order.default",
        ),
        Row(_alias),
    ),
    "aten.copy.default": Row(_copy),
    "aten.dropout.default": Row(_alias, _check_dropout),
}
