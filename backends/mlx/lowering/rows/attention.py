"""What transformers are made of: norms, rotations, attention."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder, scalar_type
from .base import Row, dtype_of, rank_of


def _layer_norm(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    operands = {"x": given["input"], "weight": given["weight"], "bias": given["bias"]}
    operands = {name: builder.read(operand) for name, operand in operands.items()}
    builder.emit("LayerNormNode", out=builder.write(node), eps=given["eps"], **operands)


def _check_norm(node: Node) -> str | None:
    return None if len(arguments(node)["normalized_shape"]) == 1 else "it normalises more than the last axis"


def _rms_norm(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    weight, eps = given["weight"], given["eps"]
    builder.emit(
        "RMSNormNode",
        x=builder.read(given["input"]),
        weight=builder.read(weight),
        out=builder.write(node),
        # torch computes half precision in float32, and takes that type's default.
        eps=torch.finfo(torch.float32).eps if eps is None else eps,
    )


def _rope(builder: GraphBuilder, node: Node) -> None:
    """Positions per token: MLX's kernel takes an offset per batch entry, so tokens go to the batch axis."""
    given = arguments(node)
    x, position, freqs = given["x"], given["position"], given["freqs"]
    offset = builder.cast(position, dtype_of(position), torch.int32)
    swapped, rotated = builder.temp(), builder.temp()
    builder.emit("TransposeNode", x=builder.read(x), out=swapped, perm=[2, 1, 0, 3])
    builder.emit(
        "RopeNode",
        x=swapped,
        out=rotated,
        dims=int(node.meta["val"].shape[-1]),
        offset=offset,
        freqs=builder.read(freqs),
        traditional=given["traditional"],
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
        mask=builder.read(mask),
        causal=given["is_causal"],
    )


def _check_sdpa(node: Node) -> str | None:
    given = arguments(node)
    if given["dropout_p"]:
        return f"its dropout is {given['dropout_p']}"
    if rank_of(given["query"]) != 4:
        return f"its queries have {rank_of(given['query'])} axes, not 4"
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


ROWS: dict[str, Row] = {
    "aten.layer_norm.default": Row(_layer_norm, _check_norm),
    "aten.rms_norm.default": Row(_rms_norm, _check_norm),
    "aten.scaled_dot_product_attention.default": Row(_sdpa, _check_sdpa),
    "executorch_mlx.rope.default": Row(_rope),
    "executorch_mlx.update_and_attend.default": Row(_update_and_attend),
    "kvcache.update_and_attend.default": Row(_update_and_attend),
}
