"""What is known of numbers, shapes and dtypes: sound for every number that they stand for."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.program.types import (
    ANY,
    BITS,
    FLOATS,
    INTEGERS,
    NUMBERS,
    ONE,
    SIZE,
    UNKNOWN,
    WIDTHS,
    Range,
    Shape,
    TensorType,
    as_float,
    as_int64,
    broadcast,
    exactly,
    joined,
    product,
    promoted,
    shown,
)

DTYPES = tuple(SCALAR_TYPE_CODES)


def to_mlx(dtype: str) -> mx.Dtype:
    return mx.bool_ if dtype == "bool" else getattr(mx, dtype)


# -- dtypes -------------------------------------------------------------------


@pytest.mark.parametrize("a", DTYPES)
def test_promoted_is_the_dtype_in_which_mlx_computes(a: str) -> None:
    for b in DTYPES:
        assert to_mlx(promoted(a, b)) == mx.result_type(mx.zeros(1, to_mlx(a)), mx.zeros(1, to_mlx(b))), (a, b)


def test_promoted_of_one_or_of_an_unknown_dtype() -> None:
    assert [promoted(dtype) for dtype in DTYPES] == list(DTYPES)
    assert promoted("float32", None) is None
    assert promoted("int8", "uint8", "float16") == "float16"


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_have_the_widths_and_kinds_that_they_have_in_mlx(dtype: str) -> None:
    array = mx.zeros(1, to_mlx(dtype))
    assert WIDTHS[dtype] == array.itemsize
    assert (dtype in FLOATS) == mx.issubdtype(array.dtype, mx.floating)
    assert (dtype in INTEGERS) == mx.issubdtype(array.dtype, mx.integer)
    assert (dtype in BITS) != (dtype in FLOATS)
    assert (dtype in NUMBERS) == (dtype != "bool")
    assert as_float(dtype) == (dtype if dtype in FLOATS else "float32")
    assert as_int64(dtype) == (dtype if dtype in FLOATS else "int64")


def test_functions_of_an_unknown_dtype_give_an_unknown_one() -> None:
    assert as_float(None) is None
    assert as_int64(None) is None


# -- numbers ------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Range]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


@st.composite
def ranges(draw: st.DrawFn, low: int = -6, *, is_open: bool = True) -> Range:
    """Draw a range of a few small integers, which may be open at the ends that ``low`` leaves."""
    first, second = sorted(draw(st.tuples(st.integers(low, 6), st.integers(low, 6))))
    start = -math.inf if is_open and low < 0 and draw(st.integers(0, 5)) == 0 else first
    end = math.inf if is_open and draw(st.integers(0, 5)) == 0 else second
    return Range(start, end)


def numbers(known: Range) -> list[int]:
    """Return the numbers of a range, of an open one those that are small, and one that is not."""
    low = int(max(known.low, -12))
    high = int(min(known.high, 12))
    far = ([-1000] if known.low == -math.inf else []) + ([1000] if known.high == math.inf else [])
    return [*range(low, high + 1), *far]


@pytest.mark.parametrize("symbol", OPERATIONS)
class TestArithmetic:
    """Every result of numbers of two ranges lies in the result of the ranges."""

    @given(a=ranges(), b=ranges())
    def test_it_is_sound(self, symbol: str, a: Range, b: Range) -> None:
        operation = OPERATIONS[symbol]
        result = operation(a, b)
        assert not math.isnan(result.low)
        assert not math.isnan(result.high)
        for x, y in itertools.product(numbers(a), numbers(b)):
            if y or symbol not in ("//", "%"):
                assert operation(x, y) in result, (x, y)

    def test_it_is_exact_of_exact_numbers(self, symbol: str) -> None:
        operation = OPERATIONS[symbol]
        for x, y in itertools.product(range(-7, 8), repeat=2):
            if y or symbol not in ("//", "%"):
                assert operation(exactly(x), exactly(y)) == exactly(operation(x, y))

    def test_it_is_sound_of_numbers_that_no_float_holds(self, symbol: str) -> None:
        operation = OPERATIONS[symbol]
        x, y = 2**62 + 1, 3
        assert operation(exactly(x), exactly(y)) == exactly(operation(x, y))

    def test_division_by_nothing_is_left_to_the_rules(self, symbol: str) -> None:
        if symbol in ("//", "%"):
            assert OPERATIONS[symbol](exactly(3), exactly(0)) == ANY


@given(a=ranges())
def test_a_range_is_negated_as_its_numbers_are(a: Range) -> None:
    negated = -a
    assert all(-x in negated for x in numbers(a))
    assert -negated == a


@given(a=ranges(), b=ranges())
def test_ranges_meet_where_they_share_a_number(a: Range, b: Range) -> None:
    shared = [x for x in numbers(a) if x in b]
    assert a.meets(b) == bool(shared)
    both = a.within(b.low, b.high)
    assert (both is not None) == bool(shared)
    assert both is None or all((x in both) == (x in a and x in b) for x in range(-15, 16))
    assert all(x in a.hull(b) for x in (*numbers(a), *numbers(b)))


def test_multiplying_by_one_keeps_a_size_s_name() -> None:
    size = Range(0, 9, "t0.0")
    assert size * ONE == size
    assert ONE * size == size
    assert (size * exactly(2)).name == ""


def test_sizes_of_one_name_stay_one_where_they_are_bounded() -> None:
    size = Range(0, 9, "t0.0")
    assert size.within(-1, 20) is size
    assert size.within(1, 5) == Range(1, 5, "t0.0")
    assert size.within(10, 20) is None
    assert size.hull(size) is size
    assert size.hull(Range(0, 9)).name == ""


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (exactly(3), "3"),
        (Range(0, 3), "0..3"),
        (SIZE, "0.."),
        (ANY, ".."),
        (Range(-math.inf, 2), "..2"),
        (TensorType((exactly(2), SIZE), "int8"), "int8[2, 0..]"),
        (UNKNOWN, "?[...]"),
    ],
)
def test_types_are_shown_shortly(known: Range | TensorType, text: str) -> None:
    assert str(known) == text


def test_shapes_are_shown_shortly() -> None:
    assert shown(None) == "[...]"
    assert shown(()) == "[]"
    assert shown((exactly(2), Range(0, 4))) == "[2, 0..4]"


# -- shapes -------------------------------------------------------------------


def exact(sizes: Sequence[int]) -> Shape:
    return tuple(map(exactly, sizes))


@given(shapes=st.lists(st.lists(st.sampled_from((0, 1, 1, 2, 3)), max_size=3), min_size=1, max_size=3))
def test_exact_shapes_are_broadcast_as_in_torch(shapes: list[list[int]]) -> None:
    try:
        expected = np.broadcast_shapes(*map(tuple, shapes))
    except ValueError:
        with pytest.raises(ValueError, match="do not go together"):
            broadcast(*map(exact, shapes))
        return
    assert broadcast(*map(exact, shapes)) == exact(expected)
    assert tuple(torch.broadcast_shapes(*shapes)) == expected


@given(
    shapes=st.lists(
        st.lists(st.sampled_from([exactly(n) for n in (0, 1, 2, 3)]) | ranges(0), max_size=2).map(tuple),
        min_size=1,
        max_size=3,
    )
)
def test_broadcasting_is_sound_and_refuses_only_what_no_sizes_allow(shapes: list[Shape]) -> None:
    possible = set()
    sizes = [size for shape in shapes for size in shape]
    for chosen in itertools.product(*[range(int(size.low), int(min(size.high, 8)) + 1) for size in sizes]):
        rest = iter(chosen)
        try:
            possible.add(np.broadcast_shapes(*[tuple(next(rest) for _ in shape) for shape in shapes]))
        except ValueError:
            continue
    try:
        known = broadcast(*shapes)
    except ValueError:
        assert not possible
        return
    assert known is not None
    for shape in possible:
        assert len(known) == len(shape)
        assert all(size in its for size, its in zip(shape, known, strict=True))


def test_shapes_of_one_name_are_broadcast_to_it() -> None:
    size = Range(0, 9, "t0.0")
    assert broadcast((size, exactly(1)), (size, exactly(4))) == (size, exactly(4))
    assert broadcast((exactly(1),), (size,)) == (size,)
    assert broadcast((exactly(2),), None) is None
    assert broadcast() == ()


@given(sizes=st.lists(ranges(0), max_size=3))
def test_products_hold_the_products_of_their_sizes(sizes: list[Range]) -> None:
    known = product(sizes)
    for chosen in itertools.product(*[numbers(size)[:6] + numbers(size)[-1:] for size in sizes]):
        assert math.prod(chosen) in known


def test_products_of_exact_sizes_are_exact() -> None:
    assert product(exact([2, 0, 5])) == exactly(0)
    assert product(()) == ONE
    assert product([exactly(0), SIZE]) == exactly(0)
    assert product([exactly(2), SIZE]) == SIZE


@pytest.mark.parametrize(
    ("known", "taken"),
    [
        (TensorType(exact([2, 3]), "float32"), exactly(24)),
        (TensorType(exact([2, 3]), "bool"), exactly(6)),
        (TensorType(exact([2, 3])), Range(6, 48)),
        (TensorType((Range(1, 4),), "float16"), Range(2, 8)),
        (TensorType((SIZE,), "float16"), SIZE),
        (TensorType(None, "float32"), SIZE),
        (UNKNOWN, SIZE),
    ],
)
def test_a_tensor_takes_the_bytes_of_its_elements(known: TensorType, taken: Range) -> None:
    assert known.bytes == taken


# -- either of two ---------------------------------------------------------------

N = Range(0, 9, "t0.0")
JOINED = [
    ("the same", TensorType(exact([2]), "int8"), TensorType(exact([2]), "int8"), TensorType(exact([2]), "int8")),
    ("the same name", TensorType((N,)), TensorType((N,)), TensorType((N,))),
    ("sizes", TensorType(exact([2, 3])), TensorType(exact([2, 5])), TensorType((exactly(2), Range(3, 5)))),
    ("ranks", TensorType(exact([2]), "int8"), TensorType(exact([2, 1]), "int8"), TensorType(None, "int8")),
    ("dtypes", TensorType(exact([2]), "int8"), TensorType(exact([2]), "bool"), TensorType(exact([2]))),
    ("an unknown shape", TensorType(None, "int8"), TensorType(exact([2]), "int8"), TensorType(None, "int8")),
    ("an unknown dtype", TensorType(exact([2])), TensorType(exact([2]), "int8"), TensorType(exact([2]))),
    ("numbers", exactly(2), Range(5, 7), Range(2, 7)),
    ("a number and a tensor", exactly(2), TensorType(exact([2])), UNKNOWN),
    ("a tensor and a number", TensorType(exact([2])), ANY, UNKNOWN),
]


@pytest.mark.parametrize(("a", "b", "either"), [pytest.param(*rest, id=name) for name, *rest in JOINED])
def test_joined_is_what_holds_of_either(a: Range | TensorType, b: Range | TensorType, either: object) -> None:
    assert joined(a, b) == either
    assert joined(b, a) == either
