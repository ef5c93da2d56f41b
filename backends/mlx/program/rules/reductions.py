"""Functions along axes: sums, extremes, orders."""

from __future__ import annotations

from ..types import FLOATS, ONE, Shape, TensorType, as_float, as_int64
from .base import Call, DtypeRule, Result, Rule, along, always, require, same


def _without(shape: Shape | None, axes: list[int], keepdims: bool) -> Shape | None:
    if shape is None:
        return None
    kept = [ONE if axis in axes else size for axis, size in enumerate(shape) if keepdims or axis not in axes]
    return tuple(kept)


def _reduction(result: DtypeRule = same, *, needs_elements: bool = False) -> Rule:
    def rule(call: Call) -> Result:
        x = call.tensor("x")
        axes = call.axes(x.shape) or list(range(len(x.shape or ())))
        if needs_elements and x.shape is not None:
            empty = [axis for axis in axes if axis < len(x.shape) and x.shape[axis].high == 0]
            require(not empty, f"axes {empty} have no elements, of which there is no extreme")
        return TensorType(_without(x.shape, axes, call.node.keepdims), result(x.dtype))

    return rule


def _place_of_extreme(call: Call) -> Result:
    x = call.tensor("x")
    axis = call.axis(x.shape)
    if not x.shape:
        return TensorType(x.shape, "int64")
    require(x.shape[axis].high > 0, f"axis {axis} has no elements, of which there is no extreme")
    return TensorType(_without(x.shape, [axis], call.node.keepdims), "int64")


def _partition(result: DtypeRule) -> Rule:
    def rule(call: Call) -> Result:
        x = call.tensor("x")
        axis, kth = call.axis(x.shape), call.number("kth")
        if x.shape is not None:
            size = x.shape[axis] if x.shape else ONE
            require(kth.low < size.high and kth.high >= -size.high, f"kth is {kth}, of an axis of {size}")
        return TensorType(x.shape, result(x.dtype))

    return rule


RULES: dict[str, Rule] = {
    "AllNode": _reduction(always("bool")),
    "AnyNode": _reduction(always("bool")),
    "LogSumExpNode": _reduction(as_float),
    "MaxNode": _reduction(needs_elements=True),
    "MeanNode": _reduction(as_float),
    "MedianNode": _reduction(as_float, needs_elements=True),
    "MinNode": _reduction(needs_elements=True),
    "ProdNode": _reduction(as_int64),
    "StdNode": _reduction(as_float),
    "SumNode": _reduction(as_int64),
    "VarNode": _reduction(as_float),
    "ArgmaxNode": _place_of_extreme,
    "ArgminNode": _place_of_extreme,
    "CumsumNode": along(as_int64),
    "SoftmaxNode": along(dtypes=FLOATS),
    "SortNode": along(),
    "ArgsortNode": along(always("int64")),
    "PartitionNode": _partition(same),
    "ArgPartitionNode": _partition(always("int64")),
}
