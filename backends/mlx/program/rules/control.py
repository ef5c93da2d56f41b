"""Instructions that run others: chains, and kernels of the program's own.

What chains do to what is known is found by running them (``flow``); here is what the instruction itself needs.
"""

from __future__ import annotations

from ..dtypes import SCALAR_TYPE_NAMES
from ..types import TensorType
from .base import Call, Result, Rule, normalized, require, require_same


def _if(call: Call) -> Result:
    call.number("cond")
    return None


def _scan(call: Call) -> Result:
    """The types of ``sliced``: each original without the axis that it goes over."""
    originals, axis = call.tensors("originals"), call.node.scan_axis
    require(bool(originals), "there is nothing to go over")
    require(len(originals) == len(call.node.sliced), f"{len(originals)} originals, {len(call.node.sliced)} slices")
    length, sliced = None, []
    for x in originals:
        if x.shape is None:
            sliced.append(x)
            continue
        require(x.shape != (), "one of the originals has no axes")
        place = normalized(axis, x.shape, "scan_axis")
        size = x.shape[place]
        require(size.high > 0, "there is nothing to go over")
        length = size if length is None else require_same(length, size, "lengths of what it goes over")
        sliced.append(TensorType((*x.shape[:place], *x.shape[place + 1 :]), x.dtype))
    return sliced


def _metal_kernel(call: Call) -> Result:
    node = call.node
    inputs, outputs = len(node.inputs), len(node.outputs)
    for field, count in (("input_names", inputs), ("output_names", outputs), ("output_shape_lengths", outputs)):
        given = getattr(node, field) or []
        require(len(given) == count, f"{field} has {len(given)} entries, expected {count}")
    dtypes = node.output_dtypes or []
    require(len(dtypes) == outputs, f"output_dtypes has {len(dtypes)} entries, expected {outputs}")
    require(set(dtypes) <= SCALAR_TYPE_NAMES.keys(), f"output_dtypes: unknown scalar types in {dtypes}")
    for field in ("grid", "threadgroup"):
        require(len(call.numbers(field, 1)) == 3, f"{field} has {len(getattr(node, field))} sizes, expected 3")
    sizes = call.numbers("output_shapes_flat", 0) if call.has("output_shapes_flat") else []
    lengths = node.output_shape_lengths or []
    require(
        min(lengths, default=0) >= 0 and sum(lengths) == len(sizes),
        f"output_shapes_flat has {len(sizes)} sizes, output_shape_lengths are {lengths}",
    )
    names, kinds, values = (getattr(node, f"template_arg_{part}") or [] for part in ("names", "kinds", "values"))
    require(len(names) == len(kinds) == len(values), "template arguments: names, kinds and values differ in number")
    results = []
    for length, dtype in zip(lengths, dtypes, strict=True):
        results.append(TensorType(tuple(sizes[:length]), SCALAR_TYPE_NAMES[dtype]))
        sizes = sizes[length:]
    return results


RULES: dict[str, Rule] = {"IfNode": _if, "MetalKernelNode": _metal_kernel, "ScanNode": _scan}
