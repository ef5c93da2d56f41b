"""What is known of a program's numbers and tensors before it runs: ranges of sizes, and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Range:
    """A number from ``low`` to ``high``, both included; an infinity is an open end.

    Two that have the same name are the same number, whichever it is.
    """

    low: float
    high: float
    name: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether only one number is left."""
        return self.low == self.high

    def meets(self, other: Range) -> bool:
        """Whether both may be the same number."""
        return self.low <= other.high and other.low <= self.high

    def within(self, low: float, high: float) -> Range | None:
        """Return what of it lies in these bounds, None for nothing."""
        if low <= self.low and self.high <= high:
            return self
        return Range(max(self.low, low), min(self.high, high), self.name) if self.meets(Range(low, high)) else None

    def hull(self, other: Range) -> Range:
        """Return the range of either."""
        return self if self == other else Range(min(self.low, other.low), max(self.high, other.high))

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Range) -> Range:
        return self + -other

    def __mul__(self, other: Range) -> Range:
        if self == ONE or other == ONE:
            return other if self == ONE else self
        # An open end times nothing is nothing: sizes are finite, though unknown.
        corners = [a * b if a and b else 0 for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(corners), max(corners))

    def __floordiv__(self, other: Range) -> Range:
        if self.is_exact and other.is_exact and other.low:
            return exactly(self.low // other.low)
        if other.low < 1 or self.low < 0:
            return ANY
        return Range(self.low // other.high if other.high < math.inf else 0, _divided(self.high, other.low))

    def __mod__(self, other: Range) -> Range:
        if self.is_exact and other.is_exact and other.low:
            return exactly(self.low % other.low)
        # Not high - 1: a value may be a float.
        return Range(0, other.high) if other.low >= 1 else ANY

    def __str__(self) -> str:
        if self.is_exact:
            return str(self.low)
        low, high = ("" if abs(end) == math.inf else end for end in (self.low, self.high))
        return f"{low}..{high}"


def _divided(number: float, by: float) -> float:
    return math.inf if number == math.inf else number // by


def exactly(number: float) -> Range:
    """Return the range of one number."""
    return Range(number, number)


ANY = Range(-math.inf, math.inf)
SIZE = Range(0, math.inf)
ONE = exactly(1)

Shape = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's shape, None where not even its rank is known, and its dtype by name, None where it is not known."""

    shape: Shape | None = None
    dtype: str | None = None

    @property
    def bytes(self) -> Range:
        """How much it takes."""
        width = Range(1, 8) if self.dtype is None else exactly(WIDTHS[self.dtype])
        return SIZE if self.shape is None else product(self.shape) * width

    def __str__(self) -> str:
        sizes = "..." if self.shape is None else ", ".join(map(str, self.shape))
        return f"{self.dtype or '?'}[{sizes}]"


UNKNOWN = TensorType()

Type = TensorType | Range


def joined(a: Type, b: Type) -> Type:
    """Return the type of what is one or the other."""
    if a == b:
        return a
    if isinstance(a, Range) and isinstance(b, Range):
        return a.hull(b)
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return UNKNOWN
    shape = None
    if a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape):
        shape = tuple(one.hull(other) for one, other in zip(a.shape, b.shape, strict=True))
    return TensorType(shape, a.dtype if a.dtype == b.dtype else None)


# -- shapes -------------------------------------------------------------------


def product(sizes: Iterable[Range]) -> Range:
    """Return the product of sizes."""
    low: float = 1
    high: float = 1
    for size in sizes:
        low *= size.low
        high = 0 if not high or not size.high else high * size.high
    return Range(low, high)


def broadcast(*shapes: Shape | None) -> Shape | None:
    """Return the shape to which tensors of these shapes are broadcast, None where one is not known.

    Raises:
        ValueError: they cannot be, whatever the sizes that are not known.
    """
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    rank = max(map(len, known), default=0)
    padded = [(*[ONE] * (rank - len(shape)), *shape) for shape in known]
    return tuple(reduce(_together, sizes) for sizes in zip(*padded, strict=True))


def _together(a: Range, b: Range) -> Range:
    if a == b or b == ONE:
        return a
    if a == ONE:
        return b
    if 1 not in a and 1 not in b and not a.meets(b):
        raise ValueError(f"sizes {a} and {b} do not go together")
    if 1 not in a:
        return a
    return a.hull(b) if 1 in b else b


def shown(shape: Shape | None) -> str:
    """Return a shape's text."""
    return "[...]" if shape is None else f"[{', '.join(map(str, shape))}]"


# -- dtypes -------------------------------------------------------------------

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset({*_SIGNED, *_UNSIGNED})
BITS = INTEGERS | {"bool"}
NUMBERS = INTEGERS | FLOATS

# Bytes of an element.
WIDTHS: dict[str, int] = {
    "bool": 1,
    "bfloat16": 2,
    **{name: int(name.lstrip("uintfloa")) // 8 for name in (*_SIGNED, *_UNSIGNED, "float16", "float32", "float64")},
}


def bounds(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest number of an integer dtype."""
    bits = 8 * WIDTHS[dtype]
    return (0, 2**bits - 1) if dtype in _UNSIGNED else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def promoted(*dtypes: str | None) -> str | None:
    """Return the dtype in which MLX computes with operands of these dtypes; see ``mlx.core.result_type``."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return reduce(_wider, known) if len(known) == len(dtypes) else None


def _wider(a: str, b: str) -> str:
    if a == b or b == "bool":
        return a
    if a == "bool":
        return b
    if a in FLOATS and b in FLOATS:
        # Neither half holds the other's numbers.
        return "float32" if WIDTHS[a] == WIDTHS[b] else max(a, b, key=WIDTHS.__getitem__)
    if a in FLOATS or b in FLOATS:
        return a if a in FLOATS else b
    if (a in _SIGNED) == (b in _SIGNED):
        return max(a, b, key=WIDTHS.__getitem__)
    signed, unsigned = (a, b) if a in _SIGNED else (b, a)
    if WIDTHS[signed] > WIDTHS[unsigned]:
        return signed
    width = 2 * WIDTHS[unsigned]
    return f"int{8 * width}" if width <= 8 else "float32"


def as_float(dtype: str | None) -> str | None:
    """Return the dtype of a function whose results are no integers."""
    return dtype if dtype is None or dtype in FLOATS else "float32"


def as_int64(dtype: str | None) -> str | None:
    """Return the dtype of sums: integers are summed as int64."""
    return dtype if dtype is None or dtype in FLOATS else "int64"
