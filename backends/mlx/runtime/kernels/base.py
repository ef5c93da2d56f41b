"""What the tables of kernels are written with: slots, getters, and makers of rows.

A row turns a node into a *step*: a function over the environment, the list of all slots' current values (tensors first,
then scalar values). Rows run once, when a program is compiled; a step looks up nothing by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ...program import Node, Tid, Vid
from ..device import DTYPES, mx

HALVES = (mx.float16, mx.bfloat16)

Env = list[Any]
Step = Callable[[Env], None]
Getter = Callable[[Env], Any]


class At:
    """Where a program's slots lie in the environment, tensors first, then values; and what its other chains do."""

    def __init__(
        self,
        num_tensors: int,
        known: frozenset[Tid | Vid] = frozenset(),
        constants: frozenset[Tid] = frozenset(),
        chain: Callable[[int, At], list[Step]] = lambda index, at: [],
    ) -> None:
        self._num_tensors = num_tensors
        self._known = known
        self._constants = constants
        self._chain = chain

    def chain(self, index: int) -> list[Step]:
        """Return the steps of another chain of instructions."""
        return self._chain(index, self)

    def __call__(self, slot: Tid | Vid) -> int:
        """Return a slot's place."""
        return slot.idx if isinstance(slot, Tid) else self._num_tensors + slot.idx

    def is_known(self, slot: Tid | Vid) -> bool:
        """Whether a slot's numbers are there before the program computes anything."""
        return slot in self._known

    def is_constant(self, slot: Tid | Vid) -> bool:
        """Whether a slot's numbers are the same whenever a step reads them."""
        return slot in self._constants


Row = Callable[[Node, At], Step]


# -- fields that are literals or slots --------------------------------------


def get(value: Any, at: At) -> Getter:
    """Return a getter of a field that is a literal or a slot; of one that is absent, a getter of None."""
    if isinstance(value, (Tid, Vid)):
        return operator.itemgetter(at(value))
    return lambda env: value


def get_ints(values: list[Any], at: At) -> Getter:
    """Return a getter of a list of literals and value slots, as a tuple of ints."""
    if not any(isinstance(value, Vid) for value in values):
        fixed = tuple(values)
        return lambda env: fixed
    getters = [get(value, at) for value in values]
    return lambda env: tuple([int(get(env)) for get in getters])


def indices(slot: Tid, at: At) -> Callable[[Env, int, int], mx.array]:
    """Return a getter of indices from a lowest to a highest: MLX reads and writes wherever an index points.

    Numbers that are there already, those of inputs and constants, are looked at: IndexError. What the program computes
    is confined to the bounds, and compared with them once it has been evaluated (``StepState.confined``).
    """
    place, is_known, is_constant = at(slot), at.is_known(slot), at.is_constant(slot)
    of_constant: tuple[int, int] | None = None

    def getter(env: Env, low: int, high: int) -> mx.array:
        nonlocal of_constant
        array: mx.array = env[place]
        if not mx.issubdtype(array.dtype, mx.integer):
            raise TypeError(f"indices are integers, got {array.dtype}")
        if not array.size:
            return array
        if not is_known or not (is_constant or env[-1].can_read(array)):
            confined: mx.array = env[-1].confined(array, low, high)
            return confined
        extent: tuple[int, int] = of_constant or env[-1].extent(array)
        of_constant = extent if is_constant else None
        check_extent(*extent, low, high)
        # With signed integers uint64 becomes a float.
        return array.astype(mx.int64) if array.dtype == mx.uint64 else array

    return getter


def check_extent(least: int, most: int, low: int, high: int) -> None:
    """Raise IndexError for indices outside of their bounds."""
    if least < low or most > high:
        raise IndexError(
            f"an index outside {low}..{high}: they go from {least} to {most} (a token id past the vocabulary, or a row"
            " past the step's tokens)"
        )


def dtype_of(scalar_type: int) -> mx.Dtype:
    """Return MLX's dtype for one of ExecuTorch's."""
    if scalar_type not in DTYPES:
        raise ValueError(f"unknown scalar type {scalar_type}")
    return DTYPES[scalar_type]


def in_float32(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Half precision is computed in float32 and rounded once, as in torch."""

    def run(x: mx.array) -> mx.array:
        return function(x.astype(mx.float32)).astype(x.dtype) if x.dtype in HALVES else function(x)

    return run


# -- row makers ---------------------------------------------------------------


def unary(function: Callable[[mx.array], mx.array]) -> Row:
    """One tensor in, one out."""

    def row(node: Node, at: At) -> Step:
        x, out = at(node.x), at(node.out)

        def step(env: Env) -> None:
            env[out] = function(env[x])

        return step

    return row


def binary(function: Callable[[Any, Any], Any]) -> Row:
    """Two tensors in, one out."""

    def row(node: Node, at: At) -> Step:
        a, b, out = at(node.a), at(node.b), at(node.out)

        def step(env: Env) -> None:
            env[out] = function(env[a], env[b])

        return step

    return row


def scalar_binary(function: Callable[[int, int], int]) -> Row:
    """Two integers, literals or values, to a value of 64 bits."""

    def row(node: Node, at: At) -> Step:
        a, b, out = get(node.a, at), get(node.b, at), at(node.out)

        def step(env: Env) -> None:
            result = function(a(env), b(env))
            if not -(2**63) <= result < 2**63:
                raise ValueError(f"{node.kind}: the result is {result}, expected 64 bits")
            env[out] = result

        return step

    return row


def fixed(make: Callable[[Node], Callable[[mx.array], mx.array]]) -> Row:
    """One tensor in, one out, everything else fixed when the program is compiled."""

    def row(node: Node, at: At) -> Step:
        return unary(make(node))(node, at)

    return row


def along(function: Callable[[mx.array, int], mx.array]) -> Row:
    """One tensor in, one out, along the node's axis. A scalar is taken for a vector of one element, as in torch."""

    def row(node: Node, at: At) -> Step:
        axis = node.axis

        def run(x: mx.array) -> mx.array:
            return function(x, axis) if x.ndim else function(x.reshape(1), 0).reshape(())

        return unary(run)(node, at)

    return row


def with_ints(field: str, function: Callable[[mx.array, tuple[int, ...]], mx.array]) -> Row:
    """One tensor and a field of integers, literals or values, in; one tensor out."""

    def row(node: Node, at: At) -> Step:
        x, out, integers = at(node.x), at(node.out), get_ints(getattr(node, field), at)

        def step(env: Env) -> None:
            env[out] = function(env[x], integers(env))

        return step

    return row


def joined(function: Callable[..., mx.array]) -> Row:
    """A list of tensors in, one out, along the node's axis."""

    def row(node: Node, at: At) -> Step:
        tensors, out, axis = [at(tensor) for tensor in node.tensors], at(node.out), node.axis

        def step(env: Env) -> None:
            env[out] = function([env[tensor] for tensor in tensors], axis=axis)

        return step

    return row
