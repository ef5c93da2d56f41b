"""Functions along axes: sums, extremes, orders."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, along, get, unary


def _reduction(function: Callable[..., mx.array], of_nothing: float | None = None, *, is_wide: bool = False) -> Row:
    """A function of one tensor over the node's axes; without any, over all of them.

    Args:
        function: MLX's.
        of_nothing: what it gives for no elements, where torch gives anything; MLX does not return from some of these.
        is_wide: whether integers are taken as int64, as in torch.
    """

    def row(node: Node, at: At) -> Step:
        axes, keepdims = tuple(node.axes or ()), node.keepdims
        options = {"ddof": node.ddof} if hasattr(node, "ddof") else {}

        def run(x: mx.array) -> mx.array:
            if is_wide and not mx.issubdtype(x.dtype, mx.floating):
                x = x.astype(mx.int64)
            over = axes if axes and x.ndim else None
            if x.size == 0 and of_nothing is not None:
                gone = {axis % x.ndim for axis in over or range(x.ndim)}
                shape = [
                    1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdims or axis not in gone
                ]
                dtype = mx.bool_ if function in (mx.all, mx.any) else x.dtype
                return mx.full(shape, mx.array(of_nothing, dtype=dtype))
            return function(x, axis=over, keepdims=keepdims, **options)

        return unary(run)(node, at)

    return row


def _indices(function: Callable[..., mx.array]) -> Row:
    """The place of an extreme; torch's are int64."""

    def row(node: Node, at: At) -> Step:
        axis, keepdims = node.axis, node.keepdims
        return unary(
            lambda x: function(x, axis=axis if x.ndim else None, keepdims=keepdims and x.ndim > 0).astype(mx.int64)
        )(node, at)

    return row


def _partition(function: Callable[..., mx.array]) -> Row:
    def row(node: Node, at: At) -> Step:
        x, out, kth, axis = at(node.x), at(node.out), get(node.kth, at), node.axis

        def step(env: Env) -> None:
            array = env[x] if env[x].ndim else env[x].reshape(1)
            env[out] = function(array, int(kth(env)), axis).reshape(env[x].shape)

        return step

    return row


def _cumsum(node: Node, at: At) -> Step:
    def run(x: mx.array, axis: int) -> mx.array:
        wide = x if mx.issubdtype(x.dtype, mx.floating) else x.astype(mx.int64)
        return mx.cumsum(wide, axis=axis, reverse=node.reverse, inclusive=node.inclusive)

    return along(run)(node, at)


def _softmax(node: Node, at: At) -> Step:
    return along(lambda x, axis: mx.softmax(x, axis=axis, precise=node.precise))(node, at)


KERNELS: dict[str, Row] = {
    "AllNode": _reduction(mx.all, True),
    "AnyNode": _reduction(mx.any, False),
    "LogSumExpNode": _reduction(mx.logsumexp, -math.inf),
    "MaxNode": _reduction(mx.max),
    "MeanNode": _reduction(mx.mean, math.nan),
    "MedianNode": _reduction(mx.median),
    "MinNode": _reduction(mx.min),
    "ProdNode": _reduction(mx.prod, 1, is_wide=True),
    "StdNode": _reduction(mx.std, math.nan),
    "SumNode": _reduction(mx.sum, 0, is_wide=True),
    "VarNode": _reduction(mx.var, math.nan),
    "ArgmaxNode": _indices(mx.argmax),
    "ArgminNode": _indices(mx.argmin),
    "CumsumNode": _cumsum,
    "SoftmaxNode": _softmax,
    "SortNode": along(lambda x, axis: mx.sort(x, axis=axis)),
    "ArgsortNode": along(lambda x, axis: mx.argsort(x, axis=axis).astype(mx.int64)),
    "PartitionNode": _partition(mx.partition),
    "ArgPartitionNode": _partition(lambda *operands: mx.argpartition(*operands).astype(mx.int64)),
}
