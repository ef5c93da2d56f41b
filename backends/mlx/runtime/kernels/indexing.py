"""Reading and writing at indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...program import Node, Tid
from ..device import mx
from .base import At, Env, Row, Step, get


def _gather(node: Node, at: At) -> Step:
    x, out = at(node.x), at(node.out)
    indices, axes, sizes = [at(index) for index in node.indices], node.axes, node.slice_sizes
    handed_in = [at.is_handed_in(index) for index in node.indices]
    rank = len(sizes)

    def step(env: Env) -> None:
        places = []
        for axis, size in enumerate(sizes):
            # Each axis of a slice gets one of the result's last axes.
            shape = [size if other == axis else 1 for other in range(rank)]
            places.append(mx.arange(size, dtype=mx.int32).reshape(shape))
        for axis, index, is_handed_in in zip(axes, indices, handed_in, strict=True):
            start = env[index]
            if is_handed_in:
                env[-1].check_indices(start, env[x].shape[axis])
            places[axis] = places[axis] + start.reshape([*start.shape, *[1] * rank])
        env[out] = env[x][tuple(places)]

    return step


def _index_copy(node: Node, at: At) -> Step:
    dst, update, indices, out, axis = at(node.dst), at(node.update), at(node.indices), at(node.out), node.axis
    is_handed_in = at.is_handed_in(node.indices)

    def step(env: Env) -> None:
        if is_handed_in:
            env[-1].check_indices(env[indices], env[dst].shape[axis])
        result = mx.array(env[dst])
        index: list[Any] = [slice(None)] * result.ndim
        index[axis] = env[indices]
        result[tuple(index)] = env[update].astype(result.dtype)
        env[out] = result

    return step


def _scatter_add(node: Node, at: At) -> Step:
    x, indices, updates, out, axis = at(node.x), at(node.indices), at(node.updates), at(node.out), node.axis
    is_handed_in = at.is_handed_in(node.indices)

    def step(env: Env) -> None:
        array, where = env[x], env[indices]
        if is_handed_in:
            env[-1].check_indices(where, array.shape[axis])
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
        whole = [slice(None)] * rank
        whole[int(axis(env))] = slice(first, last, stride)
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
            env[out] = mx.take(env[x], index % size, axis=axis)

        return step_at
    indices, is_handed_in = at(node.index), at.is_handed_in(node.index)

    def step(env: Env) -> None:
        if is_handed_in:
            env[-1].check_indices(env[indices], env[x].shape[axis])
        env[out] = mx.take(env[x], env[indices], axis=axis)

    return step


def _take_along_axis(node: Node, at: At) -> Step:
    x, indices, out, axis = at(node.x), at(node.indices), at(node.out), node.axis
    is_handed_in = at.is_handed_in(node.indices)

    def step(env: Env) -> None:
        if is_handed_in:
            env[-1].check_indices(env[indices], env[x].shape[axis])
        env[out] = mx.take_along_axis(env[x], env[indices], axis=axis)

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
