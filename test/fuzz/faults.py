"""What can be wrong with a program: other fields, slots, shapes, dtypes, numbers and descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz.chained import Program, Slot, TensorSlot
from fuzz.runner import Data

from executorch_mlx.backends.mlx.program import (
    ShapeDim,
    SlotType,
    TensorMeta,
    Tid,
    Vid,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_NAMES
from executorch_mlx.backends.mlx.program.schema import FIELDS, Field

_SMALL = (0, 1, -1, 2, -2, 3, 4, 5, 6, 7, 8, -3, -4, 16, 31, 32, 33, 63, 64, 128, 256)
_INT8 = (-(2**7), 2**7 - 1)
_INT32 = (2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1, 2**30, 2**24 + 1, 2**20, 65536, 65535, 46341, 1000, -1000)
_INT64 = (2**63 - 1, -(2**63), 2**63 - 2, 2**62, 2**53 + 1, 2**40, 2**33, 2**32, 2**32 - 1, 2**32 + 1, 2**31, -(2**40))
_UINT64 = (2**64 - 1, 2**63, 2**63 - 1, 2**32, 2**31, 2**20, 1000)
_INTEGERS: dict[str, tuple[tuple[int, ...], int, int]] = {
    # Field type -> far values, the smallest and the largest.
    "int8": (_INT8, -(2**7), 2**7 - 1),
    "int32": (_INT32, -(2**31), 2**31 - 1),
    "uint32": ((2**32 - 1, 2**31, 1000), 0, 2**32 - 1),
    "uint64": (_UINT64, 0, 2**64 - 1),
    "IntOrVid": ((*_INT32, *_INT64), -(2**63), 2**63 - 1),
    "IntOrVidOrTid": ((*_INT32, *_INT64), -(2**63), 2**63 - 1),
}
_FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, -0.0, 1e-5, -1e-5, 1e-45, 1e10, 1e20, -1e20, 3e38, -3e38)
_FLOATS = (*_FLOATS, math.inf, -math.inf, math.nan)
_TEXTS = ("", "none", "tanh", "constant", "edge", "affine", "mxfp4", "mxfp8", "nvfp4", "reflect", "AFFINE", "é" * 40)
_CODES = (*SCALAR_TYPE_NAMES, 8, 9, 10, 12, -1, 127, -128)
_DTYPE_FIELDS = ("scalar_type", "dtype", "out_dtype")
_MAX_ELEMENTS = 1 << 16


def _number(program: Program, now: Any, type_name: str) -> int:
    """Return a number for a field of this type: near what it is now, small, or at a limit."""
    choose = program.choose
    far, low, high = _INTEGERS[type_name]
    base = now if isinstance(now, int) else 1
    near = (base + 1, base - 1, -base, 0, base * 2, base + program.size, base - program.size)
    chosen = choose.pick(choose.pick((near, near, _SMALL, _SMALL, far)))
    return min(max(chosen, low), high)


def _item(program: Program, now: Any, type_name: str, name: str = "") -> Any:
    """Return another value for an item of a field."""
    choose = program.choose
    if type_name in ("Tid", "Vid", "VidOrTid"):
        return _slot(program, now)
    if type_name in ("IntOrVid", "FloatOrVid", "IntOrVidOrTid") and choose.chance(12):
        is_new = choose.chance(50) or not program.values
        number = choose.pick(_FLOATS) if type_name == "FloatOrVid" else _number(program, now, "IntOrVid")
        return program.new_value(number) if is_new else Vid(choose.below(len(program.values)))
    if type_name == "IntOrVidOrTid" and choose.chance(30):
        return Tid(choose.below(len(program.tensors) + 1))
    if type_name in ("float", "double", "FloatOrVid"):
        return choose.pick(_FLOATS)
    if type_name == "bool":
        return not now
    if type_name == "string":
        return choose.pick(_TEXTS)
    if name in _DTYPE_FIELDS:
        return choose.pick(_CODES)
    return _number(program, now, type_name)


def _slot(program: Program, now: Any) -> Slot:
    choose = program.choose
    if isinstance(now, Vid):
        return Vid(2**32 - 1 if choose.chance(3) else choose.below(len(program.values) + 1))
    return Tid(2**32 - 1 if choose.chance(3) else choose.below(len(program.tensors) + 1))


def _change_field(program: Program) -> None:
    """Change one field of one node."""
    choose, nodes = program.choose, program.nodes()
    if not nodes:
        return
    node = choose.pick(nodes)
    rows = [row for row in FIELDS[node.kind] if row.type not in ("Tid", "Vid")] or FIELDS[node.kind]
    if any(row.name.endswith("_chain_idx") for row in rows) and choose.chance(70):
        rows = [row for row in rows if not row.name.endswith("_chain_idx")]
    if rows:
        row = choose.pick(rows)
        setattr(node, row.name, _field(program, getattr(node, row.name), row))


def _field(program: Program, now: Any, row: Field) -> Any:
    choose = program.choose
    if not row.required and row.default is None and choose.chance(15):
        return None
    if not row.is_vector:
        return _item(program, now, row.type, row.name)
    items = list(now or [])
    how = choose.pick(("set", "set", "set", "drop", "add", "twice", "none", "many"))
    place = choose.below(len(items)) if items else 0
    if how == "set" and items:
        items[place] = _item(program, items[place], row.type, row.name)
    elif how == "drop" and items:
        del items[place]
    elif how == "twice" and items:
        items[place] = items[choose.below(len(items))]
    elif how == "none":
        items = []
    elif how == "many" and items:
        items *= choose.pick((2, 3, 9))
    else:
        items.insert(place, _item(program, None, row.type, row.name))
    return items


def _change_slot(program: Program) -> None:
    """Let a node read or write another slot, drop an optional one, or add one."""
    choose, nodes = program.choose, program.nodes()
    if not nodes:
        return
    node = choose.pick(nodes)
    rows = [row for row in FIELDS[node.kind] if row.type in ("Tid", "Vid", "VidOrTid")]
    if rows:
        row = choose.pick(rows)
        now = getattr(node, row.name)
        if row.is_vector:
            setattr(node, row.name, _field(program, now, row))
        elif not row.required and now is not None and choose.chance(40):
            setattr(node, row.name, None)
        else:
            setattr(node, row.name, _slot(program, Vid(0) if row.type == "Vid" else now))


def _replaced(program: Program, tensor: TensorSlot, shape: tuple[int, ...], scalar_type: int) -> None:
    """Give a source another shape or dtype, with its numbers over again."""
    if math.prod(shape) > _MAX_ELEMENTS or tensor.data is None:
        return
    numbers, name = tensor.data.numbers(), SCALAR_TYPE_NAMES[scalar_type]
    if scalar_type != tensor.data.scalar_type:
        with np.errstate(all="ignore"):
            if name == "bfloat16":
                numbers = (numbers.astype("float32").view("uint32") >> 16).astype("uint16")
            else:
                numbers = numbers.astype(name)
    count = math.prod(shape)
    whole = np.resize(numbers, count) if numbers.size else np.zeros(count, numbers.dtype)
    tensor.data = Data(shape, scalar_type, whole.tobytes())
    program.redescribe(tensor)


def _change_shape(program: Program) -> None:
    """Give an input, a constant or a buffer another shape."""
    choose, sources = program.choose, program.sources()
    if not sources:
        return
    tensor = choose.pick(sources)
    shape = list(tensor.data.shape if tensor.data is not None else ())
    place = choose.below(len(shape)) if shape else 0
    how = choose.pick(("dim", "dim", "dim", "add", "drop", "none", "swap"))
    if how == "dim" and shape:
        size = shape[place]
        shape[place] = choose.pick((0, 0, 1, size + 1, max(size - 1, 0), 2 * size, 3, 5, 300, 5000))
    elif how == "drop" and shape:
        del shape[place]
    elif how == "none":
        shape = []
    elif how == "swap":
        shape.reverse()
    else:
        shape.insert(place, choose.pick((1, 2, 0, 3)))
    _replaced(program, tensor, tuple(shape), tensor.scalar_type)


def _change_dtype(program: Program) -> None:
    """Give an input, a constant or a buffer another dtype."""
    sources = program.sources()
    if sources:
        tensor = program.choose.pick(sources)
        if tensor.data is not None:
            _replaced(program, tensor, tensor.data.shape, program.choose.pick(tuple(SCALAR_TYPE_NAMES)))


def _change_numbers(program: Program) -> None:
    """Put numbers at a limit into an input or a constant: indices out of range, above all."""
    choose = program.choose
    sources = [tensor for tensor in program.sources() if tensor.data is not None and tensor.data.raw]
    integers = [tensor for tensor in sources if tensor.data is not None and tensor.data.numbers().dtype.kind in "iu"]
    if not sources:
        return
    tensor = choose.pick(integers if integers and choose.chance(75) else sources)
    assert tensor.data is not None
    numbers = tensor.data.numbers().copy()
    is_all = choose.chance(25)
    for _ in range(1 if is_all else choose.pick((1, 1, 2, 5))):
        place = slice(None) if is_all else choose.below(numbers.size)
        if numbers.dtype.kind == "f":
            with np.errstate(over="ignore"):
                numbers[place] = choose.pick(_FLOATS)
        elif numbers.dtype.kind == "b":
            numbers[place] = np.logical_not(numbers[place])
        else:
            limits = np.iinfo(numbers.dtype)
            number = choose.pick(choose.pick(((-1, -2, -7, 3, 4, 5, 6, 7, 9), _SMALL, (*_INT32, *_INT64))))
            numbers[place] = min(max(number, limits.min), limits.max)
    tensor.data = Data(tensor.data.shape, tensor.data.scalar_type, numbers.tobytes())


def _change_value(program: Program) -> None:
    """Hand in another number as a value, or one of another type."""
    choose = program.choose
    given = [index for index, number in enumerate(program.values) if number is not None]
    if given:
        index = choose.pick(given)
        now = program.values[index]
        program.values[index] = choose.pick(_FLOATS) if choose.chance(10) else _number(program, now, "IntOrVid")
        if choose.chance(8):
            program.value_types[index] = choose.pick((SlotType.BoolValueSlot, SlotType.FloatValueSlot))


def _change_description(program: Program) -> None:
    """Describe a tensor in another way than it is."""
    choose = program.choose
    described = [tensor for tensor in program.tensors if tensor.role != "temp" and tensor.meta is not None]
    if not described:
        return
    tensor = choose.pick(described)
    assert tensor.meta is not None
    shape = list(tensor.meta.shape)
    how = choose.pick(("none", "dim", "dim", "code", "order", "add"))
    if how == "none":
        tensor.meta = None
    elif how == "dim" and shape:
        low, high = (choose.pick((*_SMALL, *_INT32)) for _ in range(2))
        shape[choose.below(len(shape))] = ShapeDim(choose.pick((-1, *_SMALL, *_INT32)), low, high)
        tensor.meta = TensorMeta(shape, tensor.meta.scalar_type)
    elif how == "code":
        tensor.meta = TensorMeta(shape, choose.pick(_CODES))
    elif how == "order":
        tensor.meta = TensorMeta(shape, tensor.meta.scalar_type, list(reversed(range(len(shape)))))
    else:
        tensor.meta = TensorMeta([*shape, ShapeDim(choose.pick(_SMALL))], tensor.meta.scalar_type)


def _change_order(program: Program) -> None:
    """Drop, repeat or move an instruction, or put out another slot."""
    choose = program.choose
    chain = choose.pick(program.chains)
    how = choose.pick(("repeat", "move", "drop", "output"))
    if how == "output":
        count = len(program.tensors)
        program.outputs.append(Tid(choose.below(count + 1)) if choose.chance(80) else Vid(choose.below(3)))
    elif chain:
        node = chain[choose.below(len(chain))]
        if how != "repeat":
            chain.remove(node)
        if how != "drop":
            chain.insert(choose.below(len(chain) + 1), node)


FAULTS: tuple[Callable[[Program], None], ...] = (
    *(_change_field,) * 6,
    *(_change_shape,) * 3,
    *(_change_dtype,) * 2,
    *(_change_numbers,) * 2,
    _change_slot,
    _change_value,
    _change_description,
    _change_order,
)
