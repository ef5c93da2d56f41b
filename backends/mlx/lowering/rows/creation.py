"""New tensors."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder, scalar_type
from .base import Row, dtype_of, operand


def _arange(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    builder.emit(
        "ARangeNode",
        out=builder.write(node),
        start=builder.read(given.get("start", 0)),
        stop=builder.read(given["end"]),
        step=builder.read(given.get("step", 1)),
        scalar_type=scalar_type(dtype_of(node)),
    )


def _check_arange(node: Node) -> str | None:
    given = arguments(node)
    values = [given.get("start", 0), given["end"], given.get("step", 1)]
    return "its bounds are not integers" if any(isinstance(value, float) for value in values) else None


def _full(value: float | None = None, *, like: bool = False) -> Row:
    """A tensor of one value, the call's own if not this one; of the call's size, or of its operand's."""

    def fill(node: Node) -> Any:
        return arguments(node)["fill_value"] if value is None else value

    def lower(builder: GraphBuilder, node: Node) -> None:
        given, filled = arguments(node), builder.read(fill(node))
        shape = {"x": builder.read(given["self"])} if like else {"shape": builder.read(given["size"])}
        builder.emit(
            "FullLikeNode" if like else "FullNode",
            out=builder.write(node),
            v=float(filled) if isinstance(filled, (int, float)) else filled,
            scalar_type=scalar_type(dtype_of(node)),
            **shape,
        )

    def check(node: Node) -> str | None:
        filled = fill(node)
        is_exact = not isinstance(filled, int) or abs(filled) <= 2**53
        return None if is_exact else f"the format holds its value {filled} as a float, which is not exact"

    return Row(lower, check)


def _scalar_tensor(builder: GraphBuilder, node: Node) -> None:
    builder.alias(node, operand(builder, node.args[0], dtype_of(node)))


ROWS: dict[str, Row] = {
    "aten.arange.default": Row(_arange, _check_arange),
    "aten.arange.start_step": Row(_arange, _check_arange),
    **dict.fromkeys(("aten.full.default", "aten.new_full.default"), _full()),
    "aten.full_like.default": _full(like=True),
    **dict.fromkeys(("aten.ones.default", "aten.new_ones.default"), _full(1)),
    "aten.ones_like.default": _full(1, like=True),
    # What an empty tensor holds is nobody's promise: zeros.
    **dict.fromkeys(
        (
            "aten.zeros.default",
            "aten.new_zeros.default",
            "aten.empty.memory_format",
            "aten.new_empty.default",
            "dim_order_ops._empty_dim_order.default",
        ),
        _full(0),
    ),
    **dict.fromkeys(("aten.zeros_like.default", "aten.empty_like.default"), _full(0, like=True)),
    "aten.scalar_tensor.default": Row(_scalar_tensor),
}
