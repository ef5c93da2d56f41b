"""A row per operator: what it becomes in the wire format, and when it does not; in parts by subject.

The partitioner asks ``refusal``, the builder calls ``Row.lower``: both read the same row, so that what is claimed is
what is lowered. Operators are keyed by name ("aten.add.Tensor"); an edge operator goes by its ATen one.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ...graph import arguments, target_of
from ...program.dtypes import SCALAR_TYPE_CODES
from . import attention, creation, elementwise, indexing, products, quantized, reductions, shapes, values
from .base import Row

_PARTS = (elementwise, reductions, shapes, indexing, products, quantized, attention, creation, values)

ROWS: dict[str, Row] = {name: row for part in _PARTS for name, row in part.ROWS.items()}
assert len(ROWS) == sum(len(part.ROWS) for part in _PARTS), "an operator has rows in two parts"


def name_of(node: Node) -> str:
    """Return the key of a call's row: "namespace.operator.overload", or a Python function's name."""
    target = target_of(node)
    return str(target) if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", target))


def refusal(node: Node) -> str | None:
    """Return why a call cannot be lowered, or None where it can."""
    row = ROWS.get(name_of(node))
    if row is None:
        return "there is no lowering for this operator"
    for value in (node, *node.all_input_nodes):
        results = value.meta.get("val")
        for result in results if isinstance(results, (list, tuple)) else (results,):
            if not isinstance(result, torch.Tensor):
                continue
            if str(result.dtype).rsplit(".", 1)[-1] not in _DTYPES:
                return f"it works on {result.dtype}, which MLX does not run on every device"
            if _is_channels_last(result):
                return "its memory is in channels_last order, and a delegate's is in row-major order"
    return _unfit_number(node) or row.check(node)


def _unfit_number(node: Node) -> str | None:
    """Return which number of a call has no form in the integers that it computes in; torch wraps some."""
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    given = arguments(node)
    tensor = given.get("self")
    for argument in target._schema.arguments:
        number = given.get(argument.name)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        if str(argument.type) not in _NUMBERS or not is_number or not isinstance(tensor, Node):
            continue
        dtype = torch.result_type(tensor.meta["val"], number)
        is_integer = not dtype.is_floating_point and dtype is not torch.bool
        if is_integer and not torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max:
            return f"its number {number} has no form in {dtype}"
    return None


def _is_channels_last(value: torch.Tensor) -> bool:
    """Whether [N, C, ...] lies in memory as [N, ..., C]. Symbols are compared with nothing: that would fix them."""
    if value.ndim not in (4, 5):
        return False
    is_one = [isinstance(size, int) and size == 1 for size in value.shape]
    stride = value.stride()[1]
    return isinstance(stride, int) and stride == 1 and not is_one[1] and not all(is_one[2:])


# The types of arguments that a Python number may stand for.
_NUMBERS = {"Tensor", "number", "Optional[number]"}

# float64 exists on MLX's CPU only, complex and quantized dtypes have no form in the format.
_DTYPES = SCALAR_TYPE_CODES.keys() - {"float64"}
