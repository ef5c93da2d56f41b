"""From many elements to one, and along an axis."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder, flat_ints, scalar_type
from .base import Row, axis_of, check_axes, dtype_of, emit_as, rank_of, size_of


def _axes(given: dict[str, Any]) -> list[int]:
    """Return the axes that a call reduces; none stand for all of them."""
    dims = given.get("dim") if rank_of(given["self"]) else None
    return flat_ints([dims] if isinstance(dims, int) else dims)


def _check_any_axis(node: Node) -> str | None:
    """Object to a list of no axes, which is all of them for some of torch's operators, and none for others."""
    return "its list of axes is empty" if arguments(node).get("dim") == [] else None


def _reduction(kind: str) -> Row:
    """A function of the elements, computed in the result's dtype; MLX sums integers as int64."""
    is_sum = kind in ("SumNode", "ProdNode")

    def lower(builder: GraphBuilder, node: Node) -> None:
        given, dtype = arguments(node), dtype_of(node)
        emit_as(
            builder,
            node,
            torch.int64 if is_sum and not dtype.is_floating_point else dtype,
            kind,
            x=builder.cast(given["self"], dtype_of(given["self"]), dtype),
            axes=_axes(given),
            keepdims=bool(given.get("keepdim", False)),
        )

    return Row(lower)


def _condition(kind: str) -> Row:
    """Whether any or all are true; of bytes, torch's answer is a byte."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        x = builder.cast(given["self"], dtype_of(given["self"]), torch.bool)
        keepdims = bool(given.get("keepdim", False))
        emit_as(builder, node, torch.bool, kind, x=x, axes=_axes(given), keepdims=keepdims)

    return Row(lower, _check_any_axis)


def _spread(kind: str) -> Row:
    """Variance or standard deviation."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        builder.emit(
            kind,
            x=builder.read(given["self"]),
            out=builder.write(node),
            axes=_axes(given),
            keepdims=bool(given.get("keepdim", False)),
            ddof=int(_correction(given)),
        )

    def check(node: Node) -> str | None:
        correction = _correction(arguments(node))
        return None if correction == int(correction) else f"its correction is {correction}"

    return Row(lower, check)


def _correction(given: dict[str, Any]) -> float:
    correction: float | None = given.get("correction", given.get("unbiased"))
    return 1 if correction is None else correction


def _place(kind: str) -> Row:
    """Where the extreme of an axis lies."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        builder.emit(
            kind,
            x=builder.read(given["self"]),
            out=builder.write(node),
            axis=axis_of(given["self"], given["dim"]),
            keepdims=bool(given["keepdim"]),
        )

    def check(node: Node) -> str | None:
        return None if arguments(node)["dim"] is not None else "it flattens its operand"

    return Row(lower, check)


def _extreme(kind: str, place: str) -> Row:
    """The extremes of an axis, and where they lie."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        values, places = builder.write(node)
        x, axis, keepdims = builder.read(given["self"]), axis_of(given["self"], given["dim"]), bool(given["keepdim"])
        builder.emit(kind, x=x, out=values, axes=_axes(given), keepdims=keepdims)
        builder.emit(place, x=x, out=places, axis=axis, keepdims=keepdims)

    return Row(lower)


# -- orders ---------------------------------------------------------------------


def _places(builder: GraphBuilder, node: Node) -> Any:
    """Return the places of an axis's elements in order.

    MLX sorts NaN last, where torch has it, too; descending, both begin with it.
    """
    given = arguments(node)
    source = given["self"]
    x, axis = builder.read(source), axis_of(source, given["dim"])
    is_descending = given.get("descending", given.get("largest"))
    # Turning an ascending order round turns equal elements round, unless they were turned before.
    is_turned = is_descending and given.get("stable")
    places = builder.compute(
        "ArgsortNode", x=builder.compute("FlipNode", x=x, axes=[axis]) if is_turned else x, axis=axis
    )
    if is_descending:
        places = builder.compute("FlipNode", x=places, axes=[axis])
    return builder.compute("SubtractNode", a=_last(builder, source, axis), b=places) if is_turned else places


def _last(builder: GraphBuilder, node: Node, axis: int) -> Any:
    """Return the last place of an axis."""
    size = size_of(builder, node, axis)
    if isinstance(size, int):
        return builder.scalar(size - 1, torch.int64)
    last = builder.value()
    builder.emit("SubtractIntNode", a=size, b=1, out=last)
    return builder.compute("FullNode", shape=[], v=last, scalar_type=scalar_type(torch.int64))


def _argsort(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, _places(builder, node))


def _sort(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis = axis_of(given["self"], given["dim"])
    places = _places(builder, node)
    if "k" in given:
        places = builder.compute("SliceNode", x=places, axis=axis, start=0, stop=builder.read(given["k"]))
    values, out = builder.write(node)
    builder.emit("TakeAlongAxisNode", x=builder.read(given["self"]), indices=places, out=values, axis=axis)
    builder.emit("IdCopyNode", x=places, out=out)


# -- along an axis ----------------------------------------------------------------


def _softmax(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    x = builder.cast(given["self"], dtype_of(given["self"]), dtype_of(node))
    builder.emit("SoftmaxNode", x=x, out=builder.write(node), axis=axis_of(node, given["dim"]), precise=True)


def _log_softmax(builder: GraphBuilder, node: Node) -> None:
    """Half precision is computed in float32, as in torch: the logarithm would be rounded before it is used."""
    given = arguments(node)
    x, axes = builder.cast(given["self"], dtype_of(given["self"]), torch.float32), _axes(given)
    # Less the highest, so that a row with an infinity is NaN, as in torch.
    shifted = builder.compute("SubtractNode", a=x, b=builder.compute("MaxNode", x=x, axes=axes, keepdims=True))
    total = builder.compute("LogSumExpNode", x=shifted, axes=axes, keepdims=True)
    emit_as(builder, node, torch.float32, "SubtractNode", a=shifted, b=total)


def _cumsum(builder: GraphBuilder, node: Node) -> None:
    given, dtype = arguments(node), dtype_of(node)
    summed = dtype if dtype.is_floating_point else torch.int64
    x = builder.cast(given["self"], dtype_of(given["self"]), summed)
    emit_as(builder, node, summed, "CumsumNode", x=x, axis=axis_of(node, given["dim"]))


ROWS: dict[str, Row] = {
    **{
        f"aten.{name}": _reduction(kind)
        for name, kind in {
            "mean.default": "MeanNode",
            "mean.dim": "MeanNode",
            "sum.default": "SumNode",
            "sum.dim_IntList": "SumNode",
            "prod.default": "ProdNode",
            "prod.dim_int": "ProdNode",
            "amax.default": "MaxNode",
            "amin.default": "MinNode",
            "max.default": "MaxNode",
            "min.default": "MinNode",
            "logsumexp.default": "LogSumExpNode",
        }.items()
    },
    **{
        f"aten.{name}.{overload}": _condition(kind)
        for name, kind in {"any": "AnyNode", "all": "AllNode"}.items()
        for overload in ("default", "dim", "dims")
    },
    **{
        f"aten.{name}.{overload}": _spread(kind)
        for name, kind in {"var": "VarNode", "std": "StdNode"}.items()
        for overload in ("default", "dim", "correction")
    },
    "aten.argmax.default": _place("ArgmaxNode"),
    "aten.argmin.default": _place("ArgminNode"),
    "aten.max.dim": _extreme("MaxNode", "ArgmaxNode"),
    "aten.min.dim": _extreme("MinNode", "ArgminNode"),
    # orders
    **dict.fromkeys(("aten.sort.default", "aten.sort.stable", "aten.topk.default"), Row(_sort, check_axes)),
    **dict.fromkeys(("aten.argsort.default", "aten.argsort.stable"), Row(_argsort, check_axes)),
    # along an axis
    **dict.fromkeys(("aten._softmax.default", "aten.softmax.int"), Row(_softmax)),
    **dict.fromkeys(("aten._log_softmax.default", "aten.log_softmax.int"), Row(_log_softmax)),
    "aten.cumsum.default": Row(_cumsum),
}
