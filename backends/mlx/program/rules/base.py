"""What the tables of rules are written with: a call's operands as they are known, and makers of rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..dtypes import SCALAR_TYPE_NAMES
from ..schema import Node, Tid, Vid
from ..types import UNKNOWN, Range, Shape, TensorType, Type, as_float, bounds, broadcast, exactly, promoted, shown

Result = Type | Sequence[Type] | None
Rule = Callable[["Call"], Result]


class Call:
    """An instruction with what is known of its operands.

    Rules ask for operands by the name of the field. They, and all methods here, raise ValueError for what cannot be,
    whatever is not known.

    Attributes:
        node: the instruction.
        is_open: whether the rule is to be asked again in each run. Methods set it: for a tensor of which not even the
            rank is known, or not the dtype where that matters; for a number that may be too small. Rules set it where
            MLX does not compare what they could not.
        scratch: bytes that the instruction takes besides its results; set by rules.
    """

    def __init__(self, node: Node, types: Callable[[Tid | Vid], Type]) -> None:
        self.node = node
        self.is_open = False
        self.scratch = exactly(0)
        self._types = types

    # -- operands -------------------------------------------------------------

    def tensor(self, field: str, dtypes: Collection[str] | None = None) -> TensorType:
        """Return a tensor operand's type; an absent one's is unknown.

        Args:
            field: its name.
            dtypes: what it may be of, None for anything.
        """
        return self._checked(field, getattr(self.node, field), dtypes)

    def tensors(self, field: str, dtypes: Collection[str] | None = None) -> list[TensorType]:
        """Return the types of a list of tensors."""
        return [self._checked(field, slot, dtypes) for slot in getattr(self.node, field)]

    def _checked(self, field: str, slot: Tid | None, dtypes: Collection[str] | None) -> TensorType:
        known = UNKNOWN if slot is None else self._types(slot)
        assert isinstance(known, TensorType), "a Tid names a tensor"
        is_decided = known.shape is not None and (dtypes is None or known.dtype is not None)
        self.is_open |= slot is not None and not is_decided
        if dtypes is not None and known.dtype is not None and known.dtype not in dtypes:
            raise ValueError(f"{field} is of {known.dtype}, expected one of {', '.join(sorted(dtypes))}")
        return known

    def has(self, field: str) -> bool:
        """Whether an optional field is there."""
        return getattr(self.node, field) is not None

    def number(self, field: str, low: float | None = None) -> Range:
        """Return what a field's literal or value may be, none of it less than ``low``; what may be is asked again."""
        return self._bounded(field, getattr(self.node, field), low)

    def numbers(self, field: str, low: float | None = None) -> list[Range]:
        """Return the same for a list."""
        return [self._bounded(field, item, low) for item in getattr(self.node, field)]

    def _bounded(self, field: str, value: Any, low: float | None) -> Range:
        known = self._types(value) if isinstance(value, Vid) else exactly(value)
        assert isinstance(known, Range), "a Vid names a number"
        if low is None:
            return known
        self.is_open |= known.low < low
        bounded = known.within(low, math.inf)
        if bounded is None:
            raise ValueError(f"{field} is {known}, expected {low} or more")
        return bounded

    def rank(self, field: str, low: int, high: float | None = None) -> TensorType:
        """Return a tensor operand's type, of so many dimensions."""
        tensor = self.tensor(field)
        if tensor.shape is not None:
            high = low if high is None else high
            if not low <= len(tensor.shape) <= high:
                wanted = str(low) if low == high else f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise ValueError(f"{field} has shape {shown(tensor.shape)}, expected {wanted} axes")
        return tensor

    def scalar_type(self, field: str) -> str:
        """Return the name of a field's dtype."""
        code = getattr(self.node, field)
        require(code in SCALAR_TYPE_NAMES, f"{field}: unknown scalar type {code}")
        return SCALAR_TYPE_NAMES[code]

    def one_of(self, field: str, allowed: Collection[Any]) -> None:
        """Refuse a field that is none of these."""
        value = getattr(self.node, field)
        require(value in allowed, f"{field} is {value!r}, expected one of {', '.join(map(repr, allowed))}")

    def axis(self, shape: Shape | None, field: str = "axis", *, is_new: bool = False) -> int:
        """Return a field's axis of a shape, counted from its beginning; of a scalar, the axis of a vector of one.

        Args:
            shape: the shape; where it is not known, any axis will do.
            field: its name.
            is_new: whether it is the place of an axis to come.
        """
        return normalized(getattr(self.node, field), shape, field, is_new=is_new)

    def axes(self, shape: Shape | None, field: str = "axes") -> list[int]:
        """Return a list of axes, each at most once."""
        found = [normalized(axis, shape, field) for axis in getattr(self.node, field) or ()]
        if len(set(found)) < len(found):
            raise ValueError(f"{field} {getattr(self.node, field)} name one axis twice")
        return found


# -- requirements -------------------------------------------------------------


def require(holds: bool, message: str) -> None:
    """Raise ValueError with a message unless something holds."""
    if not holds:
        raise ValueError(message)


def normalized(axis: int, shape: Shape | None, field: str, *, is_new: bool = False) -> int:
    """Return an axis counted from the beginning of a shape."""
    if shape is None:
        return axis
    size = len(shape) + 1 if is_new else max(len(shape), 1)
    if not -size <= axis < size:
        raise ValueError(f"{field} is {axis}, of a tensor of shape {shown(shape)}")
    return axis % size


def require_same(a: Range, b: Range, what: str) -> Range:
    """Refuse two sizes that must be the same and cannot be; return what both may be."""
    both = a.within(b.low, b.high)
    if both is None:
        raise ValueError(f"{what}: {a} and {b}")
    return both if both.name or not b.name else Range(both.low, both.high, b.name)


def require_broadcast(what: str, shape: Shape | None, target: str, to: Shape | None) -> None:
    """Refuse what cannot be broadcast to a shape."""
    whole = broadcast(shape, to)
    if whole is None or to is None:
        return
    fits = len(whole) == len(to) and all(map(Range.meets, whole, to))
    require(fits, f"{what} has shape {shown(shape)}, {target} has {shown(to)}")


# -- makers of rules ------------------------------------------------------------

DtypeRule = Callable[[str | None], str | None]


def same(dtype: str | None) -> str | None:
    """Return the operand's dtype."""
    return dtype


def always(dtype: str) -> Callable[..., str | None]:
    """Return a rule of one dtype whatever the operands'."""
    return lambda *_: dtype


def unary(result: DtypeRule = same, dtypes: Collection[str] | None = None) -> Rule:
    """One tensor to another of its shape."""

    def rule(call: Call) -> Result:
        x = call.tensor("x", dtypes)
        return TensorType(x.shape, result(x.dtype))

    return rule


def elementwise(
    result: Callable[..., str | None] = promoted,
    dtypes: Collection[str] | None = None,
    fields: Sequence[str] = ("a", "b"),
) -> Rule:
    """Several tensors, broadcast, to one."""

    def rule(call: Call) -> Result:
        operands = [call.tensor(field, dtypes) for field in fields]
        return TensorType(broadcast(*[x.shape for x in operands]), result(*[x.dtype for x in operands]))

    return rule


def promoted_float(*dtypes: str | None) -> str | None:
    """Return the dtype of a function of several operands whose results are no integers."""
    return as_float(promoted(*dtypes))


def along(result: DtypeRule = same, dtypes: Collection[str] | None = None) -> Rule:
    """One tensor to another of its shape, along an axis."""

    def rule(call: Call) -> Result:
        x = call.tensor("x", dtypes)
        call.axis(x.shape)
        return TensorType(x.shape, result(x.dtype))

    return rule


def arithmetic(function: Callable[[Range, Range], Range]) -> Rule:
    """Two numbers to a third, of 64 bits."""
    return lambda call: held(function(call.number("a"), call.number("b")))


def held(number: Range) -> Range:
    """Return what of a number 64 bits hold; where they may not hold it, its end is open."""
    low, high = bounds("int64")
    require(number.low <= high and number.high >= low, f"the result is {number}, expected 64 bits")
    return Range(
        -math.inf if number.low < low else number.low, math.inf if number.high > high else number.high, number.name
    )
