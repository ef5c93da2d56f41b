"""The same elements in another shape or order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...graph import arguments
from ..builder import GraphBuilder, flat_ints
from .base import LIMIT, Row, axis_of, dtype_of, rank_of, size_of, sizes_of


def _view(builder: GraphBuilder, node: Node) -> None:
    source, sizes = node.args[:2]
    builder.emit("ReshapeNode", x=builder.read(source), out=builder.write(node), shape=builder.read(sizes))


def _permute(builder: GraphBuilder, node: Node) -> None:
    rank = rank_of(node)
    perm = [dim % rank for dim in node.args[1]]
    builder.emit("TransposeNode", x=builder.read(node.args[0]), out=builder.write(node), perm=perm)


def _transpose(builder: GraphBuilder, node: Node) -> None:
    # Torch takes a scalar for a vector of one.
    perm = list(range(rank_of(node)))
    if perm:
        first, second = node.args[1:3]
        perm[first], perm[second] = perm[second], perm[first]
    builder.emit("TransposeNode", x=builder.read(node.args[0]), out=builder.write(node), perm=perm)


def _t(builder: GraphBuilder, node: Node) -> None:
    """The transposed matrix; torch leaves a vector as it is."""
    perm = list(reversed(range(rank_of(node))))
    builder.emit("TransposeNode", x=builder.read(node.args[0]), out=builder.write(node), perm=perm)


def _unsqueeze(builder: GraphBuilder, node: Node) -> None:
    axis = node.args[1] % rank_of(node)
    builder.emit("ExpandDimsNode", x=builder.read(node.args[0]), out=builder.write(node), axis=axis)


def _squeeze(builder: GraphBuilder, node: Node) -> None:
    dims = arguments(node)["dim"]
    source = node.args[0]
    if not rank_of(source):
        builder.alias(node, builder.read(source))
        return
    builder.emit(
        "SqueezeNode",
        x=builder.read(source),
        out=builder.write(node),
        dims=flat_ints([dims] if isinstance(dims, int) else dims),
    )


def _expand(builder: GraphBuilder, node: Node) -> None:
    source, sizes = node.args[0], list(node.args[1])
    lead = len(sizes) - rank_of(source)
    x = builder.read(source)
    shape: list[Any] = []
    for axis, size in enumerate(sizes):
        if isinstance(size, int) and size == -1:
            known = source.meta["val"].shape[axis - lead]
            if isinstance(known, int):
                shape.append(known)
            else:
                shape.append(builder.value())
                builder.emit("SymSizeNode", a=x, dim=axis - lead, out=shape[-1])
        else:
            shape.append(builder.read(size))
    builder.emit("BroadcastToNode", x=x, out=builder.write(node), shape=shape)


def _cat(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    dtype = dtype_of(node)
    # Torch leaves out vectors of no elements, whatever the others' shape.
    kept = [tensor for tensor in given["tensors"] if tensor.meta["val"].shape != (0,) or rank_of(node) == 1]
    tensors = [builder.cast(tensor, dtype_of(tensor), dtype) for tensor in kept]
    builder.emit("ConcatenateNode", tensors=tensors, out=builder.write(node), axis=given["dim"] % rank_of(node))


def _split(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    sizes = given.get("split_sizes", given.get("split_size"))
    source = given["self"]
    builder.emit(
        "SplitNode",
        x=builder.read(source),
        outs=builder.write(node),
        sizes=builder.read(sizes if isinstance(sizes, (list, tuple)) else [sizes]),
        axis=given["dim"] % rank_of(source),
    )


def _chunk_sizes(node: Node) -> list[Any]:
    return [part.shape[arguments(node)["dim"]] for part in node.meta["val"]]


def _chunk(builder: GraphBuilder, node: Node) -> None:
    source, dim = node.args[0], arguments(node)["dim"]
    outs = builder.write(node)
    builder.emit("SplitNode", x=builder.read(source), outs=outs, sizes=_chunk_sizes(node), axis=dim % rank_of(source))


def _check_chunk(node: Node) -> str | None:
    is_static = all(isinstance(size, int) for size in _chunk_sizes(node))
    return None if is_static else "the dimension that it splits is dynamic"


def _flatten(builder: GraphBuilder, node: Node) -> None:
    """Sizes that stay are known; the one that is made of several is what is left."""
    given = arguments(node)
    source = given["self"]
    first, last = axis_of(source, given["start_dim"]), axis_of(source, given["end_dim"])
    kept = [size_of(builder, source, axis) for axis in range(rank_of(source)) if not first <= axis <= last]
    merged = node.meta["val"].shape[first]
    shape = [*kept[:first], merged if isinstance(merged, int) else -1, *kept[first:]]
    builder.emit("ReshapeNode", x=builder.read(source), out=builder.write(node), shape=shape)


def _unflatten(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    source = given["self"]
    sizes, axis = sizes_of(builder, source), axis_of(source, given["dim"])
    sizes[axis : axis + 1] = builder.read(given["sizes"])
    builder.emit("ReshapeNode", x=builder.read(source), out=builder.write(node), shape=sizes)


def _stack(builder: GraphBuilder, node: Node) -> None:
    given, dtype = arguments(node), dtype_of(node)
    tensors = [builder.cast(tensor, dtype_of(tensor), dtype) for tensor in given["tensors"]]
    builder.emit("StackNode", tensors=tensors, out=builder.write(node), axis=axis_of(node, given["dim"]))


def _repeat(builder: GraphBuilder, node: Node) -> None:
    source, reps = node.args[:2]
    builder.emit("TileNode", x=builder.read(source), out=builder.write(node), reps=builder.read(reps))


def _repeat_interleave(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    source, repeats, dim = given["self"], builder.read(given["repeats"]), given["dim"]
    x = builder.read(source)
    # Without an axis, and without axes: all elements in a row.
    if dim is None or not rank_of(source):
        x, axis = builder.compute("ReshapeNode", x=x, shape=[-1]), 0
    else:
        axis = axis_of(source, dim)
    builder.emit("RepeatNode", x=x, out=builder.write(node), repeats=repeats, axis=axis)


def _flip(builder: GraphBuilder, node: Node) -> None:
    source, dims = node.args[:2]
    axes = [axis_of(source, dim) for dim in dims] if rank_of(source) else []
    builder.emit("FlipNode", x=builder.read(source), out=builder.write(node), axes=axes)


def _roll(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    source, shift = given["self"], builder.read(given["shifts"])
    x, axes = builder.read(source), [axis_of(source, dim) for dim in given["dims"]]
    if axes:
        builder.emit("RollNode", x=x, out=builder.write(node), shift=shift, axes=axes)
        return
    row = builder.compute("ReshapeNode", x=x, shape=[-1])
    rolled = builder.compute("RollNode", x=row, shift=shift, axes=[0])
    builder.emit("ReshapeNode", x=rolled, out=builder.write(node), shape=sizes_of(builder, source))


def _triangle(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        k = max(-LIMIT, min(given["diagonal"], LIMIT))
        builder.emit(kind, x=builder.read(given["self"]), out=builder.write(node), k=k)

    def check(node: Node) -> str | None:
        is_constant = isinstance(arguments(node)["diagonal"], int)
        return None if is_constant else "its diagonal is not a constant"

    return Row(lower, check)


_PAD_MODES = {"constant": "constant", "replicate": "edge"}


def _pad(builder: GraphBuilder, node: Node) -> None:
    """Torch counts from the last axis, and may leave out the first ones."""
    given = arguments(node)
    x, widths = builder.read(given["self"]), builder.read(given["pad"])
    pairs = [widths[place : place + 2] for place in range(0, len(widths), 2)]
    pairs += [[0, 0]] * (rank_of(node) - len(pairs))
    pairs.reverse()
    for axis, pair in enumerate(pairs):
        # A negative width takes elements away.
        before, after = (min(width, 0) if isinstance(width, int) else 0 for width in pair)
        if before or after:
            x = builder.compute("SliceNode", x=x, axis=axis, start=-before, stop=after or LIMIT)
    builder.emit(
        "PadNode",
        x=x,
        out=builder.write(node),
        pad_width=[max(width, 0) if isinstance(width, int) else width for pair in pairs for width in pair],
        mode=_PAD_MODES[given.get("mode", "constant")],
        constant_value=float(given["value"] or 0),
    )


def _check_pad(node: Node) -> str | None:
    given = arguments(node)
    mode, value = given.get("mode", "constant"), given["value"] or 0
    if mode not in _PAD_MODES:
        return f"its mode is {mode}"
    if not all(_is_width(width) for width in given["pad"]):
        return "a width of it may be negative, which is known only when it runs"
    if dtype_of(node).is_floating_point:
        is_held = not math.isfinite(value) or abs(value) <= torch.finfo(torch.float32).max
    else:
        is_held = float(value).is_integer() and abs(value) <= 2**24
    return None if is_held else f"the format holds its value {value} as a float of 32 bits, which is not exact"


def _is_width(width: Any) -> bool:
    """Whether it is known if a width takes elements away."""
    return isinstance(width, int) or (isinstance(width, Node) and statically_known_true(width.meta["val"] >= 0))


ROWS: dict[str, Row] = {
    **{f"aten.{name}.default": Row(_view) for name in ("view", "view_copy", "_unsafe_view", "reshape")},
    **{f"aten.{name}.default": Row(_permute) for name in ("permute", "permute_copy")},
    **{f"aten.{name}.int": Row(_transpose) for name in ("transpose", "transpose_copy")},
    **{f"aten.{name}.default": Row(_t) for name in ("t", "t_copy")},
    **{f"aten.{name}.default": Row(_unsqueeze) for name in ("unsqueeze", "unsqueeze_copy")},
    **{
        f"aten.{name}.{overload}": Row(_squeeze) for name in ("squeeze", "squeeze_copy") for overload in ("dim", "dims")
    },
    **{f"aten.{name}.default": Row(_expand) for name in ("expand", "expand_copy")},
    "aten.cat.default": Row(_cat),
    **{
        f"aten.{name}": Row(_split)
        for name in (
            "split_with_sizes.default",
            "split_with_sizes_copy.default",
            "split.Tensor",
            "split_copy.Tensor",
        )
    },
    "aten.chunk.default": Row(_chunk, _check_chunk),
    "aten.flatten.using_ints": Row(_flatten),
    "aten.unflatten.int": Row(_unflatten),
    "aten.stack.default": Row(_stack),
    "aten.repeat.default": Row(_repeat),
    "aten.repeat_interleave.self_int": Row(_repeat_interleave),
    "aten.flip.default": Row(_flip),
    "aten.roll.default": Row(_roll),
    "aten.tril.default": _triangle("TrilNode"),
    "aten.triu.default": _triangle("TriuNode"),
    **dict.fromkeys(("aten.constant_pad_nd.default", "aten.pad.default"), Row(_pad, _check_pad)),
}
