"""The same elements in another shape or order, and new ones without any."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, dtype_of, fixed, get, get_ints, joined, unary, with_ints


def _arange(node: Node, at: At) -> Step:
    start, stop, stride, out = get(node.start, at), get(node.stop, at), get(node.step, at), at(node.out)
    dtype = mx.int64 if node.scalar_type is None else dtype_of(node.scalar_type)

    def step(env: Env) -> None:
        first, end, by = start(env), stop(env), stride(env)
        # MLX's CUDA kernel crashes on none.
        is_empty = (end - first) * by <= 0 and by
        env[out] = mx.zeros((0,), dtype) if is_empty else mx.arange(first, end, by, dtype=dtype)

    return step


def _as_strided(node: Node, at: At) -> Step:
    x, out, offset = at(node.x), at(node.out), node.offset
    shape, strides = get_ints(node.shape, at), get_ints(node.strides, at)

    def step(env: Env) -> None:
        sizes, steps = shape(env), strides(env)
        reach = [(size - 1) * step for size, step in zip(sizes, steps, strict=True)]
        first, last = offset + sum(min(way, 0) for way in reach), offset + sum(max(way, 0) for way in reach)
        if 0 not in sizes and not 0 <= first <= last < env[x].size:
            raise IndexError(
                f"AsStridedNode: shape {sizes} with strides {steps} from {offset} on reaches elements {first} to {last}"
                f" of {env[x].size}"
            )
        env[out] = mx.as_strided(env[x], sizes, steps, offset)

    return step


def _broadcast(x: mx.array, sizes: tuple[int, ...]) -> mx.array:
    if -1 in sizes:  # as in torch's expand: the size that is there
        given = (*[1] * (len(sizes) - x.ndim), *x.shape)
        sizes = tuple(own if size == -1 else size for size, own in zip(sizes, given, strict=True))
    return mx.broadcast_to(x, sizes)


def _flip(node: Node, at: At) -> Step:
    x, out, axes = at(node.x), at(node.out), node.axes

    def step(env: Env) -> None:
        index = [slice(None)] * env[x].ndim
        for axis in axes:
            index[axis] = slice(None, None, -1)
        env[out] = env[x][tuple(index)]

    return step


def _filled(shape: Sequence[int], value: float, dtype: mx.Dtype) -> mx.array:
    """A tensor of one value, which the format has as a float whatever the dtype."""
    if mx.issubdtype(dtype, mx.floating):
        number = float(value)
    elif dtype == mx.bool_:
        number = bool(value)
    elif math.isfinite(value) and mx.iinfo(dtype).min <= value <= mx.iinfo(dtype).max:
        number = int(value)
    else:
        raise ValueError(f"a tensor of {dtype} filled with {value}")
    return mx.broadcast_to(mx.array(number, dtype=dtype), shape)


def _full(node: Node, at: At) -> Step:
    out, shape, value, dtype = at(node.out), get_ints(node.shape, at), get(node.v, at), dtype_of(node.scalar_type)

    def step(env: Env) -> None:
        env[out] = _filled(shape(env), value(env), dtype)

    return step


def _full_like(node: Node, at: At) -> Step:
    x, out, value = at(node.x), at(node.out), get(node.v, at)
    dtype = None if node.scalar_type is None else dtype_of(node.scalar_type)

    def step(env: Env) -> None:
        env[out] = _filled(env[x].shape, value(env), env[x].dtype if dtype is None else dtype)

    return step


def _pad(node: Node, at: At) -> Step:
    x, out, widths, mode, value = at(node.x), at(node.out), get_ints(node.pad_width, at), node.mode, node.constant_value
    if mode not in ("constant", "edge"):
        raise ValueError(f"PadNode: mode is 'constant' or 'edge', got {mode!r}")

    def step(env: Env) -> None:
        flat = widths(env)
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        env[out] = mx.pad(env[x], pairs, mode, mx.array(value, dtype=env[x].dtype))

    return step


def _random_bits(node: Node, at: At) -> Step:
    out, shape, width = at(node.out), get_ints(node.shape, at), node.width
    seed = None if node.seed is None else get(node.seed, at)
    if width not in _UNSIGNED:
        raise ValueError(f"RandomBitsNode: width is 1, 2 or 4 bytes, got {width}")

    def step(env: Env) -> None:
        size = shape(env)
        words = math.ceil(math.prod(size) * width / 4)
        # MLX's own bits are not open to Python; splitting a key gives two words of them for each part.
        key = mx.random.key(secrets.randbits(63) if seed is None else int(seed(env)))
        bits = mx.random.split(key, max((words + 1) // 2, 1)).reshape(-1)
        env[out] = bits.view(_UNSIGNED[width])[: math.prod(size)].reshape(size)

    return step


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


def _repeat(node: Node, at: At) -> Step:
    x, out, repeats, axis = at(node.x), at(node.out), get(node.repeats, at), node.axis

    def step(env: Env) -> None:
        env[out] = mx.repeat(env[x], int(repeats(env)), axis)

    return step


def _roll(node: Node, at: At) -> Step:
    x, out, shift, axes = at(node.x), at(node.out), get_ints(node.shift, at), tuple(node.axes)

    def step(env: Env) -> None:
        array = env[x]
        # MLX's shifts have 32 bits.
        within: Any = [by % max(array.shape[axis], 1) for by, axis in zip(shift(env), axes, strict=True)]
        env[out] = mx.roll(array, within, axes)

    return step


def _split(node: Node, at: At) -> Step:
    x, outs, sizes, axis = at(node.x), [at(out) for out in node.outs], get_ints(node.sizes, at), node.axis

    def step(env: Env) -> None:
        given, whole = sizes(env), env[x].shape[axis]
        # A single size stands for chunks of that size, the last of which may be shorter.
        chunks = given if len(given) == len(outs) else given * len(outs)
        rest = whole - sum(chunks[:-1])
        if min(chunks) < 0 or not (0 <= rest <= chunks[-1] if len(given) == 1 else rest == chunks[-1]):
            raise ValueError(f"SplitNode: sizes {list(given)} for {len(outs)} parts of an axis of {whole}")
        ends = itertools.accumulate(chunks[:-1])
        for out, part in zip(outs, mx.split(env[x], list(ends), axis=axis), strict=True):
            env[out] = part

    return step


def _squeeze(node: Node, at: At) -> Step:
    x, out, dims = at(node.x), at(node.out), node.dims

    def step(env: Env) -> None:
        array = env[x]
        # torch ignores a dimension that is not 1; MLX refuses it.
        axes = [dim for dim in dims if array.ndim and array.shape[dim] == 1] if dims else None
        env[out] = mx.squeeze(array, axes)

    return step


def _tri(node: Node, at: At) -> Step:
    out, rows, columns, k, dtype = at(node.out), get(node.n, at), get(node.m, at), node.k, dtype_of(node.scalar_type)

    def step(env: Env) -> None:
        n, m = int(rows(env)), int(columns(env))
        # MLX makes a row of places and a column of them, whether or not there is anything between.
        env[out] = mx.tri(n, m, _diagonal(k, n, m), dtype) if n * m else mx.zeros((n, m), dtype)

    return step


def _diagonal(k: int, rows: int, columns: int) -> int:
    """Return the diagonal itself, or one that is as far outside of the matrix: MLX adds sizes to it in 32 bits."""
    return max(-rows, min(k, columns))


def _triangle(function: Callable[[mx.array, int], mx.array]) -> Row:
    def make(node: Node) -> Callable[[mx.array], mx.array]:
        # MLX crashes on some tensors without elements.
        return lambda x: function(x, _diagonal(node.k, *x.shape[-2:])) if x.size else x

    return fixed(make)


KERNELS: dict[str, Row] = {
    "AsStridedNode": _as_strided,
    "BroadcastToNode": with_ints("shape", _broadcast),
    "ConcatenateNode": joined(mx.concatenate),
    "ContiguousNode": unary(mx.contiguous),
    "ExpandDimsNode": fixed(lambda n: lambda x: mx.expand_dims(x, n.axis)),
    "FlipNode": _flip,
    "PadNode": _pad,
    "RepeatNode": _repeat,
    "ReshapeNode": with_ints("shape", mx.reshape),
    "RollNode": _roll,
    "SplitNode": _split,
    "SqueezeNode": _squeeze,
    "StackNode": joined(mx.stack),
    "TileNode": with_ints("reps", mx.tile),
    "TransposeNode": fixed(lambda n: lambda x: mx.transpose(x, n.perm)),
    "TrilNode": _triangle(mx.tril),
    "TriuNode": _triangle(mx.triu),
    # new ones
    "ARangeNode": _arange,
    "FullLikeNode": _full_like,
    "FullNode": _full,
    "RandomBitsNode": _random_bits,
    "TriNode": _tri,
}
