"""Refuses a graph that cannot be run: the check that stands between a payload and everything else."""

from __future__ import annotations

import math

from .dtypes import SCALAR_TYPE_NAMES
from .flow import MAX_RANK, Facts, Flow, require
from .schema import Graph, SlotType, SlotVariant, TensorMeta

FORMAT_VERSION = "1"
MAX_SLOTS = 1 << 20
MAX_TENSOR_BYTES = 1 << 42


def verify_graph(graph: Graph, max_bytes: float = MAX_TENSOR_BYTES) -> Facts:
    """Check that every slot, chain, shape and name of a graph is consistent.

    Args:
        graph: the graph.
        max_bytes: how much one tensor may take.

    Returns:
        What is known of its instructions.

    Raises:
        ProgramError: naming the first thing that is not, what was expected and what is there.
    """
    require(
        graph.version == FORMAT_VERSION,
        f"program format version: expected {FORMAT_VERSION!r}, got {graph.version!r}; export it with a matching"
        " ExecuTorch",
    )
    require(
        graph.num_tensors <= MAX_SLOTS and graph.num_values <= MAX_SLOTS,
        f"{graph.num_tensors} tensors and {graph.num_values} values: at most {MAX_SLOTS} of each are run",
    )
    _verify_chain_indices(graph)
    _verify_tensor_meta(graph)
    _verify_maps(graph)
    return Flow(graph, max_bytes).run()


def _verify_chain_indices(graph: Graph) -> None:
    chains = len(graph.instruction_chains)
    require(graph.main_chain_idx < chains, f"main chain {graph.main_chain_idx} of {chains}")
    require(-1 <= graph.init_chain_idx < chains, f"init chain {graph.init_chain_idx} of {chains}")


def _verify_tensor_meta(graph: Graph) -> None:
    expected = graph.num_tensors - graph.num_temp_tensors
    require(
        len(graph.tensor_meta) == expected,
        f"tensor metadata: expected {expected} entries (constants, inputs, outputs, buffers), got"
        f" {len(graph.tensor_meta)}",
    )
    for index, meta in enumerate(graph.tensor_meta):
        is_state = index < graph.num_constant_tensors or index >= graph.buffer_tensors.start
        if meta is None:
            require(not is_state, f"tensor {index}: a constant or buffer without shape and dtype")
            continue
        require(meta.scalar_type in SCALAR_TYPE_NAMES, f"tensor {index}: unknown scalar type {meta.scalar_type}")
        require(len(meta.shape) <= MAX_RANK, f"tensor {index}: rank {len(meta.shape)}, at most {MAX_RANK} is run")
        if is_state:
            static_shape(index, meta)


def static_shape(index: int, meta: TensorMeta) -> tuple[int, ...]:
    """Return the shape of a constant or buffer.

    Raises:
        ProgramError: a dimension is dynamic, or the tensor is too large.
    """
    shape = tuple(dim.value for dim in meta.shape)
    require(
        all(dim >= 0 for dim in shape),
        f"tensor {index}: a constant or buffer needs a static shape, got {shape}",
    )
    require(math.prod(dim or 1 for dim in shape) * 8 <= MAX_TENSOR_BYTES, f"tensor {index}: shape {shape} is too large")
    in_order = meta.dim_order in (None, []) or meta.dim_order == list(range(len(shape)))
    require(in_order, f"tensor {index}: a constant or buffer in the dimension order {meta.dim_order}, not row-major")
    return shape


def _verify_maps(graph: Graph) -> None:
    inputs, buffers = graph.input_tensors, graph.buffer_tensors
    for position, slot in enumerate(graph.input_map):
        _verify_slot(graph, slot, f"input {position}")
        require(
            slot.slot_type != SlotType.TensorSlot or slot.idx in inputs,
            f"input {position} goes to tensor {slot.idx}, inputs are {inputs.start}..{inputs.stop - 1}",
        )
    for position, slot in enumerate(graph.output_map):
        _verify_slot(graph, slot, f"output {position}")
    for position, slot in enumerate(graph.mutable_buffer_map):
        _verify_slot(graph, slot, f"mutable buffer {position}")
        require(
            slot.slot_type == SlotType.TensorSlot and slot.idx in buffers,
            f"mutable buffer {position} is tensor {slot.idx}, buffers are {buffers.start}..{buffers.stop - 1}",
        )
    for named in graph.named_slots:
        _verify_slot(graph, named.slot, f"the name {named.name!r}")
    named_constants = {
        named.slot.idx
        for named in graph.named_slots
        if named.slot.slot_type == SlotType.TensorSlot and named.slot.idx < graph.num_constant_tensors
    }
    require(
        len(named_constants) == graph.num_constant_tensors,
        f"{graph.num_constant_tensors} constants, of which {len(named_constants)} are named",
    )


def _verify_slot(graph: Graph, slot: SlotVariant, what: str) -> None:
    is_tensor = slot.slot_type == SlotType.TensorSlot
    limit = graph.num_tensors if is_tensor else graph.num_values
    require(
        slot.slot_type in list(SlotType) and slot.idx < limit,
        f"{what} names slot {slot.idx} of {limit} {'tensors' if is_tensor else 'values'}",
    )
