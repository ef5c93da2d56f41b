"""Fuses rotary position embedding (the half-split form, https://arxiv.org/abs/2104.09864).

Before, per layer, with cos and sin computed once from positions and inverse frequencies::

    add(mul(x, cos), mul(cat([neg(x[..., D/2:]), x[..., :D/2]], -1), sin))

After::

    rope(x, position, freqs)        freqs = 1 / inverse frequencies

How the angles are written down differs between models, so they are evaluated: at each position they must be the
position times one row of frequencies, repeated in both halves, and cos and sin must be unscaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ..graph import (
    ancestors,
    arguments,
    aten,
    flat_positions,
    is_call,
    is_plain_add,
    remove_dead_code,
    replace,
    shape_of,
    through_casts,
)
from .evaluate import NotEvaluableError, constants_of, evaluate

_SHAPES = (aten.unsqueeze.default, aten.unsqueeze_copy.default, aten.view.default, aten.view_copy.default)
# Each on its own: a table that looks at the positions of the whole step must not pass.
_PROBED = ((0, 1, 2, 3, 17, 1000), (5000, 40_000), (200_000, 1 << 20))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.library.custom_op("executorch_mlx::rope", mutates_args=())
def rope(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate each token's heads by its own position.

    Args:
        x: [1, H, n, D].
        position: [n], integers.
        freqs: [D / 2], the reciprocal of the inverse frequencies, float32.

    Returns:
        [1, H, n, D], halves rotated against each other.
    """
    angles = position[:, None].float() / freqs
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@rope.register_fake
def _(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class _Angles:
    position: Node
    inverse_frequencies: torch.Tensor


def fuse_rope(program: ExportedProgram) -> None:
    """Replace each match, in place; the frequencies become lifted constants of the program."""
    tables = _Tables(program)
    for node in list(program.graph.nodes):
        match = _match(node)
        if match is None:
            continue
        x, cos, sin = match
        angles = tables.angles(cos, sin)
        if angles is None or not _fits(node, x, (cos, sin), angles):
            continue
        replace(program, node, rope._opoverload, (x, tables.positions(angles), tables.constant(angles)))
    remove_dead_code(program.graph_module)


def _match(node: Node) -> tuple[Node, Node, Node] | None:
    """Return (x, cos, sin) if a node adds the two halves of a rotation."""
    if not is_plain_add(node) or len(node.args) < 2:
        return None
    for direct, turned in (node.args, reversed(node.args)):
        if not (is_call(direct, aten.mul.Tensor) and is_call(turned, aten.mul.Tensor)):
            continue
        for x, cos in (direct.args, reversed(direct.args)):
            for rotated, sin in (turned.args, reversed(turned.args)):
                if isinstance(x, Node) and isinstance(cos, Node) and _is_rotation(rotated, x) and len(shape_of(x)) == 4:
                    return x, cos, sin
    return None


def _fits(node: Node, x: Node, tables: tuple[Node, Node], angles: _Angles) -> bool:
    """Whether the kernel computes the same: x is [1, H, n, D] with the tables' tokens on n, and keeps its dtype."""
    shape, tokens = shape_of(x), angles.position.meta["val"].shape[-1]
    dtype = x.meta["val"].dtype
    return (
        shape[0] == 1
        and shape[2] == tokens
        and shape[3] == 2 * len(angles.inverse_frequencies)
        and all(shape_of(table)[-2] == tokens for table in tables)
        and dtype in _DTYPES
        and node.meta["val"].dtype == dtype
    )


def _is_rotation(node: Any, x: Node) -> bool:
    """Whether a node is cat([-x[..., D/2:], x[..., :D/2]], -1)."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    rank, half = len(shape_of(x)), int(shape_of(x)[-1]) // 2
    if len(node.args) < 2 or node.args[1] not in (-1, rank - 1):
        return False
    negated, kept = node.args[0]
    if not is_call(negated, aten.neg.default):
        return False
    return _is_slice(negated.args[0], x, half, 2 * half) and _is_slice(kept, x, 0, half)


def _is_slice(node: Any, x: Node, start: int, stop: int) -> bool:
    if not is_call(node, aten.slice.Tensor, aten.slice_copy.Tensor) or node.args[0] is not x:
        return False
    rank, size = len(shape_of(x)), int(shape_of(x)[-1])
    given = arguments(node)
    first, last = given["start"] or 0, size if given["end"] is None else given["end"]
    is_constant = isinstance(first, int) and isinstance(last, int)
    return (
        is_constant
        and given["dim"] in (-1, rank - 1)
        and given["step"] == 1
        and (first, min(last, size)) == (start, stop)
    )


class _Tables:
    """Finds the angles behind cos and sin tables, each once: all layers of a kind share them."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._constants = constants_of(program)
        self._found: dict[tuple[Node, Node], _Angles | None] = {}
        self._lifted: dict[int, Node] = {}

    def angles(self, cos: Node, sin: Node) -> _Angles | None:
        """Return what a pair of tables stands for, or None where it is no plain rotation by position."""
        key = tuple(through_casts(node, also=_SHAPES) for node in (cos, sin))
        if key not in self._found:
            self._found[key] = self._evaluate(cos, sin)
        return self._found[key]

    def _evaluate(self, cos: Node, sin: Node) -> _Angles | None:
        inputs = {
            node
            for table in (cos, sin)
            for node in ancestors(table)
            if node.op == "placeholder" and node.name not in self._constants
        }
        if len(inputs) != 1:
            return None
        (position,) = inputs
        shape = shape_of(position)
        if len(shape) > 2 or (len(shape) == 2 and shape[0] != 1):
            return None
        for frequencies in self._candidates(cos, int(shape_of(cos)[-1]) // 2):
            if all(self._agree(cos, sin, position, probed, frequencies) for probed in _PROBED):
                return _Angles(position, frequencies)
        return None

    def _agree(self, cos: Node, sin: Node, position: Node, probed: tuple[int, ...], frequencies: torch.Tensor) -> bool:
        """Whether both tables are what these frequencies give, at these positions."""
        given = torch.tensor(probed, dtype=position.meta["val"].dtype)
        feeds = {**self._constants, position.name: given.reshape([1] * (len(shape_of(position)) - 1) + [-1])}
        angles = given[:, None].float() * frequencies
        for node, half in ((cos, angles.cos()), (sin, angles.sin())):
            try:
                value = evaluate(node, feeds)
            except (NotEvaluableError, RuntimeError):
                return False
            expected = torch.cat([half, half], dim=-1).to(value.dtype)
            if value.numel() != expected.numel() or not torch.equal(value.reshape(expected.shape), expected):
                return False
        return True

    def _candidates(self, cos: Node, half: int) -> Iterator[torch.Tensor]:
        """Yield what could be the inverse frequencies: each vector of D/2 in the table's graph that is constant."""
        for node in ancestors(cos):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.numel() == half and value.is_floating_point():
                try:
                    yield evaluate(node, self._constants).detach().float().reshape(-1)
                except NotEvaluableError:
                    continue

    def positions(self, angles: _Angles) -> Node:
        """Return the positions as [n]."""
        return flat_positions(angles.position)

    def constant(self, angles: _Angles) -> Node:
        """Return a placeholder for the reciprocal frequencies, lifted into the program once."""
        key = id(angles)
        if key not in self._lifted:
            name = f"rope_freqs_{len(self._lifted)}"
            self._lifted[key] = lift_constant(self._program, name, 1.0 / angles.inverse_frequencies)
        return self._lifted[key]


def lift_constant(program: ExportedProgram, name: str, value: torch.Tensor) -> Node:
    """Add a tensor constant to a program and return its placeholder."""
    from torch.export.graph_signature import InputSpec, TensorArgument

    graph = program.graph_module.graph
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(first):
        node = graph.placeholder(name)
    fake_mode = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    node.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
    specs = program.graph_signature.input_specs
    specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name, None))
    program.constants[name] = value
    return node
