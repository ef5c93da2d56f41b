"""Functions of each element."""

from __future__ import annotations

from ..types import BITS, NUMBERS, TensorType, as_float, broadcast, promoted
from .base import Call, Result, Rule, always, elementwise, promoted_float, require, unary


def _clip(call: Call) -> Result:
    fields = [field for field in ("a_min", "a_max") if call.has(field)]
    require(bool(fields), "neither a_min nor a_max is there")
    return elementwise(fields=("x", *fields))(call)


def _as_type(call: Call) -> Result:
    return TensorType(call.tensor("x").shape, call.scalar_type("scalar_type"))


def _gelu(call: Call) -> Result:
    call.one_of("approximate", ("none", "tanh"))
    return unary(as_float)(call)


def _where(call: Call) -> Result:
    condition, x, y = call.tensor("condition"), call.tensor("x"), call.tensor("y")
    return TensorType(broadcast(condition.shape, x.shape, y.shape), promoted(x.dtype, y.dtype))


def _of_bits(call: Call) -> Result:
    result = elementwise(dtypes=BITS)(call)
    # The widest signed and unsigned integers are promoted to floats.
    assert isinstance(result, TensorType), "it is of tensors"
    require(result.dtype is None or result.dtype in BITS, f"computed in {result.dtype}, expected bits")
    return result


_compared = elementwise(always("bool"))
_to_float = unary(as_float)

RULES: dict[str, Rule] = {
    # one operand
    **{
        kind: unary()
        for kind in (
            "AbsNode",
            "CeilNode",
            "FloorNode",
            "IdCopyNode",
            "RoundNode",
            "SignNode",
            "SquareNode",
            "TruncNode",
        )
    },
    **dict.fromkeys(
        (
            "ArccosNode",
            "ArccoshNode",
            "ArcsinNode",
            "ArcsinhNode",
            "ArctanNode",
            "ArctanhNode",
            "CosNode",
            "CoshNode",
            "ErfNode",
            "ExpNode",
            "Expm1Node",
            "LogNode",
            "Log10Node",
            "Log1pNode",
            "Log2Node",
            "ReciprocalNode",
            "RsqrtNode",
            "SigmoidNode",
            "SiluNode",
            "SinNode",
            "SinhNode",
            "SqrtNode",
            "TanNode",
            "TanhNode",
        ),
        _to_float,
    ),
    "AsTypeNode": _as_type,
    "BitwiseInvertNode": unary(dtypes=BITS),
    "GeluNode": _gelu,
    "LogicalNotNode": unary(always("bool")),
    "NegNode": unary(dtypes=NUMBERS),
    # two operands
    **{
        kind: elementwise()
        for kind in (
            "AddNode",
            "FloorDivideNode",
            "MaximumNode",
            "MinimumNode",
            "MultiplyNode",
            "PowerNode",
            "RemainderNode",
            "SubtractNode",
        )
    },
    **{kind: elementwise(promoted_float) for kind in ("Atan2Node", "DivideNode", "LogAddExpNode")},
    **dict.fromkeys(("BitwiseAndNode", "BitwiseOrNode", "BitwiseXorNode"), _of_bits),
    **dict.fromkeys(
        (
            "EqualNode",
            "GreaterEqualNode",
            "GreaterNode",
            "LessEqualNode",
            "LessNode",
            "LogicalAndNode",
            "LogicalOrNode",
            "NotEqualNode",
        ),
        _compared,
    ),
    # three
    "ClipNode": _clip,
    "WhereNode": _where,
}
