"""Reading and writing at indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...program import Node, Tid
from ..device import mx
from .base import At, Env, Row, Step, get, indices


def _gather(node: Node, at: At) -> Step:
    x, out = at(node.x), at(node.out)
    starts, axes, sizes = [indices(index, at) for index in node.indices], node.axes, node.slice_sizes
    rank = len(sizes)

    def step(env: Env) -> None:
        shape = env[x].shape
        if any(size > own for size, own in zip(sizes, shape, strict=True)):
            raise ValueError(f"GatherNode: slices of {sizes}, of a tensor of shape {list(shape)}")
        places = []
        for axis, size in enumerate(sizes):
            # Each axis of a slice gets one of the result's last axes.
            places.append(mx.arange(size).reshape([size if other == axis else 1 for other in range(rank)]))
        for axis, index in zip(axes, starts, strict=True):
            start = index(env, -shape[axis], shape[axis] - sizes[axis])
            places[axis] = places[axis] + start.reshape([*start.shape, *[1] * rank])
        env[out] = env[x][tuple(places)]

    return step


def _along(where: Callable[[Env, int, int], mx.array], env: Env, array: mx.array, axis: int) -> mx.array:
    """Return indices of an array's axis; negative ones count from its end."""
    size = array.shape[axis]
    return where(env, -size, size - 1)


def _index_copy(node: Node, at: At) -> Step:
    dst, update, where, out, axis = at(node.dst), at(node.update), indices(node.indices, at), at(node.out), node.axis

    def step(env: Env) -> None:
        result = mx.array(env[dst])
        index: list[Any] = [slice(None)] * result.ndim
        index[axis] = _along(where, env, result, axis)
        if result.size:  # MLX divides by it
            result[tuple(index)] = env[update].astype(result.dtype)
        env[out] = result

    return step


def _scatter_add(node: Node, at: At) -> Step:
    x, rows, updates, out, axis = at(node.x), indices(node.indices, at), at(node.updates), at(node.out), node.axis

    def step(env: Env) -> None:
        array = env[x]
        where = _along(rows, env, array, axis)
        around = axis % array.ndim
        fits = where.ndim == array.ndim == env[updates].ndim and all(
            size <= other and (dim == around or size <= own)
            for dim, (size, other, own) in enumerate(zip(where.shape, env[updates].shape, array.shape, strict=True))
        )
        if not fits:
            raise ValueError(
                f"ScatterAddNode: indices of shape {list(where.shape)} and updates of {list(env[updates].shape)}, for a"
                f" tensor of {list(array.shape)}"
            )
        places = [
            mx.arange(size).reshape([size if other == dim else 1 for other in range(where.ndim)])
            for dim, size in enumerate(where.shape)
        ]
        places[axis] = where
        # As in torch, the updates may be larger than the indices.
        values = env[updates][tuple(slice(size) for size in where.shape)]
        env[out] = array.at[tuple(places)].add(values.astype(array.dtype))

    return step


_FARTHEST = 2**31 - 1


def _part(node: Node, at: At) -> Callable[[Env, int], tuple[slice, ...]]:
    """Return what gives the index of a node's slice of a tensor of a rank."""
    stride = node.step
    axis, start, stop = get(node.axis, at), get(node.start, at), get(node.stop, at)

    def index(env: Env, rank: int) -> tuple[slice, ...]:
        # Torch's end is 2**63 - 1, and MLX's bounds have 32 bits.
        first, last = (max(-_FARTHEST, min(int(bound(env)), _FARTHEST)) for bound in (start, stop))
        whole, place = [slice(None)] * rank, int(axis(env))
        if not -rank <= place < rank:
            raise IndexError(f"{node.kind}: axis {place} of a tensor of {rank} axes")
        whole[place] = slice(first, last, stride)
        return tuple(whole)

    return index


def _slice(node: Node, at: At) -> Step:
    x, out, part = at(node.x), at(node.out), _part(node, at)

    def step(env: Env) -> None:
        env[out] = env[x][part(env, env[x].ndim)]

    return step


def _slice_update(node: Node, at: At) -> Step:
    dst, update, out, part = at(node.dst), at(node.update), at(node.out), _part(node, at)

    def step(env: Env) -> None:
        result = mx.array(env[dst])
        result[part(env, result.ndim)] = env[update].astype(result.dtype)
        env[out] = result

    return step


def _take(node: Node, at: At) -> Step:
    x, out, axis = at(node.x), at(node.out), node.axis
    if not isinstance(node.index, Tid):
        number = get(node.index, at)

        def step_at(env: Env) -> None:
            size, index = env[x].shape[axis], int(number(env))
            if not -size <= index < size:
                raise IndexError(f"TakeNode: index {index} of an axis of {size}")
            env[out] = env[x][tuple([slice(None)] * (axis % env[x].ndim) + [index])]

        return step_at
    where = indices(node.index, at)

    def step(env: Env) -> None:
        env[out] = mx.take(env[x], _along(where, env, env[x], axis), axis=axis)

    return step


def _take_along_axis(node: Node, at: At) -> Step:
    x, where, out, axis = at(node.x), indices(node.indices, at), at(node.out), node.axis

    def step(env: Env) -> None:
        env[out] = mx.take_along_axis(env[x], _along(where, env, env[x], axis), axis=axis)

    return step


KERNELS: dict[str, Row] = {
    "GatherNode": _gather,
    "IndexCopyNode": _index_copy,
    "ScatterAddNode": _scatter_add,
    "SliceNode": _slice,
    "SliceUpdateNode": _slice_update,
    "TakeAlongAxisNode": _take_along_axis,
    "TakeNode": _take,
}
