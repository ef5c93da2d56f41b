"""Reading and writing at indices."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...graph import arguments
from ..builder import GraphBuilder, scalar_type
from .base import LIMIT, Row, axis_of, check_axes, dtype_of, rank_of
from .quantized import is_quantized, look_up


def _slice(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis = given["dim"] % rank_of(node)
    start, stop = given["start"], given["end"]
    builder.emit(
        "SliceNode",
        x=builder.read(given["self"]),
        out=builder.write(node),
        axis=axis,
        **_bounds(builder, start, stop),
        step=given["step"],
    )


def _bounds(builder: GraphBuilder, start: Any, stop: Any) -> dict[str, Any]:
    """Return the fields of a slice's bounds; torch's end of everything is more than the format holds."""
    return {
        "start": 0 if start is None else builder.read(start),
        "stop": LIMIT if stop is None else min(stop, LIMIT) if isinstance(stop, int) else builder.read(stop),
    }


def _check_slice(node: Node) -> str | None:
    step = arguments(node)["step"]
    return None if isinstance(step, int) and step > 0 else f"its step is {step}"


def _select(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis, index = given["dim"] % rank_of(given["self"]), given["index"]
    x = builder.read(given["self"])
    if isinstance(index, Node):
        # What torch traces is never counted from the end.
        start, stop, kept = builder.read(index), builder.value(), builder.temp()
        builder.emit("AddIntNode", a=start, b=1, out=stop)
        builder.emit("SliceNode", x=x, out=kept, axis=axis, start=start, stop=stop)
        builder.emit("SqueezeNode", x=kept, out=builder.write(node), dims=[axis])
        return
    if index >= 0:
        builder.emit("TakeNode", x=x, out=builder.write(node), index=index, axis=axis)
        return
    kept = builder.temp()
    builder.emit("SliceNode", x=x, out=kept, axis=axis, start=index, stop=index + 1 or LIMIT)
    builder.emit("SqueezeNode", x=kept, out=builder.write(node), dims=[axis])


def _check_select(node: Node) -> str | None:
    index = arguments(node)["index"]
    is_known = isinstance(index, int) or statically_known_true(index.meta["val"] >= 0)
    return None if is_known else "its index may be counted from the end, which is known only when it runs"


def _embedding(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    if is_quantized(given["weight"]) and rank_of(given["indices"]):
        look_up(builder, given["weight"], builder.read(given["indices"]), builder.write(node))
        return
    builder.emit(
        "TakeNode",
        x=builder.read(given["weight"]),
        out=builder.write(node),
        index=builder.read(given["indices"]),
        axis=0,
    )


def _index_select(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "TakeNode",
        x=builder.read(given["self"]),
        out=builder.write(node),
        index=builder.read(given["index"]),
        axis=given["dim"] % rank_of(given["self"]),
    )


def _check_index_select(node: Node) -> str | None:
    return check_axes(node) or (None if rank_of(arguments(node)["index"]) == 1 else "its index has no axes")


def _index(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis, index = next((axis, index) for axis, index in enumerate(given["indices"]) if index is not None)
    builder.emit(
        "TakeNode",
        x=builder.read(given["self"]),
        out=builder.write(node),
        index=builder.read(index),
        axis=axis,
    )


def _check_index(node: Node) -> str | None:
    indices = [index for index in arguments(node)["indices"] if index is not None]
    if len(indices) != 1:
        return f"it indexes {len(indices)} axes at once"
    return "its index is a mask" if dtype_of(indices[0]) is torch.bool else None


def _gather(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "TakeAlongAxisNode",
        x=builder.read(given["self"]),
        indices=builder.read(given["index"]),
        out=builder.write(node),
        axis=given["dim"] % rank_of(given["self"]),
    )


def _check_gather(node: Node) -> str | None:
    given = arguments(node)
    if not rank_of(given["self"]) or not rank_of(given["index"]):
        return "its operand or its index has no axes"
    source, index = given["self"].meta["val"].shape, given["index"].meta["val"].shape
    others = [axis for axis in range(len(source)) if axis != given["dim"] % len(source)]
    return None if all(source[axis] == index[axis] for axis in others) else "its index covers a part of other axes only"


def _slice_scatter(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    start, end = given["start"], given["end"]
    builder.emit(
        "SliceUpdateNode",
        dst=builder.read(given["self"]),
        update=builder.cast(given["src"], dtype_of(given["src"]), dtype_of(node)),
        out=builder.write(node),
        axis=given["dim"] % rank_of(node),
        **_bounds(builder, start, end),
        step=given["step"],
    )


def _select_scatter(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis, index = given["dim"] % rank_of(node), given["index"]
    source = builder.cast(given["src"], dtype_of(given["src"]), dtype_of(node))
    builder.emit(
        "SliceUpdateNode",
        dst=builder.read(given["self"]),
        update=builder.compute("ExpandDimsNode", x=source, axis=axis),
        out=builder.write(node),
        axis=axis,
        start=index,
        stop=index + 1 or LIMIT,
    )


def _scatter_add(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "ScatterAddNode",
        x=builder.read(given["self"]),
        indices=builder.read(given["index"]),
        updates=builder.read(given["src"]),
        out=builder.write(node),
        axis=axis_of(node, given["dim"]),
    )


def _scatter_value(builder: GraphBuilder, node: Node) -> None:
    """The value is written where counts of the indices are not zero."""
    given, counted = arguments(node), scalar_type(torch.int32)
    x, indices = builder.read(given["self"]), builder.read(given["index"])
    counts = builder.compute(
        "ScatterAddNode",
        x=builder.compute("FullLikeNode", x=x, v=0.0, scalar_type=counted),
        indices=indices,
        updates=builder.compute("FullLikeNode", x=indices, v=1.0, scalar_type=counted),
        axis=axis_of(node, given["dim"]),
    )
    builder.emit(
        "WhereNode",
        condition=builder.compute("NotEqualNode", a=counts, b=builder.scalar(0, torch.int32)),
        x=builder.scalar(given["value"], dtype_of(node)),
        y=x,
        out=builder.write(node),
    )


ROWS: dict[str, Row] = {
    **{f"aten.{name}.Tensor": Row(_slice, _check_slice) for name in ("slice", "slice_copy")},
    **{f"aten.{name}.int": Row(_select, _check_select) for name in ("select", "select_copy")},
    "aten.embedding.default": Row(_embedding),
    "aten.index_select.default": Row(_index_select, _check_index_select),
    "aten.index.Tensor": Row(_index, _check_index),
    "aten.gather.default": Row(_gather, _check_gather),
    "aten.slice_scatter.default": Row(_slice_scatter, _check_slice),
    "aten.select_scatter.default": Row(_select_scatter, _check_select),
    "aten.scatter.value": Row(_scatter_value, check_axes),
    "aten.scatter_add.default": Row(_scatter_add, check_axes),
}
