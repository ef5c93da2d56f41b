"""Scalar values."""

from __future__ import annotations

import operator

from ..types import ANY, SIZE, Range, exactly, product, shown
from .base import Call, Result, Rule, arithmetic, held, normalized, require


def _divided(call: Call) -> Range:
    by = call.number("b")
    require(by != exactly(0), "b is 0")
    return by


def _floor_divide(call: Call) -> Result:
    return held(call.number("a") // _divided(call))


def _mod(call: Call) -> Result:
    return call.number("a") % _divided(call)


def _item(call: Call) -> Result:
    x = call.tensor("x")
    require(x.shape is None or 1 in product(x.shape), f"x has shape {shown(x.shape)}, expected one element")
    return ANY


def _sym_size(call: Call) -> Result:
    a = call.tensor("a")
    require(a.shape != (), "a has no axes")
    axis = normalized(call.node.dim, a.shape, "dim")
    return SIZE if a.shape is None else a.shape[axis]


RULES: dict[str, Rule] = {
    "AddIntNode": arithmetic(operator.add),
    "FloorDivideIntNode": _floor_divide,
    "ItemIntNode": _item,
    "ModIntNode": _mod,
    "MultiplyIntNode": arithmetic(operator.mul),
    "NoopNode": lambda call: None,
    "SubtractIntNode": arithmetic(operator.sub),
    "SymSizeNode": _sym_size,
}
