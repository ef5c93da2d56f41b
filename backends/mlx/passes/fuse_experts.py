"""Fuses linear layers whose weight each token chooses among experts, as ``batched_mm`` of transformers writes them.

Before, with ``ids`` [S] of experts and ``x`` [S, in]::

    squeeze(bmm(weight[ids], unsqueeze(x, -1)), -1)         weight [E, out, in]
    squeeze(bmm(unsqueeze(x, 1), weight[ids]), 1)           weight [E, in, out]

After, with no [S, out, in] tensor in between::

    expert_linear(x, weight, ids)                           weight [E, out, in], transposed in the second form
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph import arguments, aten, is_call, remove_dead_code, replace, shape_of

_INTEGERS = (torch.int32, torch.int64)


@torch.library.custom_op("executorch_mlx::expert_linear", mutates_args=())
def expert_linear(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the matrix that it chooses.

    Args:
        x: [S, in].
        weight: [E, out, in].
        ids: [S], integers from 0 to E - 1.

    Returns:
        [S, out].
    """
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)


@expert_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def fuse_experts(program: ExportedProgram) -> None:
    """Replace each match, in place."""
    for node in list(program.graph.nodes):
        match = _match(node)
        if match is None:
            continue
        x, weight, ids, is_transposed = match
        if is_transposed:
            value = weight.meta["val"]
            with program.graph.inserting_before(node):
                weight = program.graph.call_function(aten.transpose.int, (weight, 1, 2))
            weight.meta = {**node.meta, "val": value.transpose(1, 2)}
        replace(program, node, expert_linear._opoverload, (x, weight, ids))
    remove_dead_code(program.graph_module)


def _match(node: Node) -> tuple[Node, Node, Node, bool] | None:
    """Return (x, weight, ids, whether the weight is [E, in, out]) if a node ends the pattern."""
    axis = _axis_of(node, aten.squeeze.dim, aten.squeeze_copy.dim, aten.squeeze.dims, aten.squeeze_copy.dims)
    if axis is None or not is_call(node.args[0], aten.bmm.default):
        return None
    first, second = node.args[0].args
    for gathered, row, wanted in ((first, second, 2), (second, first, 1)):
        chosen = _chosen(gathered)
        if chosen is not None and axis == wanted == _axis_of(row, aten.unsqueeze.default, aten.unsqueeze_copy.default):
            return row.args[0], *chosen, wanted == 1
    return None


def _axis_of(node: Node, *targets: torch._ops.OpOverload) -> int | None:
    """Return the axis of [S, a, b] that a call of one of these adds or drops."""
    if not is_call(node, *targets):
        return None
    axis = arguments(node)["dim"]
    if isinstance(axis, list):
        axis = axis[0] if len(axis) == 1 else None
    return None if axis is None else axis % 3


def _chosen(node: Node) -> tuple[Node, Node] | None:
    """Return (weight, ids) if a node is weight[ids]."""
    if not is_call(node, aten.index.Tensor) or len(node.args[1]) != 1:
        return None
    weight, (ids,) = node.args
    is_fitting = (
        weight.meta["val"].is_floating_point()
        and len(shape_of(weight)) == 3
        and len(shape_of(ids)) == 1
        and ids.meta["val"].dtype in _INTEGERS
    )
    return (weight, ids) if is_fitting else None
