"""A row per operator: what it becomes in the wire format, and when it does not.

The partitioner asks ``refusal``, the builder calls ``Row.lower``: both read the same row, so that what is claimed is
what is lowered. Operators are keyed by name ("aten.add.Tensor"); an edge operator goes by its ATen one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph import arguments, target_of
from ..program.dtypes import SCALAR_TYPE_CODES
from .builder import GraphBuilder, flat_ints, scalar_type

# Past the end of any axis.
_LIMIT = 2**31 - 1

Lower = Callable[[GraphBuilder, Node], None]
Check = Callable[[Node], "str | None"]


def _no_objection(node: Node) -> str | None:
    return None


@dataclass(frozen=True)
class Row:
    """How one operator is lowered.

    Attributes:
        lower: emits the node's instructions.
        check: returns why a node cannot be lowered, or None.
    """

    lower: Lower
    check: Check = _no_objection


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _rank(node: Node) -> int:
    return int(node.meta["val"].ndim)


# -- row makers ---------------------------------------------------------------


def _unary(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        # torch computes transcendental functions of integers in floating point.
        x = builder.cast(node.args[0], _dtype(node.args[0]), _dtype(node))
        builder.emit(kind, x=x, out=builder.write(node))

    return Row(lower)


def _operand(builder: GraphBuilder, value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor operand in the dtype that an operation computes in; scalars become constants."""
    if isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor):
        return builder.cast(value, _dtype(value), dtype)
    if isinstance(value, Node):
        filled = builder.temp()
        builder.emit("FullNode", out=filled, shape=[], v=builder.read(value), scalar_type=scalar_type(dtype))
        return filled
    return builder.scalar(value, dtype)


def _check_alpha(node: Node) -> str | None:
    alpha = arguments(node).get("alpha", 1)
    return None if alpha in (1, 1.0, None) else f"alpha is {alpha}"


def _binary(kind: str, *, swapped: bool = False) -> Row:
    """Arithmetic: computed in the result's dtype."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        dtype = _dtype(node)
        operands = reversed(node.args[:2]) if swapped else node.args[:2]
        a, b = (_operand(builder, value, dtype) for value in operands)
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    return Row(lower, _check_alpha)


def _comparison(kind: str) -> Row:
    """Comparison: computed in the operands' common dtype, the result is bool."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        values = [value.meta["val"] if isinstance(value, Node) else value for value in node.args[:2]]
        dtype = torch.result_type(*values)
        a, b = (_operand(builder, value, dtype) for value in node.args[:2])
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    return Row(lower)


def _logical(kind: str) -> Row:
    """Bitwise operators on bools are the logical ones."""

    def lower(builder: GraphBuilder, node: Node) -> None:
        builder.emit(kind, a=builder.read(node.args[0]), b=builder.read(node.args[1]), out=builder.write(node))

    return Row(lower, _check_bools)


def _check_bools(node: Node) -> str | None:
    dtypes = [_dtype(value) for value in node.args if isinstance(value, Node)]
    return None if all(dtype is torch.bool for dtype in dtypes) and dtypes else "its operands are not bools"


def _reduction(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        given = arguments(node)
        x = builder.cast(given["self"], _dtype(given["self"]), _dtype(node) if kind != "AnyNode" else torch.bool)
        axes = given.get("dim") if _rank(given["self"]) else None
        builder.emit(
            kind,
            x=x,
            out=builder.write(node),
            axes=flat_ints([axes] if isinstance(axes, int) else axes),
            keepdims=bool(given.get("keepdim", False)),
        )

    return Row(lower)


def _symbolic(kind: str) -> Row:
    def lower(builder: GraphBuilder, node: Node) -> None:
        a, b = (builder.read(value) for value in node.args)
        builder.emit(kind, a=a, b=b, out=builder.write(node))

    def check(node: Node) -> str | None:
        return None if isinstance(node.meta.get("val"), (int, torch.SymInt)) else "it is no integer arithmetic"

    return Row(lower, check)


# -- irregular rows -----------------------------------------------------------


def _view(builder: GraphBuilder, node: Node) -> None:
    source, sizes = node.args[:2]
    builder.emit("ReshapeNode", x=builder.read(source), out=builder.write(node), shape=builder.read(sizes))


def _permute(builder: GraphBuilder, node: Node) -> None:
    rank = _rank(node)
    perm = [dim % rank for dim in node.args[1]]
    builder.emit("TransposeNode", x=builder.read(node.args[0]), out=builder.write(node), perm=perm)


def _transpose(builder: GraphBuilder, node: Node) -> None:
    perm = list(range(_rank(node)))
    first, second = node.args[1:3]
    perm[first], perm[second] = perm[second], perm[first]
    builder.emit("TransposeNode", x=builder.read(node.args[0]), out=builder.write(node), perm=perm)


def _unsqueeze(builder: GraphBuilder, node: Node) -> None:
    axis = node.args[1] % _rank(node)
    builder.emit("ExpandDimsNode", x=builder.read(node.args[0]), out=builder.write(node), axis=axis)


def _squeeze(builder: GraphBuilder, node: Node) -> None:
    dims = arguments(node)["dim"]
    builder.emit(
        "SqueezeNode",
        x=builder.read(node.args[0]),
        out=builder.write(node),
        dims=flat_ints([dims] if isinstance(dims, int) else dims),
    )


def _expand(builder: GraphBuilder, node: Node) -> None:
    source, sizes = node.args[0], list(node.args[1])
    lead = len(sizes) - _rank(source)
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


def _slice(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis = given["dim"] % _rank(node)
    start, stop = given["start"], given["end"]
    builder.emit(
        "SliceNode",
        x=builder.read(given["self"]),
        out=builder.write(node),
        axis=axis,
        start=0 if start is None else builder.read(start),
        stop=_LIMIT if stop is None else min(stop, _LIMIT) if isinstance(stop, int) else builder.read(stop),
        step=given["step"],
    )


def _check_slice(node: Node) -> str | None:
    step = arguments(node)["step"]
    return None if isinstance(step, int) and step > 0 else f"its step is {step}"


def _select(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    axis, index = given["dim"] % _rank(given["self"]), given["index"]
    x = builder.read(given["self"])
    if index >= 0:
        builder.emit("TakeNode", x=x, out=builder.write(node), index=index, axis=axis)
        return
    kept = builder.temp()
    builder.emit("SliceNode", x=x, out=kept, axis=axis, start=index, stop=index + 1 or _LIMIT)
    builder.emit("SqueezeNode", x=kept, out=builder.write(node), dims=[axis])


def _check_select(node: Node) -> str | None:
    return None if isinstance(arguments(node)["index"], int) else "its index is not a constant"


def _cat(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    dtype = _dtype(node)
    tensors = [builder.cast(tensor, _dtype(tensor), dtype) for tensor in given["tensors"]]
    builder.emit("ConcatenateNode", tensors=tensors, out=builder.write(node), axis=given["dim"] % _rank(node))


def _split(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    sizes = given.get("split_sizes", given.get("split_size"))
    source = given["self"]
    builder.emit(
        "SplitNode",
        x=builder.read(source),
        outs=builder.write(node),
        sizes=builder.read(sizes if isinstance(sizes, (list, tuple)) else [sizes]),
        axis=given["dim"] % _rank(source),
    )


def _chunk_sizes(node: Node) -> list[Any]:
    return [part.shape[arguments(node)["dim"]] for part in node.meta["val"]]


def _chunk(builder: GraphBuilder, node: Node) -> None:
    source, dim = node.args[0], arguments(node)["dim"]
    outs = builder.write(node)
    builder.emit("SplitNode", x=builder.read(source), outs=outs, sizes=_chunk_sizes(node), axis=dim % _rank(source))


def _check_chunk(node: Node) -> str | None:
    is_static = all(isinstance(size, int) for size in _chunk_sizes(node))
    return None if is_static else "the dimension that it splits is dynamic"


def _check_dropout(node: Node) -> str | None:
    given = arguments(node)
    return "it is in training mode" if given["train"] and given["p"] else None


def _getitem(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, builder.read(node.args[0])[node.args[1]])


def _cast(builder: GraphBuilder, node: Node) -> None:
    source = node.args[0]
    if _dtype(source) == _dtype(node):
        builder.alias(node, builder.read(source))
    else:
        builder.emit(
            "AsTypeNode",
            x=builder.read(source),
            out=builder.write(node),
            scalar_type=scalar_type(_dtype(node)),
        )


def _alias(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, builder.read(node.args[0]))


def _embedding(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
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
        axis=given["dim"] % _rank(given["self"]),
    )


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
    return "its index is a mask" if _dtype(indices[0]) is torch.bool else None


def _gather(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "TakeAlongAxisNode",
        x=builder.read(given["self"]),
        indices=builder.read(given["index"]),
        out=builder.write(node),
        axis=given["dim"] % _rank(given["self"]),
    )


def _check_gather(node: Node) -> str | None:
    given = arguments(node)
    source, index = given["self"].meta["val"].shape, given["index"].meta["val"].shape
    others = [axis for axis in range(len(source)) if axis != given["dim"] % max(len(source), 1)]
    return None if all(source[axis] == index[axis] for axis in others) else "its index covers a part of other axes only"


def _check_floats(node: Node) -> str | None:
    return None if _dtype(node).is_floating_point else "MLX multiplies matrices of floats only"


def _linear(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    weight = builder.temp()
    builder.emit("TransposeNode", x=builder.read(given["weight"]), out=weight, perm=[1, 0])
    bias = given["bias"]
    builder.emit(
        "AddmmNode",
        mat1=builder.read(given["input"]),
        mat2=weight,
        bias=None if bias is None else builder.read(bias),
        out=builder.write(node),
    )


def _matmul(builder: GraphBuilder, node: Node) -> None:
    a, b = node.args[:2]
    builder.emit("AddmmNode", mat1=builder.read(a), mat2=builder.read(b), out=builder.write(node))


def _addmm(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "AddmmNode",
        bias=builder.read(given["self"]),
        mat1=builder.read(given["mat1"]),
        mat2=builder.read(given["mat2"]),
        alpha=float(given["alpha"]),
        beta=float(given["beta"]),
        out=builder.write(node),
    )


def _gelu(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit("GeluNode", x=builder.read(given["self"]), out=builder.write(node), approximate=given["approximate"])


def _softmax(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    x = builder.cast(given["self"], _dtype(given["self"]), _dtype(node))
    builder.emit("SoftmaxNode", x=x, out=builder.write(node), axis=given["dim"] % _rank(node), precise=True)


def _layer_norm(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    weight, bias = given["weight"], given["bias"]
    builder.emit(
        "LayerNormNode",
        x=builder.read(given["input"]),
        out=builder.write(node),
        weight=None if weight is None else builder.read(weight),
        bias=None if bias is None else builder.read(bias),
        eps=given["eps"],
    )


def _check_norm(node: Node) -> str | None:
    return None if len(arguments(node)["normalized_shape"]) == 1 else "it normalises more than the last axis"


def _rms_norm(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    weight, eps = given["weight"], given["eps"]
    builder.emit(
        "RMSNormNode",
        x=builder.read(given["input"]),
        weight=None if weight is None else builder.read(weight),
        out=builder.write(node),
        # torch computes half precision in float32, and takes that type's default.
        eps=torch.finfo(torch.float32).eps if eps is None else eps,
    )


def _rope(builder: GraphBuilder, node: Node) -> None:
    """Positions per token: MLX's kernel takes an offset per batch entry, so tokens go to the batch axis."""
    x, position, freqs = node.args[:3]
    offset = builder.cast(position, _dtype(position), torch.int32)
    swapped, rotated = builder.temp(), builder.temp()
    builder.emit("TransposeNode", x=builder.read(x), out=swapped, perm=[2, 1, 0, 3])
    builder.emit(
        "RopeNode",
        x=swapped,
        out=rotated,
        dims=int(node.meta["val"].shape[-1]),
        offset=offset,
        freqs=builder.read(freqs),
        traditional=False,
        scale=1.0,
    )
    builder.emit("TransposeNode", x=rotated, out=builder.write(node), perm=[2, 1, 0, 3])


def _sdpa(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    mask, scale = given["attn_mask"], given["scale"]
    head_dim = given["query"].meta["val"].shape[-1]
    builder.emit(
        "SdpaNode",
        q=builder.read(given["query"]),
        k=builder.read(given["key"]),
        v=builder.read(given["value"]),
        out=builder.write(node),
        scale=float(head_dim) ** -0.5 if scale is None else scale,
        mask=None if mask is None else builder.read(mask),
        causal=given["is_causal"],
    )


def _check_sdpa(node: Node) -> str | None:
    given = arguments(node)
    if given["dropout_p"]:
        return f"its dropout is {given['dropout_p']}"
    if _rank(given["query"]) != 4:
        return f"its queries have {_rank(given['query'])} axes, not 4"
    query, key = (given[name].meta["val"].shape[2] for name in ("query", "key"))
    # torch aligns a causal mask to the upper left, MLX to the lower right.
    return "it is causal over another number of keys than queries" if given["is_causal"] and query != key else None


def _update_and_attend(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "UpdateAndAttendNode",
        **{name: builder.read(given[name]) for name in ("q", "k", "v", "position")},
        out=builder.write(node),
        layer_id=given["layer_id"],
        scale=given["scale"],
        out_dtype=scalar_type(given["out_dtype"]),
    )


def _where(builder: GraphBuilder, node: Node) -> None:
    condition, x, y = node.args[:3]
    dtype = _dtype(node)
    builder.emit(
        "WhereNode",
        condition=builder.read(condition),
        x=_operand(builder, x, dtype),
        y=_operand(builder, y, dtype),
        out=builder.write(node),
    )


def _argmax(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    source = given["self"]
    builder.emit(
        "ArgmaxNode",
        x=builder.read(source),
        out=builder.write(node),
        axis=given["dim"] % _rank(source),
        keepdims=bool(given["keepdim"]),
    )


def _check_argmax(node: Node) -> str | None:
    return None if arguments(node)["dim"] is not None else "it flattens its operand"


def _arange(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "ARangeNode",
        out=builder.write(node),
        start=builder.read(given.get("start", 0)),
        stop=builder.read(given["end"]),
        step=builder.read(given.get("step", 1)),
        scalar_type=scalar_type(_dtype(node)),
    )


def _check_arange(node: Node) -> str | None:
    given = arguments(node)
    values = [given.get("start", 0), given["end"], given.get("step", 1)]
    return "its bounds are not integers" if any(isinstance(value, float) for value in values) else None


def _full(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "FullNode",
        out=builder.write(node),
        shape=builder.read(given["size"]),
        v=_float_or_slot(builder.read(given["fill_value"])),
        scalar_type=scalar_type(_dtype(node)),
    )


def _full_like(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "FullLikeNode",
        x=builder.read(given["self"]),
        out=builder.write(node),
        v=_float_or_slot(builder.read(given["fill_value"])),
        scalar_type=scalar_type(_dtype(node)),
    )


def _check_fill(node: Node) -> str | None:
    value = arguments(node)["fill_value"]
    is_exact = not isinstance(value, int) or abs(value) <= 2**53
    return None if is_exact else f"the format holds its value {value} as a float, which is not exact"


def _scalar_tensor(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, _operand(builder, node.args[0], _dtype(node)))


def _float_or_slot(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float)) else value


def _sym_size(builder: GraphBuilder, node: Node) -> None:
    source, dim = node.args[:2]
    builder.emit("SymSizeNode", a=builder.read(source), dim=dim % _rank(source), out=builder.write(node))


ROWS: dict[str, Row] = {
    # elementwise, one operand
    **{
        f"aten.{name}.default": _unary(kind)
        for name, kind in {
            "abs": "AbsNode",
            "bitwise_not": "BitwiseInvertNode",
            "cos": "CosNode",
            "exp": "ExpNode",
            "log": "LogNode",
            "logical_not": "LogicalNotNode",
            "neg": "NegNode",
            "reciprocal": "ReciprocalNode",
            "rsqrt": "RsqrtNode",
            "sigmoid": "SigmoidNode",
            "sin": "SinNode",
            "sqrt": "SqrtNode",
            "tanh": "TanhNode",
        }.items()
    },
    "aten.silu.default": _unary("SiluNode"),
    "aten.gelu.default": Row(_gelu),
    # elementwise, two operands
    **{f"aten.add.{overload}": _binary("AddNode") for overload in ("Tensor", "Scalar")},
    **{f"aten.sub.{overload}": _binary("SubtractNode") for overload in ("Tensor", "Scalar")},
    **{f"aten.mul.{overload}": _binary("MultiplyNode") for overload in ("Tensor", "Scalar")},
    **{f"aten.div.{overload}": _binary("DivideNode") for overload in ("Tensor", "Scalar")},
    "aten.rsub.Scalar": _binary("SubtractNode", swapped=True),
    **{f"aten.pow.{overload}": _binary("PowerNode") for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar")},
    "aten.maximum.default": _binary("MaximumNode"),
    "aten.minimum.default": _binary("MinimumNode"),
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
    "aten.logical_and.default": _logical("LogicalAndNode"),
    "aten.logical_or.default": _logical("LogicalOrNode"),
    "aten.bitwise_and.Tensor": _logical("LogicalAndNode"),
    "aten.bitwise_or.Tensor": _logical("LogicalOrNode"),
    "aten.where.self": Row(_where),
    # reductions
    "aten.mean.dim": _reduction("MeanNode"),
    "aten.sum.dim_IntList": _reduction("SumNode"),
    "aten.amax.default": _reduction("MaxNode"),
    "aten.amin.default": _reduction("MinNode"),
    "aten.any.dim": _reduction("AnyNode"),
    "aten.argmax.default": Row(_argmax, _check_argmax),
    "aten._softmax.default": Row(_softmax),
    "aten.softmax.int": Row(_softmax),
    # shapes
    **{f"aten.{name}.default": Row(_view) for name in ("view", "view_copy", "_unsafe_view", "reshape")},
    **{f"aten.{name}.default": Row(_permute) for name in ("permute", "permute_copy")},
    **{f"aten.{name}.int": Row(_transpose) for name in ("transpose", "transpose_copy")},
    **{f"aten.{name}.default": Row(_unsqueeze) for name in ("unsqueeze", "unsqueeze_copy")},
    **{
        f"aten.{name}.{overload}": Row(_squeeze) for name in ("squeeze", "squeeze_copy") for overload in ("dim", "dims")
    },
    **{f"aten.{name}.default": Row(_expand) for name in ("expand", "expand_copy")},
    **{f"aten.{name}.Tensor": Row(_slice, _check_slice) for name in ("slice", "slice_copy")},
    **{f"aten.{name}.int": Row(_select, _check_select) for name in ("select", "select_copy")},
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
    "getitem": Row(_getitem),
    # dtypes and copies
    **{
        name: Row(_cast)
        for name in (
            "aten._to_copy.default",
            "aten.to.dtype",
            "aten.to.dtype_layout",
            "aten.type_as.default",
            "dim_order_ops._to_dim_order_copy.default",
        )
    },
    **{
        name: Row(_alias)
        for name in (
            "aten.alias.default",
            "aten.alias_copy.default",
            "aten.clone.default",
            "aten.contiguous.default",
            "aten.detach_copy.default",
            "dim_order_ops._clone_dim_order.default",
        )
    },
    "aten.dropout.default": Row(_alias, _check_dropout),
    # indexing
    "aten.embedding.default": Row(_embedding),
    "aten.index_select.default": Row(_index_select),
    "aten.index.Tensor": Row(_index, _check_index),
    "aten.gather.default": Row(_gather, _check_gather),
    # the model's heavy parts
    "aten.linear.default": Row(_linear, _check_floats),
    "aten.matmul.default": Row(_matmul, _check_floats),
    "aten.mm.default": Row(_matmul, _check_floats),
    "aten.bmm.default": Row(_matmul, _check_floats),
    "aten.addmm.default": Row(_addmm, _check_floats),
    "aten.layer_norm.default": Row(_layer_norm, _check_norm),
    "aten.rms_norm.default": Row(_rms_norm, _check_norm),
    "aten.scaled_dot_product_attention.default": Row(_sdpa, _check_sdpa),
    "executorch_mlx.rope.default": Row(_rope),
    "executorch_mlx.update_and_attend.default": Row(_update_and_attend),
    "kvcache.update_and_attend.default": Row(_update_and_attend),
    # new tensors
    "aten.arange.default": Row(_arange, _check_arange),
    "aten.arange.start_step": Row(_arange, _check_arange),
    "aten.full.default": Row(_full, _check_fill),
    "aten.full_like.default": Row(_full_like, _check_fill),
    "aten.scalar_tensor.default": Row(_scalar_tensor),
    # symbolic integers
    "aten.sym_size.int": Row(_sym_size),
    "add": _symbolic("AddIntNode"),
    "sub": _symbolic("SubtractIntNode"),
    "mul": _symbolic("MultiplyIntNode"),
    "floordiv": _symbolic("FloorDivideIntNode"),
    "mod": _symbolic("ModIntNode"),
}


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
    return row.check(node)


def _is_channels_last(value: torch.Tensor) -> bool:
    """Whether [N, C, ...] lies in memory as [N, ..., C]. Symbols are compared with nothing: that would fix them."""
    if value.ndim not in (4, 5):
        return False
    is_one = [isinstance(size, int) and size == 1 for size in value.shape]
    stride = value.stride()[1]
    return isinstance(stride, int) and stride == 1 and not is_one[1] and not all(is_one[2:])


# float64 exists on MLX's CPU only, complex and quantized dtypes have no form in the format.
_DTYPES = SCALAR_TYPE_CODES.keys() - {"float64"}
