"""Samples made slightly wrong, or right in another way: fields, shapes and dtypes changed one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from executorch_mlx.backends.mlx.program import Tid, Vid
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.program.schema import FIELDS, Field
from samples.nodes import Sample


class Described(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


class Mutation(NamedTuple):
    """A sample on operands of these shapes and dtypes, with what was changed."""

    change: str
    sample: Sample
    operands: tuple[Described, ...]


_INTEGERS = (*range(-5, 10), -20, 20, 100)
_LIMITS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
_FLOATS = (0.0, -1.5, 1e20, -math.inf, math.nan)
_SIZES = (0, 1, 2, 3, 5, 7)
_DTYPES = tuple(SCALAR_TYPE_CODES)
_TEXTS = ("", "none", "tanh", "constant", "edge", "affine", "mxfp4", "mxfp8", "nvfp4")
_CODES = (-1, 0, 5, 6, 8, 11, 29)


def with_literals(sample: Sample) -> Sample:
    """Return a sample in whose fields numbers stand in place of the slots of its values, wherever they may."""

    def literal(row: Field, item: Any) -> Any:
        return sample.values[item.idx] if isinstance(item, Vid) and row.type.startswith(("IntOr", "FloatOr")) else item

    fields = {
        row.name: [literal(row, item) for item in value] if isinstance(value, list) else literal(row, value)
        for row in FIELDS[sample.kind]
        if (value := sample.fields.get(row.name)) is not None
    }
    return replace(sample, fields=fields)


def mutations(sample: Sample, operands: Sequence[Described]) -> Iterator[Mutation]:
    """Yield a sample with each of its fields and operands changed to others that might stand there."""
    given = tuple(operands)
    for row in FIELDS[sample.kind]:
        if row.name in sample.reads or row.name in ("out", "outs") or row.name.endswith("chain_idx"):
            continue
        value = sample.fields.get(row.name, row.default)
        for other in _others(row, value):
            fields = {**sample.fields, row.name: other}
            yield Mutation(f"{row.name}={other}", replace(sample, fields=fields), given)
    for name in sample.reads:
        if any(row.name == name and not row.required for row in FIELDS[sample.kind]):
            # The slot is left to nothing.
            yield Mutation(f"{name} absent", replace(sample, fields={**sample.fields, name: None}), given)
    if sample.num_outs:
        for count in (1, sample.num_outs + 1):
            yield Mutation(f"{count} outs", replace(sample, num_outs=count), given)
    for place, operand in enumerate(given):
        for other in _other_operands(operand):
            changed = (*given[:place], other, *given[place + 1 :])
            yield Mutation(f"operand {place}: {other.dtype} {list(other.shape)}", sample, changed)


def _others(row: Field, value: Any) -> Iterator[Any]:
    if value is not None and not row.required:
        if row.default is None:
            yield None
    elif value is None and row.type in ("Tid", "VidOrTid", "string"):
        return
    if row.is_vector:
        yield from _other_lists(row, list(value or []))
    else:
        yield from _other_items(row, value)


def _other_items(row: Field, value: Any) -> Iterator[Any]:
    if isinstance(value, (Tid, Vid)):
        return
    if row.type == "bool":
        yield not value
    elif row.type == "string":
        yield from (text for text in _TEXTS if text != value)
    elif row.name in ("scalar_type", "dtype", "out_dtype"):
        yield from (code for code in _CODES if code != value)
    elif row.type in ("float", "double", "FloatOrVid"):
        yield from (number for number in _FLOATS if number != value)
    elif "int" in row.type or row.type.startswith("Int"):
        low, high = _LIMITS[row.type if row.type in _LIMITS else "int64"]
        yield from (number for number in (*_INTEGERS, low, high) if number != value and number >= low)


def _other_lists(row: Field, value: list[Any]) -> Iterator[list[Any]]:
    for place, item in enumerate(value):
        for other in _other_items(row, item):
            yield [*value[:place], other, *value[place + 1 :]]
    if value:
        yield []
        yield value[:-1]
        yield [*value, value[-1]]
        yield value[::-1]
    elif row.type != "Tid":
        yield [0]


def _other_operands(operand: Described) -> Iterator[Described]:
    shape, dtype = operand
    for place, size in enumerate(shape):
        for other in (*_SIZES, size - 1, size + 1, 2 * size):
            if other != size and other >= 0:
                yield Described((*shape[:place], other, *shape[place + 1 :]), dtype)
        yield Described((*shape[:place], *shape[place + 1 :]), dtype)
    yield Described((), dtype)
    yield Described((0,), dtype)
    yield Described((1, *shape), dtype)
    yield Described((2, *shape), dtype)
    yield Described((*shape, 1), dtype)
    yield Described(shape[::-1], dtype)
    for other_dtype in _DTYPES:
        if other_dtype != dtype:
            yield Described(shape, other_dtype)
