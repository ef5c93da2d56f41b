"""Reading and writing at indices."""

from __future__ import annotations

import math

from ..schema import Tid
from ..types import INTEGERS, ONE, SIZE, Range, Shape, TensorType, broadcast, exactly, product, shown
from .base import Call, Result, Rule, require, require_broadcast


def _gather(call: Call) -> Result:
    x, indices = call.tensor("x"), call.tensors("indices", INTEGERS)
    sizes = call.numbers("slice_sizes", 0)
    axes = call.axes(x.shape)
    require(len(axes) == len(indices), f"{len(indices)} indices for {len(axes)} axes")
    if x.shape is not None:
        require(x.shape != () or not axes, f"axes are {call.node.axes}, of a tensor without axes")
        require(len(sizes) == len(x.shape), f"{len(sizes)} slice sizes, of a tensor of shape {shown(x.shape)}")
        for axis, (size, own) in enumerate(zip(sizes, x.shape, strict=True)):
            require(size.low <= own.high, f"slice_sizes: {size} of axis {axis} of {own}")
    places = broadcast(*[index.shape for index in indices])
    return TensorType(None if places is None else (*places, *sizes), x.dtype)


def _index_copy(call: Call) -> Result:
    dst, update, indices = call.tensor("dst"), call.tensor("update"), call.tensor("indices", INTEGERS)
    axis = call.axis(dst.shape)
    call.rank("indices", 1)
    if dst.shape is not None:
        require(dst.shape != (), "dst has no axes")
        count = SIZE if indices.shape is None else indices.shape[0]
        part = (*dst.shape[:axis], count, *dst.shape[axis + 1 :])
        require_broadcast("update", update.shape, "what it is written to", part)
    return dst


def _scatter_add(call: Call) -> Result:
    x, indices, updates = call.tensor("x"), call.tensor("indices", INTEGERS), call.tensor("updates")
    axis = call.axis(x.shape)
    if x.shape is None:
        return x
    require(x.shape != (), "x has no axes")
    for name, other in (("indices", indices.shape), ("updates", updates.shape)):
        if other is not None:
            require(len(other) == len(x.shape), f"{name} has shape {shown(other)}, x has {shown(x.shape)}")
    for place, size in enumerate(indices.shape or ()):
        bound = x.shape[place]
        require(place == axis or size.low <= bound.high, f"indices have {size} places on axis {place}, x has {bound}")
        if updates.shape is not None:
            given = updates.shape[place]
            require(size.low <= given.high, f"indices have {size} places on axis {place}, updates have {given}")
    return x


# MLX adds it to sizes in 32 bits.
_LONGEST_STEP = 2**30


def _sliced(call: Call, shape: Shape | None) -> Shape | None:
    axis, start, stop, step = call.number("axis"), call.number("start"), call.number("stop"), call.node.step
    require(step != 0, "step is 0")
    require(abs(step) <= _LONGEST_STEP, f"step is {step}, expected {_LONGEST_STEP} or less")
    if shape is None:
        return None
    require(shape != (), "there are no axes to slice")
    rank = len(shape)
    require(axis.low < rank and axis.high >= -rank, f"axis is {axis}, of a tensor of shape {shown(shape)}")
    if not axis.is_exact:
        return tuple(Range(0, size.high) for size in shape)
    place = int(axis.low) % rank
    size = shape[place]
    if size.is_exact and start.is_exact and stop.is_exact:
        indices = slice(int(start.low), int(stop.low), step).indices(int(size.low))
        part = exactly(len(range(*indices)))
    else:
        part = Range(0, size.high if size.high == math.inf else -(-size.high // abs(step)))
        # What lies at fixed places from one end has a bound of its own.
        if start.low >= 0 and stop.low >= 0 and step > 0 and stop.high < math.inf:
            part = Range(0, min(part.high, max(-(-(stop.high - start.low) // step), 0)))
    return (*shape[:place], part, *shape[place + 1 :])


def _slice(call: Call) -> Result:
    x = call.tensor("x")
    return TensorType(_sliced(call, x.shape), x.dtype)


def _slice_update(call: Call) -> Result:
    dst, update = call.tensor("dst"), call.tensor("update")
    part = _sliced(call, dst.shape)
    require_broadcast("update", update.shape, "what it is written to", part)
    return dst


def _take(call: Call) -> Result:
    x = call.tensor("x")
    axis = call.axis(x.shape)
    require(x.shape != (), "x has no axes")
    if isinstance(call.node.index, Tid):
        places = call.tensor("index", INTEGERS).shape
    else:
        index, places = call.number("index"), ()
        if x.shape is not None:
            size = x.shape[axis]
            require(index.low < size.high and index.high >= -size.high, f"index is {index}, of an axis of {size}")
    if x.shape is None or places is None:
        return TensorType(None, x.dtype)
    require(x.shape[axis].high > 0 or product(places).low == 0, f"axis {axis} of {shown(x.shape)} has no elements")
    return TensorType((*x.shape[:axis], *places, *x.shape[axis + 1 :]), x.dtype)


def _take_along_axis(call: Call) -> Result:
    x, indices = call.tensor("x"), call.tensor("indices", INTEGERS)
    axis = call.axis(x.shape)
    require(x.shape != () and indices.shape != (), "a tensor has no axes")
    if x.shape is None or indices.shape is None:
        return TensorType(None, x.dtype)
    require(
        len(x.shape) == len(indices.shape),
        f"indices have shape {shown(indices.shape)}, x has {shown(x.shape)}",
    )
    around, places = list(x.shape), list(indices.shape)
    around[axis] = ONE
    return TensorType(broadcast(tuple(around), tuple(places)), x.dtype)


RULES: dict[str, Rule] = {
    "GatherNode": _gather,
    "IndexCopyNode": _index_copy,
    "ScatterAddNode": _scatter_add,
    "SliceNode": _slice,
    "SliceUpdateNode": _slice_update,
    "TakeAlongAxisNode": _take_along_axis,
    "TakeNode": _take,
}
