"""Functions along axes: sums, extremes, orders."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, along, get, in_float32, unary


def _reduction(
    function: Callable[..., mx.array],
    of_nothing: float | None = None,
    *,
    of_integers: mx.Dtype | None = None,
    is_precise: bool = False,
) -> Row:
    """A function of one tensor over the node's axes; without any, over all of them.

    Args:
        function: MLX's.
        of_nothing: what it gives for no elements, where torch gives anything; MLX does not return from some of these.
        of_integers: what integers and bools are computed in, as in torch, if not in themselves.
        is_precise: whether half precision is computed in float32, as in torch; MLX's sums and products are without.
    """

    def row(node: Node, at: At) -> Step:
        axes, keepdims = tuple(node.axes or ()), node.keepdims
        options = {"ddof": node.ddof} if hasattr(node, "ddof") else {}

        def computed(x: mx.array) -> mx.array:
            over = axes if axes and x.ndim else None
            if x.size == 0 and of_nothing is not None:
                dtype = mx.bool_ if function in (mx.all, mx.any) else x.dtype
                return mx.full(_reduced_shape(x, over, keepdims), mx.array(of_nothing, dtype=dtype))
            return function(x, axis=over, keepdims=keepdims, **options)

        def run(x: mx.array) -> mx.array:
            if of_integers is not None and not mx.issubdtype(x.dtype, mx.floating):
                return computed(x.astype(of_integers))
            return computed(x)

        return unary(in_float32(run) if is_precise else run)(node, at)

    return row


def _reduced_shape(x: mx.array, axes: tuple[int, ...] | None, keepdims: bool) -> list[int]:
    gone = {axis % x.ndim for axis in axes or range(x.ndim)}
    return [1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdims or axis not in gone]


def _indices(function: Callable[..., mx.array]) -> Row:
    """The place of an extreme; torch's are int64."""

    def row(node: Node, at: At) -> Step:
        axis, keepdims = node.axis, node.keepdims

        def run(x: mx.array) -> mx.array:
            if x.ndim == 0:
                return mx.zeros((), mx.int64)
            if x.size == 0 and x.shape[axis]:
                return mx.zeros(_reduced_shape(x, (axis,), keepdims), mx.int64)
            return function(x, axis=axis, keepdims=keepdims).astype(mx.int64)

        return unary(run)(node, at)

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
        def sums(x: mx.array) -> mx.array:
            return mx.cumsum(x, axis=axis, reverse=node.reverse, inclusive=node.inclusive)

        return in_float32(sums)(x) if mx.issubdtype(x.dtype, mx.floating) else sums(x.astype(mx.int64))

    return along(run)(node, at)


KERNELS: dict[str, Row] = {
    "AllNode": _reduction(mx.all, True),
    "AnyNode": _reduction(mx.any, False),
    "LogSumExpNode": _reduction(mx.logsumexp, -math.inf, of_integers=mx.float32),
    "MaxNode": _reduction(mx.max),
    "MeanNode": _reduction(mx.mean, math.nan, of_integers=mx.float32, is_precise=True),
    "MedianNode": _reduction(mx.median),
    "MinNode": _reduction(mx.min),
    "ProdNode": _reduction(mx.prod, 1, of_integers=mx.int64),
    "StdNode": _reduction(mx.std, math.nan, of_integers=mx.float32, is_precise=True),
    "SumNode": _reduction(mx.sum, 0, of_integers=mx.int64),
    "VarNode": _reduction(mx.var, math.nan, of_integers=mx.float32, is_precise=True),
    "ArgmaxNode": _indices(mx.argmax),
    "ArgminNode": _indices(mx.argmin),
    "CumsumNode": _cumsum,
    # Precise, whatever the node says: half precision's own sum of ones ends at 256 or 2,048.
    "SoftmaxNode": along(lambda x, axis: mx.softmax(x, axis=axis, precise=True)),
    "SortNode": along(lambda x, axis: mx.sort(x, axis=axis)),
    "ArgsortNode": along(lambda x, axis: mx.argsort(x, axis=axis).astype(mx.int64)),
    "PartitionNode": _partition(mx.partition),
    "ArgPartitionNode": _partition(lambda *operands: mx.argpartition(*operands).astype(mx.int64)),
}
