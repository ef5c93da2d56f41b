"""Products of one operand with several weights, made one when a program is loaded.

A transformer's queries, keys and values are three products of the same rows, and so are the two of a gated MLP: one
product with the weights side by side does the same work in fewer calls, each with more to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..program import Graph, Node, SlotType, TensorMeta, Tid
from ..program.verify import static_shape
from .device import mx
from .expand import Expansion, Factor


class Part(NamedTuple):
    """Columns ``[start, stop)`` of a product, and where they go."""

    out: Tid
    start: int
    stop: int


@dataclass(frozen=True)
class Product:
    """Several products of one operand.

    Attributes:
        x: the operand.
        parts: the results.
        weight: [columns, rows], the parts' one after the other.
        bias: [columns], or None.
        dtype: of weights that were expanded, the dtype that their parameters had; None of others.
    """

    x: Tid
    parts: tuple[Part, ...]
    weight: mx.array
    bias: mx.array | None
    dtype: mx.Dtype | None


@dataclass(frozen=True)
class Fusion:
    """What is computed at once.

    Attributes:
        products: by the id of the first instruction that each takes the place of.
        unused: ids of the other instructions that are not run.
    """

    products: dict[int, Product]
    unused: frozenset[int]


class _Linear(NamedTuple):
    """A product with a constant weight."""

    node: Node
    x: Tid
    weight: Tid | None  # [columns, rows]; None of one that was expanded
    bias: Tid | None
    turn: Node | None  # the instruction that transposes the weight


def fuse(
    graph: Graph,
    constants: MutableMapping[int, mx.array],
    expansion: Expansion | None,
    shared: MutableMapping[tuple[Any, ...], mx.array],
) -> Fusion:
    """Put weights side by side.

    Args:
        graph: the program.
        constants: its constants, by slot; those that fused products read are taken out, so that a weight is in memory
            twice only while it is copied.
        expansion: its weights that are expanded, where there are such; they are taken out likewise.
        shared: what other programs have put together, by the constants' names; new ones are added.
    """
    nodes = graph.instruction_chains[graph.main_chain_idx].instructions
    every = [node for chain in graph.instruction_chains for node in chain.instructions]
    writes = Counter(slot for node in every for name, slot in node.slots() if node.writes(name))
    writes.update(Tid(entry.idx) for entry in graph.input_map if entry.slot_type == SlotType.TensorSlot)
    reads = Counter(slot for node in every for name, slot in node.slots() if not node.writes(name))
    reads.update(Tid(entry.idx) for entry in graph.output_map if entry.slot_type == SlotType.TensorSlot)
    names = {named.slot.idx: named.name for named in graph.named_slots}
    factors: dict[int, Factor] = {} if expansion is None else expansion.factors
    turns = {
        node.out: node
        for node in nodes
        if node.kind == "TransposeNode" and list(node.perm) == [1, 0] and node.x.idx in constants
    }

    groups: dict[Any, list[_Linear]] = defaultdict(list)
    for node in nodes:
        linear = _linear(graph, node, turns, constants, factors)
        if linear is None or writes[linear.x] != 1 or writes[node.out] != 1:
            continue
        if linear.turn is not None and (writes[linear.turn.out] != 1 or reads[linear.turn.out] != 1):
            continue
        if any(slot is not None and (writes[slot] or reads[slot] != 1) for slot in (linear.weight, linear.bias)):
            continue
        if linear.weight is None:
            kind: tuple[Any, ...] = (str(factors[id(node)].dtype),)
        else:
            weight = _meta(graph, linear.weight)
            bias_type = None if linear.bias is None else _meta(graph, linear.bias).scalar_type
            kind = weight.scalar_type, static_shape(linear.weight.idx, weight)[1], bias_type
        groups[linear.x, kind].append(linear)

    products: dict[int, Product] = {}
    unused: set[int] = set()
    for group in groups.values():
        if len(group) < 2:
            continue
        key = (
            "side by side",
            *(factors[id(it.node)].key if it.weight is None else names[it.weight.idx] for it in group),
        )
        bias_key = ("side by side", *(names[it.bias.idx] for it in group if it.bias is not None))
        dtype = factors[id(group[0].node)].dtype if group[0].weight is None else None
        widths = [_width(linear, graph, factors) for linear in group]
        whole, bias = shared.get(key), shared.get(bias_key)
        if whole is None:
            weights = [
                factors[id(linear.node)].weight if linear.weight is None else constants[linear.weight.idx]
                for linear in group
            ]
            whole = shared[key] = mx.concatenate(weights)
            mx.eval(whole)
            del weights
        if bias is None and group[0].bias is not None:
            biases = [constants[linear.bias.idx] for linear in group if linear.bias is not None]
            bias = shared[bias_key] = mx.concatenate(biases)
            mx.eval(bias)
        for linear in group:
            factors.pop(id(linear.node), None)
            for slot in (linear.weight, linear.bias):
                if slot is not None:
                    del constants[slot.idx]
        stops = [sum(widths[: index + 1]) for index in range(len(widths))]
        products[id(group[0].node)] = Product(
            x=group[0].x,
            parts=tuple(
                Part(linear.node.out, stop - width, stop)
                for linear, width, stop in zip(group, widths, stops, strict=True)
            ),
            weight=whole,
            bias=bias,
            dtype=dtype,
        )
        unused |= {id(linear.node) for linear in group[1:]}
        unused |= {id(linear.turn) for linear in group if linear.turn is not None}
    return Fusion(products, frozenset(unused))


def _width(linear: _Linear, graph: Graph, factors: dict[int, Factor]) -> int:
    """Return the columns of a product."""
    if linear.weight is None:
        return int(factors[id(linear.node)].weight.shape[0])
    return static_shape(linear.weight.idx, _meta(graph, linear.weight))[0]


def _meta(graph: Graph, constant: Tid) -> TensorMeta:
    """Return a constant's description: one that is not needed itself is never imported."""
    meta = graph.tensor_meta[constant.idx]
    assert meta is not None, "the verifier has checked that constants are described"
    return meta


def _linear(
    graph: Graph, node: Node, turns: dict[Tid, Node], constants: MutableMapping[int, mx.array], factors: Any
) -> _Linear | None:
    """Return an instruction as a product with a constant weight, where it is one."""
    if id(node) in factors:
        factor = factors[id(node)]
        return _Linear(node, node.x, None, None, None) if factor.is_transposed and factor.weight.ndim == 2 else None
    if node.kind != "AddmmNode" or node.alpha != 1.0 or node.beta != 1.0 or node.mat2 not in turns:
        return None
    bias = node.bias
    if bias is not None and (bias.idx not in constants or len(_meta(graph, bias).shape) != 1):
        return None
    turn = turns[node.mat2]
    return _Linear(node, node.mat1, turn.x, bias, turn)
