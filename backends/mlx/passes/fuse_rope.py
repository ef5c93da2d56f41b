"""Fuses rotary position embedding (https://arxiv.org/abs/2104.09864).

Before, per layer, in one of three forms; cos, sin and cis = cos + i sin come from positions and inverse frequencies::

    x * cos + cat([-x[..., D/2:], x[..., :D/2]], -1) * sin                                halves
    x * cos + flatten(stack([-x[..., 1::2], x[..., ::2]], -1), -2) * sin                  neighbours
    flatten(view_as_real(view_as_complex(reshape(x, [..., D/2, 2])) * cis), -2)           neighbours

After::

    rope(x, position, freqs, traditional)       freqs = 1 / inverse frequencies; traditional turns neighbours

and, where cos and sin are both scaled by one number s, a multiplication by s. Casts to float32 and back around it go.
Where the tables fit x as [1, n, H, D], it is transposed before and after.

How the tables are written down differs between models, so they are evaluated. The angles at positions 1, 2, 4, ... tell
the frequencies, and cos at position 0 is s; then the tables must be s * cos and s * sin of position * frequencies at
probed positions. They must equal them bit for bit, rounded to the tables' dtype, but within 1e-6 * s where they are
complex, or can be evaluated at small positions only: tables kept as constants, whose frequencies come out rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import (
    ancestors,
    arguments,
    aten,
    flat_positions,
    is_call,
    is_plain_add,
    lift_constant,
    remove_dead_code,
    replace,
    shape_of,
    through_casts,
)
from .evaluate import NotEvaluableError, constants_of, evaluate

_RESHAPES = (
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.reshape.default,
    aten.view.default,
    aten.view_copy.default,
)
# What keeps the order of a table's elements.
_SHAPES = (*_RESHAPES, aten.unsqueeze.default, aten.unsqueeze_copy.default)
# Each on its own: a table that looks at the positions of the whole step must not pass.
_PROBED = ((0, 1, 2, 3, 17, 1000), (5000, 40_000), (200_000, 1 << 20))
_NEGATIVE = (-1, -1000)
_FARTHEST = 1 << 30  # positions may be 32 bits wide
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.library.custom_op("executorch_mlx::rope", mutates_args=())
def rope(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor, traditional: bool = False) -> torch.Tensor:
    """Rotate each token's heads by its own position.

    Args:
        x: [1, H, n, D].
        position: [n], integers.
        freqs: [D / 2], the reciprocal of the inverse frequencies, float32.
        traditional: whether neighbours are rotated against each other, instead of halves.

    Returns:
        [1, H, n, D].
    """
    angles = position[:, None].float() / freqs
    cos, sin = angles.cos(), angles.sin()
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if traditional else wide.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, dim=-1).flatten(-2) if traditional else torch.cat(rotated, dim=-1)
    return joined.to(x.dtype)


@rope.register_fake
def _(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor, traditional: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class _Rotation:
    """A match: what is rotated, and by which tables: cos and sin, or cis alone."""

    x: Node
    tables: tuple[Node, ...]
    traditional: bool


@dataclass(frozen=True)
class _Angles:
    """What tables stand for: ``scale`` times cos and sin of positions times frequencies [D / 2], float32."""

    position: Node
    inverse_frequencies: torch.Tensor
    scale: float


def fuse_rope(program: ExportedProgram) -> None:
    """Replace each match, in place; the frequencies become lifted constants of the program."""
    tables = _Tables(program)
    # Backwards: a cast that ends a match comes before what it casts, which then has no users.
    for node in reversed(list(program.graph.nodes)):
        rotation = _match(through_casts(node)) if node.users else None
        angles = None if rotation is None else tables.angles(rotation)
        if rotation is None or angles is None:
            continue
        x, axis = _operand(node, rotation), _token_axis(rotation, angles)
        if x is not None and axis is not None:
            _rewrite(program, node, x, axis, angles, tables.constant(angles), rotation.traditional)
    remove_dead_code(program.graph_module)


def _rewrite(
    program: ExportedProgram, old: Node, x: Node, axis: int, angles: _Angles, freqs: Node, traditional: bool
) -> None:
    """Put a chain of calls in a node's place, each taking the one before."""
    swap = (aten.transpose.int, (1, 2))
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (rope._opoverload, (flat_positions(angles.position), freqs, traditional))
    ]
    if axis == 1:
        calls = [swap, *calls, swap]
    if angles.scale != 1:
        calls.append((aten.mul.Tensor, (angles.scale,)))
    *inner, (last, rest) = calls
    for target, arguments_ in inner:
        value = x.meta["val"]
        with old.graph.inserting_before(old):
            x = old.graph.call_function(target, (x, *arguments_))
        x.meta = {**old.meta, "val": value.transpose(1, 2) if target is swap[0] else value}
    replace(program, old, last, (x, *rest))


# -- matches ------------------------------------------------------------------


def _match(node: Node) -> _Rotation | None:
    rotation = _match_sum(node) or _match_complex(node)
    return rotation if rotation is not None and len(shape_of(rotation.x)) == 4 else None


def _match_sum(node: Node) -> _Rotation | None:
    """Match x * cos + turned(x) * sin."""
    if not is_plain_add(node) or len(node.args) < 2:
        return None
    for direct, turned in (node.args, reversed(node.args)):
        if not (is_call(direct, aten.mul.Tensor) and is_call(turned, aten.mul.Tensor)):
            continue
        for x, cos in (direct.args, reversed(direct.args)):
            for rotated, sin in (turned.args, reversed(turned.args)):
                if all(isinstance(operand, Node) for operand in (x, cos, rotated, sin)):
                    traditional = _turning(through_casts(rotated), through_casts(x))
                    if traditional is not None:
                        return _Rotation(x, (cos, sin), traditional)
    return None


def _turning(node: Node, x: Node) -> bool | None:
    """Return whether a node is x with its neighbours turned (True) or its halves (False), None if neither."""
    size = shape_of(x)[-1] if shape_of(x) else None
    if not isinstance(size, int):
        return None
    traditional = is_call(node, *_RESHAPES) and _are_same(shape_of(node), shape_of(x))
    if traditional:
        node, target, axis, parts = node.args[0], aten.stack.default, len(shape_of(x)), ((1, size, 2), (0, size, 2))
    else:
        target, axis, parts = aten.cat.default, len(shape_of(x)) - 1, ((size // 2, size, 1), (0, size // 2, 1))
    if not is_call(node, target) or len(node.args[0]) != 2 or arguments(node)["dim"] not in (-1, axis):
        return None
    negated, kept = node.args[0]
    is_turned = (
        is_call(negated, aten.neg.default)
        and _is_slice(negated.args[0], x, *parts[0])
        and _is_slice(kept, x, *parts[1])
    )
    return traditional if is_turned else None


def _is_slice(node: Node, x: Node, start: int, stop: int, step: int) -> bool:
    """Whether a node is x[..., start:stop:step]."""
    if not is_call(node, aten.slice.Tensor, aten.slice_copy.Tensor) or through_casts(node.args[0]) is not x:
        return False
    rank, size = len(shape_of(x)), int(shape_of(x)[-1])
    given = arguments(node)
    first, last = given["start"] or 0, size if given["end"] is None else given["end"]
    is_constant = isinstance(first, int) and isinstance(last, int)
    return (
        is_constant
        and given["dim"] in (-1, rank - 1)
        and (first, min(last, size), given["step"]) == (start, stop, step)
    )


def _match_complex(node: Node) -> _Rotation | None:
    """Match the product of x's neighbours, as complex numbers, with a table."""
    if not is_call(node, *_RESHAPES) or not is_call(node.args[0], aten.view_as_real.default):
        return None
    product = node.args[0].args[0]
    if not is_call(product, aten.mul.Tensor):
        return None
    for numbers, table in (product.args, reversed(product.args)):
        if not is_call(numbers, aten.view_as_complex.default) or not isinstance(table, Node):
            continue
        pairs = through_casts(numbers.args[0])
        x = pairs.args[0] if is_call(pairs, *_RESHAPES) else None
        if x is None:
            continue
        *outer, size = shape_of(x)
        if _are_same(shape_of(node), (*outer, size)) and _are_same(shape_of(pairs), (*outer, size // 2, 2)):
            return _Rotation(x, (table,), True)
    return None


def _operand(node: Node, rotation: _Rotation) -> Node | None:
    """Return what to rotate: of the result's dtype, as the kernel keeps it."""
    for x in (through_casts(rotation.x), rotation.x):
        if node.meta["val"].dtype == x.meta["val"].dtype and x.meta["val"].dtype in _DTYPES:
            return x
    return None


def _token_axis(rotation: _Rotation, angles: _Angles) -> int | None:
    """Return which axis of x the tables' tokens meet: 2 of [1, H, n, D], 1 of [1, n, H, D]; None for another."""
    shape, tokens = shape_of(rotation.x), angles.position.meta["val"].shape[-1]
    if not _are_same((shape[0], shape[3]), (1, 2 * len(angles.inverse_frequencies))):
        return None
    for axis in (2, 1):
        # A table's last axis is D; axes between the tokens and it are of size 1.
        between = [1] * (2 - axis)
        ends = [shape_of(table)[axis - 4 : -1] for table in rotation.tables]
        if all(_are_same(end, (tokens, *between)) for end in ((shape[axis], *between), *ends)):
            return axis
    return None


def _are_same(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Compare shapes; a dynamic size is another where it is so always, and no guard comes of it."""
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


# -- tables -------------------------------------------------------------------


class _Tables:
    """Finds the angles behind tables, each once: all layers of a kind share them."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._constants = constants_of(program)
        self._found: dict[tuple[Node | bool, ...], _Angles | None] = {}
        self._lifted: dict[bytes, Node] = {}

    def angles(self, rotation: _Rotation) -> _Angles | None:
        """Return what a match's tables stand for, or None where they do not rotate by position."""
        tables = tuple(through_casts(table, also=_SHAPES) for table in rotation.tables)
        key = (*tables, rotation.traditional)
        if key not in self._found:
            self._found[key] = self._evaluate(tables, rotation.traditional)
        return self._found[key]

    def constant(self, angles: _Angles) -> Node:
        """Return a placeholder for the reciprocal frequencies, lifted into the program once."""
        freqs = 1.0 / angles.inverse_frequencies
        key = freqs.numpy().tobytes()
        if key not in self._lifted:
            self._lifted[key] = lift_constant(self._program, f"rope_freqs_{len(self._lifted)}", freqs)
        return self._lifted[key]

    def _evaluate(self, tables: tuple[Node, ...], traditional: bool) -> _Angles | None:
        inputs = {
            node
            for table in tables
            for node in ancestors(table)
            if node.op == "placeholder" and node.name not in self._constants
        }
        if len(inputs) != 1:
            return None
        (position,) = inputs
        shape = shape_of(position)
        if not (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)):
            return None
        if position.meta["val"].dtype not in (torch.int32, torch.int64):
            return None
        angles, reach = self._derived(tables, position, traditional)
        if angles is None or not angles.scale > 0:
            return None
        is_exact = len(tables) == 2 and reach == _FARTHEST
        # A table that is looked up has no places before the first.
        for group in (*_PROBED, *([_NEGATIVE] if reach == _FARTHEST else [])):
            places = tuple(place for place in group if place <= reach)
            if places and not self._agree(
                tables, places, angles, traditional, 0.0 if is_exact else 1e-6 * angles.scale
            ):
                return None
        return angles

    def _derived(self, tables: tuple[Node, ...], position: Node, traditional: bool) -> tuple[_Angles | None, int]:
        """Return the angles that the tables have at powers of two, and the last of these.

        Such a position times a frequency is exact in floats, so each doubling halves the error of a frequency: the
        whole turns that it leaves open follow from the one before. Casts are left out; ``_agree`` makes them.
        """
        origin = self._values(tables, position, (0,), casts=False)
        frequencies, reach = None, 1
        while reach <= _FARTHEST and (values := self._values(tables, position, (reach,), casts=False)) is not None:
            cos, sin = (value[0].double() for value in values)
            angle = torch.atan2(sin, cos)
            guess = torch.zeros_like(angle) if frequencies is None else frequencies * reach
            frequencies = (angle + math.tau * ((guess - angle) / math.tau).round()) / reach
            reach *= 2
        if origin is None or frequencies is None:
            return None, 0
        if len(tables) == 2:
            frequencies = frequencies[::2] if traditional else frequencies[: len(frequencies) // 2]
        return _Angles(position, frequencies.float(), float(origin[0][0, 0])), reach // 2

    def _values(
        self, tables: tuple[Node, ...], position: Node, places: tuple[int, ...], *, casts: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cos and sin at some positions, each [len(places), D], or [len(places), D / 2] of complex ones."""
        given = torch.tensor(places, dtype=position.meta["val"].dtype)
        feeds = {**self._constants, position.name: given.reshape([1] * (len(shape_of(position)) - 1) + [-1])}
        try:
            values = [evaluate(table, feeds, casts=casts).reshape(len(places), -1) for table in tables]
        except (NotEvaluableError, RuntimeError, IndexError):
            return None
        if len(values) == 1:
            return (values[0].real, values[0].imag) if values[0].is_complex() else None
        return None if any(value.is_complex() for value in values) else (values[0], values[1])

    def _agree(
        self, tables: tuple[Node, ...], places: tuple[int, ...], angles: _Angles, traditional: bool, tolerance: float
    ) -> bool:
        """Whether both tables are what these angles give, at these positions, in the tables' own dtype."""
        values = self._values(tables, angles.position, places, casts=True)
        if values is None:
            return False
        half = torch.tensor(places)[:, None].float() * angles.inverse_frequencies
        if len(tables) == 2:
            half = half.repeat_interleave(2, dim=-1) if traditional else torch.cat([half, half], dim=-1)
        return all(
            value.shape == table.shape
            and bool(((value - (table * angles.scale).to(value.dtype)).abs() <= tolerance).all())
            for value, table in zip(values, (half.cos(), half.sin()), strict=True)
        )
