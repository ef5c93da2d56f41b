"""Graphs written by hand, as no exporter need write them."""

from __future__ import annotations

from collections.abc import Sequence

from executorch_mlx.backends.mlx.program import (
    Graph,
    InstructionChain,
    NamedSlot,
    Node,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    verify_graph,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES


def slot_variant(slot: Tid | Vid) -> SlotVariant:
    """Return a slot as an input or output map has it; a value's is an integer."""
    return SlotVariant(slot.idx, SlotType.TensorSlot if isinstance(slot, Tid) else SlotType.IntValueSlot)


def hand_built(
    chains: Sequence[list[Node]], inputs: Sequence[Tid | Vid], outputs: Sequence[Tid | Vid], num_constants: int = 0
) -> Graph:
    """Return a verified graph of the first chain and those that it runs.

    Tensor slots are the constants (float32 [4] by their description), then the inputs, then all others.
    """
    used = [*inputs, *outputs, *(slot for chain in chains for node in chain for _, slot in node.slots())]
    num_inputs = sum(isinstance(slot, Tid) for slot in inputs)
    num_tensors = max((slot.idx + 1 for slot in used if isinstance(slot, Tid)), default=0)
    meta = TensorMeta(shape=[ShapeDim(4)], scalar_type=SCALAR_TYPE_CODES["float32"])
    graph = Graph(
        version="1",
        num_constant_tensors=num_constants,
        num_input_tensors=num_inputs,
        num_temp_tensors=num_tensors - num_constants - num_inputs,
        num_values=max((slot.idx + 1 for slot in used if isinstance(slot, Vid)), default=0),
        instruction_chains=[InstructionChain(chain) for chain in chains],
        input_map=[slot_variant(slot) for slot in inputs],
        output_map=[slot_variant(slot) for slot in outputs],
        named_slots=[NamedSlot(f"c{index}", slot_variant(Tid(index))) for index in range(num_constants)],
        tensor_meta=[*[meta] * num_constants, *[None] * num_inputs],
    )
    verify_graph(graph)
    return graph
