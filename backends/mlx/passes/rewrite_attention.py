"""Rewrites attention into ``update_and_attend``, so that the KV cache lies outside the program.

Before::

    sdpa(q, repeat(k), repeat(v), mask)           over the tokens of one call

After::

    update_and_attend(q, k, v, position, layer)   over the history in the cache's layer

The masks that models build follow from positions. Each is *evaluated*, and must equal the rule that the cache applies:
a query sees positions at or below its own, and above its own minus the window where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from executorch_mlx.extension.llm.cache.op import update_and_attend

from ..graph import (
    ancestors,
    aten,
    flat_positions,
    is_call,
    module_of,
    plain_copy,
    remove_dead_code,
    replace,
    shape_of,
    through_casts,
)
from .evaluate import NotEvaluableError, constants_of, evaluate

POSITION_NAMES = ("position", "positions", "position_ids", "input_pos", "cache_position")

# Masks are computed for so many consecutive positions from 0, and for so many around each of their constants.
_MANY_POSITIONS = 512
_FEW_POSITIONS = 48
# What a constant is shrunk to, to see whether it is the window: less than the few positions.
_PROBES = (3, 16, 24)


class AttentionNotRewritableError(ValueError):
    """An attention of the model cannot be served by a KV cache outside the program; the message says why."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"attention in {module} cannot be rewritten: {reason}")
        self.module = module
        self.reason = reason


@dataclass(frozen=True)
class AttentionLayer:
    """One cache that the rewritten program needs.

    Attributes:
        layer_id: its number, as in the program.
        module: path of the module it belongs to (the first one, where several share it).
        n_kv_heads: key and value heads.
        head_dim: elements of a key.
        v_head_dim: elements of a value.
        window: the sliding window, or None for full attention.
    """

    layer_id: int
    module: str
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


@dataclass(frozen=True)
class RewrittenProgram:
    """The program with its attention rewritten, and the caches it needs, by layer id."""

    program: ExportedProgram
    layers: tuple[AttentionLayer, ...]


def rewrite_attention(program: ExportedProgram, position: str | None = None) -> RewrittenProgram:
    """Replace every scaled dot product attention by ``update_and_attend``.

    Args:
        program: from ``torch.export``, with a dynamic token axis n and an integer input of positions, [n] or [1, n].
            It is not changed.
        position: name of that input; None looks for one of ``POSITION_NAMES``.

    Returns:
        The rewritten program and its caches. Layers that hand the same keys and values to attention share one.

    Raises:
        AttentionNotRewritableError: with the module and the reason.
        ValueError: no input of positions.
    """
    program = plain_copy(program)
    module = program.graph_module
    constants = constants_of(program)
    _refuse_dropped_sinks(program)
    position_node = _position_input(program, position)
    calls = [node for node in module.graph.nodes if is_call(node, aten.scaled_dot_product_attention.default)]
    _refuse_decomposed(module.graph.nodes)
    if not calls:
        raise AttentionNotRewritableError(
            "the model", "it calls no scaled_dot_product_attention; load it with attn_implementation='sdpa'"
        )
    windows = _Windows(program, position_node, constants)
    flat_position = flat_positions(position_node)
    layers: list[AttentionLayer] = []
    shared: dict[tuple[Node, Node], int] = {}
    for call in calls:
        attention = _Attention.of(call)
        window = windows.of(call, attention)
        layer_id = shared.setdefault((attention.k, attention.v), len(layers))
        described = attention.describe(layer_id, module_of(call), window)
        if layer_id == len(layers):
            layers.append(described)
        elif layers[layer_id].window != window:
            raise AttentionNotRewritableError(
                described.module,
                f"it shares keys and values with {layers[layer_id].module}, but their windows differ"
                f" ({layers[layer_id].window} and {window})",
            )
        operands = (attention.q, attention.k, attention.v, flat_position)
        arguments = (*operands, layer_id, attention.scale, attention.out_dtype)
        _allow_copies(replace(program, call, update_and_attend._opoverload, arguments))
    remove_dead_code(module)
    if all(is_call(user, update_and_attend._opoverload) for user in flat_position.users) and (
        flat_position is position_node or len(position_node.users) == 1
    ):
        raise AttentionNotRewritableError(
            "the model",
            f"nothing but its attention masks used the input {position_node.name!r}: its positional encoding does not"
            " follow the positions it is given",
        )
    program.validate()
    return RewrittenProgram(program, tuple(layers))


@dataclass(frozen=True)
class _Attention:
    """The operands of one attention call, heads not repeated."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    is_causal: bool
    scale: float
    out_dtype: torch.dtype

    @staticmethod
    def of(call: Node) -> _Attention:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        where, q = module_of(call), given["query"]
        if given.get("dropout_p", 0.0):
            raise AttentionNotRewritableError(where, f"dropout {given['dropout_p']}; put the model in eval mode")
        shape = shape_of(q)
        if len(shape) != 4 or shape[0] != 1:
            raise AttentionNotRewritableError(
                where,
                f"its queries have shape {list(shape)}; a step is flat on the token axis, [1, heads, n, dim]",
            )
        if isinstance(shape[2], int):
            raise AttentionNotRewritableError(
                where,
                f"the token axis is static (n = {shape[2]}); export with a dynamic one, of example size 2 or more",
            )
        if shape_of(given["key"])[2] != shape[2]:
            raise AttentionNotRewritableError(where, "it attends over other tokens than its own (cross attention)")
        scale = given.get("scale")
        return _Attention(
            q=q,
            k=_unrepeated(given["key"]),
            v=_unrepeated(given["value"]),
            mask=given.get("attn_mask"),
            is_causal=bool(given.get("is_causal", False)),
            scale=1.0 / math.sqrt(shape[3]) if scale is None else float(scale),
            out_dtype=call.meta["val"].dtype,
        )

    def describe(self, layer_id: int, module: str, window: int | None) -> AttentionLayer:
        _, heads, _, dim = shape_of(self.k)
        return AttentionLayer(layer_id, module, int(heads), int(dim), int(shape_of(self.v)[3]), window)


def _unrepeated(node: Node) -> Node:
    """Return the keys or values before their heads were repeated for grouped queries."""
    if is_call(node, aten.repeat_interleave.self_int) and node.args[2] in (1, -3):
        return node.args[0]
    current = node
    if is_call(current, aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        current = through_casts(current.args[0])
        if is_call(current, aten.expand.default):
            source = current.args[0]
            if is_call(source, aten.unsqueeze.default) and source.args[1] == 2 and len(shape_of(source)) == 5:
                return source.args[0]
    return node


def _allow_copies(attention: Node) -> None:
    """Let what follows an attention reshape its result: the op's memory layout need not be the one that was traced."""
    pending = list(attention.users)
    while pending:
        node = pending.pop()
        if is_call(node, aten.view.default):
            node.target = aten.reshape.default
        if is_call(node, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor):
            pending += node.users


# -- inputs -------------------------------------------------------------------


def _user_inputs(program: ExportedProgram) -> dict[str, Node]:
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return {name: by_name[name] for name in names if name in by_name}


def _position_input(program: ExportedProgram, name: str | None) -> Node:
    inputs = _user_inputs(program)
    wanted = POSITION_NAMES if name is None else (name,)
    for candidate in wanted:
        if candidate in inputs:
            node = inputs[candidate]
            value = node.meta["val"]
            flat = value.ndim == 1 or (value.ndim == 2 and value.shape[0] == 1)
            if not flat or value.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"input {candidate!r}: expected int32 or int64 positions [n] or [1, n], got {value.dtype}"
                    f" {list(value.shape)}"
                )
            return node
    raise ValueError(f"no input of positions: expected one of {', '.join(wanted)} among {', '.join(inputs)}")


# -- refusals -----------------------------------------------------------------


def _refuse_dropped_sinks(program: ExportedProgram) -> None:
    for placeholder, target in program.graph_signature.inputs_to_parameters.items():
        node = next(node for node in program.graph.nodes if node.name == placeholder)
        if target.rsplit(".", 1)[-1] == "sinks" and not node.users:
            raise AttentionNotRewritableError(
                target.rsplit(".", 1)[0], "its attention sinks were dropped when it was exported with SDPA"
            )


def _refuse_decomposed(nodes: Iterable[Node]) -> None:
    """Refuse a softmax over scores of tokens by tokens: attention that was written out."""
    for node in nodes:
        if is_call(node, aten.softmax.int, aten._softmax.default, aten._safe_softmax.default):
            shape = shape_of(node)
            if len(shape) >= 3 and not isinstance(shape[-1], int) and not isinstance(shape[-2], int):
                raise AttentionNotRewritableError(
                    module_of(node),
                    "it is written out as matmul and softmax; load the model with attn_implementation='sdpa'",
                )


# -- masks --------------------------------------------------------------------


class _Windows:
    """Finds which window a mask stands for; models share one mask among the layers of a kind.

    A mask is computed, as it is, for many consecutive positions from 0, and for some around each of its constants:
    there it must be causal within one window. A window wider than that shows when its constant is shrunk: the mask must
    then be causal within a window that follows the constant. A constant whose shrinking does anything else is not
    understood, and the mask is refused.
    """

    def __init__(self, program: ExportedProgram, position: Node, constants: dict[str, Any]) -> None:
        self._position = position
        self._inputs = _user_inputs(program)
        self._constants = constants
        self._found: dict[Node, int | None] = {}

    def of(self, call: Node, attention: _Attention) -> int | None:
        mask, where = attention.mask, module_of(call)
        if mask is None:
            if not attention.is_causal:
                raise AttentionNotRewritableError(where, "it has no mask and is not causal: each token sees later ones")
            return None
        if attention.is_causal:
            raise AttentionNotRewritableError(where, "it has a mask and is_causal; only one of them can be meant")
        if mask not in self._found:
            self._found[mask] = self._window(mask, where)
        return self._found[mask]

    def _window(self, mask: Node, where: str) -> int | None:
        not_understood = AttentionNotRewritableError(
            where, "its mask is neither causal nor causal within a sliding window of constant width"
        )
        try:
            visible = self._visible(mask, where, range(_MANY_POSITIONS))
        except (RuntimeError, IndexError):
            # A mask kept in a buffer may be no larger than the model's context.
            visible = self._visible(mask, where, range(_FEW_POSITIONS))
        window = _window_of(visible)
        if window is None:
            raise not_understood
        numbers = self._numbers(mask)
        if window == len(visible):
            window = self._far_window(mask, where, numbers, range(window), not_understood)
        for number in numbers:
            start = max(0, abs(number) - _FEW_POSITIONS // 2)
            try:
                visible = self._visible(mask, where, range(start, start + _FEW_POSITIONS))
            except (RuntimeError, IndexError):
                continue
            if _window_of(visible) != min(window or _FEW_POSITIONS, _FEW_POSITIONS):
                raise not_understood
        return window

    def _far_window(
        self,
        mask: Node,
        where: str,
        numbers: Iterable[int],
        positions: range,
        not_understood: AttentionNotRewritableError,
    ) -> int | None:
        """Find a window that reaches past the computed positions: shrink each constant and see whether it follows."""
        found: set[int] = set()
        for number in numbers:
            windows = []
            for probe in _PROBES:
                replacement = probe if number > 0 else -probe
                try:
                    visible = self._visible(mask, where, positions, {number: replacement})
                except (RuntimeError, IndexError):
                    continue  # not a number but a size: the graph does not run with another one
                windows.append((probe, _window_of(visible)))
            if all(window == len(positions) for _, window in windows):
                continue
            offsets = {window - probe if window is not None else None for probe, window in windows}
            if len(offsets) != 1 or None in offsets or len(windows) < len(_PROBES):
                raise not_understood
            found.add(abs(number) + cast("int", offsets.pop()))
        if len(found) > 1:
            raise not_understood
        return found.pop() if found else None

    def _numbers(self, mask: Node) -> list[int]:
        """Whole numbers of the mask's graph that could set how far it reaches."""
        found: set[int] = set()

        def collect(value: Any) -> Any:
            is_whole = type(value) is int or (type(value) is float and value.is_integer())
            if is_whole and max(_PROBES) < abs(value) < 2**62:
                found.add(int(value))
            return value

        for node in ancestors(mask):
            torch.fx.node.map_aggregate((node.args, node.kwargs), collect)
            value = self._constants.get(node.name) if node.op == "placeholder" else None
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool:
                collect(value.item())
        return sorted(found)

    def _visible(
        self, mask: Node, where: str, positions: range, replaced: dict[int, int] | None = None
    ) -> torch.Tensor:
        """Compute the mask for consecutive positions; bool [n, n], True where a query sees a key."""
        replaced = replaced or {}
        feeds = {**self._constants, **self._feeds(mask, where, positions)}
        try:
            value = evaluate(mask, feeds, lambda number: replaced.get(number, number))
        except NotEvaluableError as error:
            raise AttentionNotRewritableError(where, f"its mask depends on {error}") from None
        if value.dtype is not torch.bool:
            hidden = value == -math.inf
            if not bool((hidden | (value == 0)).all()):
                raise AttentionNotRewritableError(
                    where, "its mask adds a bias to the scores (such as ALiBi); only 0 and -inf can be expressed"
                )
            value = ~hidden
        n = len(positions)
        if value.ndim > 2 and any(size != 1 for size in value.shape[:-2]):
            raise AttentionNotRewritableError(where, f"its mask differs between heads or batches: {list(value.shape)}")
        return value.reshape(value.shape[-2:]).expand(n, n)

    def _feeds(self, mask: Node, where: str, positions: range) -> dict[str, Any]:
        """Give the positions and, to inputs whose shape alone is used, zeros of the right size."""
        n = len(positions)
        symbol = self._position.meta["val"].shape[-1]
        feeds: dict[str, Any] = {}
        within = set(ancestors(mask))
        for name, node in self._inputs.items():
            value = node.meta["val"]
            if node is self._position:
                given = torch.arange(positions.start, positions.stop, dtype=value.dtype)
                feeds[name] = given.reshape([n] if value.ndim == 1 else [1, n])
                continue
            readers = [user for user in node.users if user in within]
            if any(not is_call(user, aten.sym_size.int) for user in readers):
                raise AttentionNotRewritableError(
                    where, f"its mask depends on the input {name!r}, not on positions alone"
                )
            if readers:
                sizes = [n if size == symbol else 2 if not isinstance(size, int) else size for size in value.shape]
                feeds[name] = torch.zeros(sizes, dtype=value.dtype)
        return feeds


def _window_of(visible: torch.Tensor) -> int | None:
    """Return the window of a square visibility matrix (its size where it is plainly causal), or None if it has none."""
    n = visible.shape[0]
    window = int(visible[-1].sum())
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    expected = (distance >= 0) & (distance < window)
    return window if window > 0 and torch.equal(visible, expected) else None
