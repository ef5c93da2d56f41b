"""Quantized weights expanded to float32 when a program is loaded.

MLX's products with quantized weights are made for GPUs; on a CPU they are many times slower than those of float32,
which go to the BLAS (docs/benchmarks.md). Expanded, a weight takes four bytes per number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..program import Graph, Node, ProgramError, Tid
from .device import DTYPES, MEMORY_BYTES, mx


class Factor(NamedTuple):
    """A quantized product's weight in float32.

    Attributes:
        weight: [rows, columns], or the other way round.
        is_transposed: whether it is the other way round.
        dtype: the dtype that its parameters had.
        key: what programs share it by.
    """

    weight: mx.array
    is_transposed: bool
    dtype: mx.Dtype
    key: tuple[Any, ...]


@dataclass(frozen=True)
class Expansion:
    """What is computed otherwise than the program says.

    Attributes:
        factors: weights, by the id of the instruction that multiplies with them.
        unused: ids of instructions whose results nothing reads now.
        constants: the constants that are still read, by slot.
    """

    factors: dict[int, Factor]
    unused: frozenset[int]
    constants: dict[int, mx.array]


def expand(
    graph: Graph, constants: Mapping[int, mx.array], shared: MutableMapping[tuple[Any, ...], mx.array]
) -> Expansion:
    """Expand the weights of quantized products.

    Args:
        graph: the program.
        constants: its constants, by slot.
        shared: weights that other programs have expanded, by their constants' names; new ones are added.

    Raises:
        ProgramError: there is no room for them.
    """
    names = {named.slot.idx: named.name for named in graph.named_slots}
    nodes = [node for chain in graph.instruction_chains for node in chain.instructions]
    writes = Counter(slot for node in nodes for name, slot in node.slots() if node.writes(name))

    def is_fixed(slot: Tid) -> bool:
        # The init chain may write constants.
        return slot.idx < graph.num_constant_tensors and not writes[slot]

    casts = {
        node.out: node for node in nodes if node.kind == "AsTypeNode" and is_fixed(node.x) and writes[node.out] == 1
    }
    factors: dict[int, Factor] = {}
    taken = 0
    for node in nodes:
        if node.kind != "QuantizedMatmulNode" or node.mode != "affine":
            continue
        slots = [node.w, *(casts[slot].x if slot in casts else slot for slot in (node.scales, node.biases))]
        if not all(map(is_fixed, slots)):
            continue
        packed, scales, biases = (constants[slot.idx] for slot in slots)
        scales, biases = (
            array.astype(DTYPES[casts[slot].scalar_type]) if slot in casts else array
            for slot, array in ((node.scales, scales), (node.biases, biases))
        )
        key = (*(names[slot.idx] for slot in slots), str(scales.dtype), str(biases.dtype), node.group_size, node.bits)
        weight = shared.get(key)
        if weight is None:
            taken += 4 * scales.size * node.group_size
            if taken > MEMORY_BYTES:
                raise ProgramError(
                    f"its weights in float32 take {taken} bytes or more, there are {MEMORY_BYTES}: load it with"
                    " cpu_weights='stored'"
                )
            parts = packed, scales.astype(mx.float32), biases.astype(mx.float32)
            weight = shared[key] = mx.dequantize(*parts, group_size=node.group_size, bits=node.bits)
            mx.eval(weight)
        factors[id(node)] = Factor(weight, node.transpose, mx.result_type(scales, biases), key)
    left = [node for node in nodes if id(node) not in factors]
    outputs = {entry.slot for entry in graph.output_map}
    read = _read(left) | outputs
    unused = frozenset(id(node) for node in casts.values() if node.out not in read)
    read = _read([node for node in left if id(node) not in unused]) | outputs
    return Expansion(factors, unused, {index: array for index, array in constants.items() if Tid(index) in read})


def _read(nodes: list[Node]) -> set[Any]:
    return {slot for node in nodes for name, slot in node.slots() if not node.writes(name)}
