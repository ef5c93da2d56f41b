"""The same elements in another shape or order, and new ones without any."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..types import ANY, INTEGERS, ONE, SIZE, Range, Shape, TensorType, bounds, exactly, product, promoted, shown
from .base import Call, Result, Rule, normalized, require, require_same, unary


def _arange(call: Call) -> Result:
    start, stop, step = call.number("start"), call.number("stop"), call.number("step")
    require(step != exactly(0), "step is 0")
    dtype = call.scalar_type("scalar_type") if call.has("scalar_type") else "int64"
    require(dtype != "bool", "scalar_type is bool, expected numbers")
    if start.is_exact and stop.is_exact and step.is_exact:
        count = exactly(max(0, -(-(stop.low - start.low) // step.low)))
    else:
        least = step.low if step.low > 0 else -step.high if step.high < 0 else 1
        reach = stop - start if step.low > 0 else start - stop if step.high < 0 else ANY
        count = Range(0, reach.high if reach.high == math.inf else max(0, -(-reach.high // least)))
    return TensorType((count,), dtype)


def _as_strided(call: Call) -> Result:
    x = call.tensor("x")
    shape, strides = tuple(call.numbers("shape", 0)), call.numbers("strides")
    require(len(shape) == len(strides), f"{len(shape)} sizes and {len(strides)} strides")
    if x.shape is not None and all(size.is_exact and size.low > 0 for size in shape):
        reach = [(size - ONE) * stride for size, stride in zip(shape, strides, strict=True)]
        first, last = exactly(call.node.offset), exactly(call.node.offset)
        for way in reach:
            first, last = (
                first + Range(min(way.low, 0), min(way.high, 0)),
                last + Range(max(way.low, 0), max(way.high, 0)),
            )
        size = product(x.shape)
        require(
            first.high >= 0 and last.low < size.high,
            f"shape {shown(shape)} with strides {[str(stride) for stride in strides]} from {call.node.offset} on"
            f" reaches elements {first} to {last} of {size}",
        )
    return TensorType(shape, x.dtype)


def _broadcast_to(call: Call) -> Result:
    x, sizes = call.tensor("x"), call.numbers("shape", -1)
    if x.shape is None:
        return TensorType(tuple(map(_size, sizes)), x.dtype)
    own = x.shape
    require(len(own) <= len(sizes), f"shape {shown(own)} has more axes than {shown(tuple(sizes))}")
    own = (*[ONE] * (len(sizes) - len(own)), *own)
    return TensorType(tuple(_expanded(one, to) for one, to in zip(own, sizes, strict=True)), x.dtype)


def _size(size: Range) -> Range:
    """Return the size there may be, where -1 stands for any."""
    return size if size.low >= 0 else SIZE


def _expanded(own: Range, to: Range) -> Range:
    if to == exactly(-1):
        return own
    given = Range(0, max(to.high, 0)) if to.low < 0 else to
    if 1 not in own:
        require_same(own, to if -1 not in to else own, "sizes that do not go together")
        return own
    return given.hull(own) if -1 in to else given


def _joined(make: Callable[[Call, list[Shape]], Shape]) -> Rule:
    """A list of tensors to one, whose shape is made of theirs."""

    def rule(call: Call) -> Result:
        tensors = call.tensors("tensors")
        require(bool(tensors), "there are no tensors")
        shapes = [x.shape for x in tensors if x.shape is not None]
        ranks = {len(shape) for shape in shapes}
        require(len(ranks) <= 1, f"the tensors have {sorted(ranks)} axes")
        shape = make(call, shapes) if len(shapes) == len(tensors) else None
        return TensorType(shape, promoted(*[x.dtype for x in tensors]))

    return rule


def _concatenated(call: Call, shapes: list[Shape]) -> Shape:
    axis = call.axis(shapes[0])
    require(bool(shapes[0]), "the tensors have no axes")
    sizes = list(shapes[0])
    for shape in shapes[1:]:
        for place, size in enumerate(shape):
            sizes[place] = (
                sizes[place] + size if place == axis else require_same(sizes[place], size, f"sizes of axis {place}")
            )
    return tuple(sizes)


def _stacked(call: Call, shapes: list[Shape]) -> Shape:
    axis = call.axis(shapes[0], is_new=True)
    sizes = list(shapes[0])
    for shape in shapes[1:]:
        sizes = [require_same(a, b, f"sizes of axis {i}") for i, (a, b) in enumerate(zip(sizes, shape, strict=True))]
    return (*sizes[:axis], exactly(len(shapes)), *sizes[axis:])


def _expand_dims(call: Call) -> Result:
    x = call.tensor("x")
    axis = call.axis(x.shape, is_new=True)
    return TensorType(None if x.shape is None else (*x.shape[:axis], ONE, *x.shape[axis:]), x.dtype)


def _flip(call: Call) -> Result:
    x = call.tensor("x")
    require(x.shape != () or not call.node.axes, f"axes are {call.node.axes}, of a tensor without axes")
    call.axes(x.shape)
    return x


def _full(call: Call) -> Result:
    dtype = call.scalar_type("scalar_type")
    _check_value(call, dtype)
    return TensorType(tuple(call.numbers("shape", 0)), dtype)


def _full_like(call: Call) -> Result:
    x = call.tensor("x")
    dtype = call.scalar_type("scalar_type") if call.has("scalar_type") else x.dtype
    _check_value(call, dtype)
    return TensorType(x.shape, dtype)


def _check_value(call: Call, dtype: str | None) -> None:
    value = call.number("v")
    if dtype in INTEGERS:
        low, high = bounds(dtype)
        # The comparisons fail for what is no number, too.
        require(value.low <= high and value.high >= low, f"v is {call.node.v}, in a tensor of {dtype}")


def _pad(call: Call) -> Result:
    x, widths = call.tensor("x"), call.numbers("pad_width", 0)
    call.one_of("mode", ("constant", "edge"))
    require(len(widths) % 2 == 0, f"pad_width has {len(widths)} entries, expected pairs")
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    if x.shape is None:
        return TensorType((SIZE,) * len(pairs), x.dtype)
    require(len(pairs) == len(x.shape), f"pad_width has {len(pairs)} pairs, of a tensor of shape {shown(x.shape)}")
    sizes = []
    for size, (before, after) in zip(x.shape, pairs, strict=True):
        is_empty_edge = call.node.mode == "edge" and size == exactly(0) and (before + after).low > 0
        require(not is_empty_edge, "an axis of no elements has no edge to repeat")
        sizes.append(size + before + after)
    return TensorType(tuple(sizes), x.dtype)


def _random_bits(call: Call) -> Result:
    call.one_of("width", (1, 2, 4))
    return TensorType(tuple(call.numbers("shape", 0)), f"uint{8 * call.node.width}")


_MOST_TIMES = 2**31 - 1


def _repeat(call: Call) -> Result:
    x, repeats = call.tensor("x"), call.number("repeats", 0)
    require(repeats.low <= _MOST_TIMES, f"repeats is {repeats}, expected 31 bits")
    require(x.shape != (), "x has no axes")
    axis = call.axis(x.shape)
    if x.shape is None:
        return x
    return TensorType((*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]), x.dtype)


def _reshape(call: Call) -> Result:
    x, sizes = call.tensor("x"), call.numbers("shape", -1)
    inferred = [place for place, size in enumerate(sizes) if size == exactly(-1)]
    require(len(inferred) <= 1, f"shape {shown(tuple(sizes))} leaves more than one size open")
    known = [_size(size) for size in sizes]
    given = [size for place, size in enumerate(known) if place not in inferred]
    total, rest = (SIZE, product(given)) if x.shape is None else _apart(x.shape, given)
    if not inferred:
        fits = total.meets(rest)
    elif total.is_exact and rest.is_exact:
        fits = rest.low > 0 and total.low % rest.low == 0
        known[inferred[0]] = exactly(total.low // rest.low) if fits else SIZE
    else:
        fits = True
        least = max(rest.low, 1)
        known[inferred[0]] = Range(0, total.high if total.high == math.inf else total.high // least)
    require(fits, f"shape {shown(tuple(sizes))} for {total} elements")
    return TensorType(tuple(known), x.dtype)


def _apart(own: Shape, given: list[Range]) -> tuple[Range, Range]:
    """Return the products of two lists of sizes, without those named in both."""
    rest, left = list(given), []
    for size in own:
        same = next((place for place, other in enumerate(rest) if size.name and other.name == size.name), None)
        if same is None:
            left.append(size)
        else:
            del rest[same]
    return product(left), product(rest)


def _roll(call: Call) -> Result:
    x, shifts = call.tensor("x"), call.numbers("shift")
    require(len(shifts) == len(call.node.axes), f"{len(shifts)} shifts for {len(call.node.axes)} axes")
    require(bool(x.shape) or x.shape is None or not shifts, f"axes are {call.node.axes}, of a tensor without axes")
    for axis in call.node.axes:
        normalized(axis, x.shape, "axes")
    return x


def _split(call: Call) -> Result:
    x, sizes, outs = call.tensor("x"), call.numbers("sizes", 0), len(call.node.outs)
    require(x.shape != (), "x has no axes")
    axis = call.axis(x.shape)
    require(outs > 0, "there are no outs")
    require(len(sizes) in (1, outs), f"{len(sizes)} sizes for {outs} outs, expected one for each or one for all")
    if x.shape is None:
        return [x] * outs
    whole = x.shape[axis]
    if len(sizes) == outs > 1:
        total = sizes[0]
        for size in sizes[1:]:
            total = total + size
        require_same(total, whole, "the sizes do not add up to the axis")
        parts = sizes
    else:
        chunk = sizes[0]
        require(
            (chunk * exactly(outs)).high >= whole.low and (chunk * exactly(outs - 1)).low <= whole.high,
            f"{outs} chunks of {chunk} of an axis of {whole}",
        )
        before = chunk * exactly(outs - 1)
        rest = whole - before
        last = Range(max(rest.low, 0), min(max(rest.high, 0), chunk.high))
        parts = [chunk] * (outs - 1) + [last]
    return [TensorType((*x.shape[:axis], part, *x.shape[axis + 1 :]), x.dtype) for part in parts]


def _squeeze(call: Call) -> Result:
    x = call.tensor("x")
    require(x.shape != () or not call.node.dims, f"dims are {call.node.dims}, of a tensor without axes")
    axes = call.axes(x.shape, "dims")
    if x.shape is None:
        return x
    chosen = axes if call.node.dims else range(len(x.shape))
    if any(1 in x.shape[axis] and not x.shape[axis].is_exact for axis in chosen if axis < len(x.shape)):
        return TensorType(None, x.dtype)
    gone = {axis for axis in chosen if axis < len(x.shape) and x.shape[axis] == ONE}
    return TensorType(tuple(size for axis, size in enumerate(x.shape) if axis not in gone), x.dtype)


def _tile(call: Call) -> Result:
    x, reps = call.tensor("x"), call.numbers("reps", 0)
    require(all(times.low <= _MOST_TIMES for times in reps), f"reps are {shown(tuple(reps))}, expected 31 bits")
    if x.shape is None:
        return x
    rank = max(len(x.shape), len(reps))
    sizes, times = (*[ONE] * (rank - len(x.shape)), *x.shape), (*[ONE] * (rank - len(reps)), *reps)
    return TensorType(tuple(size * by for size, by in zip(sizes, times, strict=True)), x.dtype)


def _transpose(call: Call) -> Result:
    x = call.tensor("x")
    axes = call.axes(x.shape, "perm")
    if x.shape is None:
        return x
    require(len(axes) == len(x.shape), f"perm is {call.node.perm}, of a tensor of shape {shown(x.shape)}")
    return TensorType(tuple(x.shape[axis] for axis in axes), x.dtype)


def _tri(call: Call) -> Result:
    return TensorType((call.number("n", 0), call.number("m", 0)), call.scalar_type("scalar_type"))


def _triangle(call: Call) -> Result:
    return call.rank("x", 2, math.inf)


RULES: dict[str, Rule] = {
    "AsStridedNode": _as_strided,
    "BroadcastToNode": _broadcast_to,
    "ConcatenateNode": _joined(_concatenated),
    "ContiguousNode": unary(),
    "ExpandDimsNode": _expand_dims,
    "FlipNode": _flip,
    "PadNode": _pad,
    "RepeatNode": _repeat,
    "ReshapeNode": _reshape,
    "RollNode": _roll,
    "SplitNode": _split,
    "SqueezeNode": _squeeze,
    "StackNode": _joined(_stacked),
    "TileNode": _tile,
    "TransposeNode": _transpose,
    "TrilNode": _triangle,
    "TriuNode": _triangle,
    # new ones
    "ARangeNode": _arange,
    "FullLikeNode": _full_like,
    "FullNode": _full,
    "RandomBitsNode": _random_bits,
    "TriNode": _tri,
}
