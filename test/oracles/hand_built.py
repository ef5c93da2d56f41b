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


def described(shape: Sequence[int], dtype: str, *, slack: int | None = None) -> TensorMeta:
    """Return a tensor's description: of its sizes, or of any up to so much more than them."""
    dims = [ShapeDim(size) if slack is None else ShapeDim(-1, 0, size + slack) for size in shape]
    return TensorMeta(shape=dims, scalar_type=SCALAR_TYPE_CODES[dtype])


def assembled(
    chains: Sequence[list[Node]],
    inputs: Sequence[Tid | Vid],
    outputs: Sequence[Tid | Vid],
    constants: Sequence[TensorMeta] = (),
    meta: Sequence[TensorMeta | None] | None = None,
) -> Graph:
    """Return a graph, not verified, of the first chain and those that it runs.

    Tensor slots are the constants, then the inputs, then all others.

    Args:
        chains: the chains.
        inputs: the slots that inputs go to.
        outputs: the slots that outputs come from.
        constants: the descriptions of the constants.
        meta: the descriptions of the inputs that are tensors; by default there are none.
    """
    used = [*inputs, *outputs, *(slot for chain in chains for node in chain for _, slot in node.slots())]
    num_inputs = sum(isinstance(slot, Tid) for slot in inputs)
    num_tensors = max((slot.idx + 1 for slot in used if isinstance(slot, Tid)), default=0)
    return Graph(
        version="1",
        num_constant_tensors=len(constants),
        num_input_tensors=num_inputs,
        num_temp_tensors=num_tensors - len(constants) - num_inputs,
        num_values=max((slot.idx + 1 for slot in used if isinstance(slot, Vid)), default=0),
        instruction_chains=[InstructionChain(chain) for chain in chains],
        input_map=[slot_variant(slot) for slot in inputs],
        output_map=[slot_variant(slot) for slot in outputs],
        named_slots=[NamedSlot(f"c{index}", slot_variant(Tid(index))) for index in range(len(constants))],
        tensor_meta=[*constants, *(meta or [None] * num_inputs)],
    )


def hand_built(
    chains: Sequence[list[Node]],
    inputs: Sequence[Tid | Vid],
    outputs: Sequence[Tid | Vid],
    constants: Sequence[TensorMeta] = (),
) -> Graph:
    """Return a graph, verified; see ``assembled``."""
    graph = assembled(chains, inputs, outputs, constants)
    verify_graph(graph)
    return graph
