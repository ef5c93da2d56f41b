"""Refuses a graph that cannot be run: the check that stands between a payload and everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .dtypes import SCALAR_TYPE_NAMES
from .errors import ProgramError
from .schema import Graph, Node, SlotType, SlotVariant, TensorMeta, Tid, Vid

FORMAT_VERSION = "1"
MAX_SLOTS = 1 << 20
MAX_TENSOR_BYTES = 1 << 42
MAX_RANK = 16
MAX_CHAIN_DEPTH = 32
MAX_VISITS = 1 << 20


def verify_graph(graph: Graph) -> None:
    """Check that every slot, chain, shape and name of a graph is consistent.

    Raises:
        ProgramError: naming the first thing that is not, what was expected and what is there.
    """
    _require(
        graph.version == FORMAT_VERSION,
        f"program format version: expected {FORMAT_VERSION!r}, got {graph.version!r}; export it with a matching"
        " ExecuTorch",
    )
    _require(
        graph.num_tensors <= MAX_SLOTS and graph.num_values <= MAX_SLOTS,
        f"{graph.num_tensors} tensors and {graph.num_values} values: at most {MAX_SLOTS} of each are run",
    )
    _verify_chain_indices(graph)
    _verify_tensor_meta(graph)
    _verify_maps(graph)
    _FlowCheck(graph).run()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProgramError(message)


def _verify_chain_indices(graph: Graph) -> None:
    chains = len(graph.instruction_chains)
    _require(graph.main_chain_idx < chains, f"main chain {graph.main_chain_idx} of {chains}")
    _require(-1 <= graph.init_chain_idx < chains, f"init chain {graph.init_chain_idx} of {chains}")


def _verify_tensor_meta(graph: Graph) -> None:
    expected = graph.num_tensors - graph.num_temp_tensors
    _require(
        len(graph.tensor_meta) == expected,
        f"tensor metadata: expected {expected} entries (constants, inputs, outputs, buffers), got"
        f" {len(graph.tensor_meta)}",
    )
    first_buffer = graph.num_constant_tensors + graph.num_input_tensors + graph.num_output_tensors
    for index, meta in enumerate(graph.tensor_meta):
        is_state = index < graph.num_constant_tensors or index >= first_buffer
        if meta is None:
            _require(not is_state, f"tensor {index}: a constant or buffer without shape and dtype")
            continue
        _require(meta.scalar_type in SCALAR_TYPE_NAMES, f"tensor {index}: unknown scalar type {meta.scalar_type}")
        _require(len(meta.shape) <= MAX_RANK, f"tensor {index}: rank {len(meta.shape)}, at most {MAX_RANK} is run")
        if is_state:
            static_shape(index, meta)


def static_shape(index: int, meta: TensorMeta) -> tuple[int, ...]:
    """Return the shape of a constant or buffer.

    Raises:
        ProgramError: a dimension is dynamic, or the tensor is too large.
    """
    shape = tuple(dim.value for dim in meta.shape)
    _require(
        all(dim >= 0 for dim in shape),
        f"tensor {index}: a constant or buffer needs a static shape, got {shape}",
    )
    _require(
        math.prod(dim or 1 for dim in shape) * 8 <= MAX_TENSOR_BYTES, f"tensor {index}: shape {shape} is too large"
    )
    in_order = meta.dim_order in (None, []) or meta.dim_order == list(range(len(shape)))
    _require(in_order, f"tensor {index}: a constant or buffer in the dimension order {meta.dim_order}, not row-major")
    return shape


def _verify_maps(graph: Graph) -> None:
    first_input = graph.num_constant_tensors
    first_output = first_input + graph.num_input_tensors
    for position, slot in enumerate(graph.input_map):
        _verify_slot(graph, slot, f"input {position}")
        _require(
            slot.slot_type != SlotType.TensorSlot or first_input <= slot.idx < first_output,
            f"input {position} goes to tensor {slot.idx}, inputs are {first_input}..{first_output - 1}",
        )
    for position, slot in enumerate(graph.output_map):
        _verify_slot(graph, slot, f"output {position}")
    first_buffer = first_output + graph.num_output_tensors
    first_temp = first_buffer + graph.num_mutable_buffer_tensors
    for position, slot in enumerate(graph.mutable_buffer_map):
        _verify_slot(graph, slot, f"mutable buffer {position}")
        _require(
            slot.slot_type == SlotType.TensorSlot and first_buffer <= slot.idx < first_temp,
            f"mutable buffer {position} is tensor {slot.idx}, buffers are {first_buffer}..{first_temp - 1}",
        )
    for named in graph.named_slots:
        _verify_slot(graph, named.slot, f"the name {named.name!r}")
    named_constants = {
        named.slot.idx
        for named in graph.named_slots
        if named.slot.slot_type == SlotType.TensorSlot and named.slot.idx < graph.num_constant_tensors
    }
    _require(
        len(named_constants) == graph.num_constant_tensors,
        f"{graph.num_constant_tensors} constants, of which {len(named_constants)} are named",
    )


def _verify_slot(graph: Graph, slot: SlotVariant, what: str) -> None:
    is_tensor = slot.slot_type == SlotType.TensorSlot
    limit = graph.num_tensors if is_tensor else graph.num_values
    _require(
        slot.slot_type in list(SlotType) and slot.idx < limit,
        f"{what} names slot {slot.idx} of {limit} {'tensors' if is_tensor else 'values'}",
    )


class _Scope:
    """The slots that are defined at a point of a chain: its own, and all that were where the chain was entered."""

    def __init__(self, outer: _Scope | None = None) -> None:
        self._outer = outer
        self.own: set[Tid | Vid] = set()

    def __contains__(self, slot: Tid | Vid) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if slot in scope.own:
                return True
            scope = scope._outer
        return False


class _FlowCheck:
    """Walks the chains as they run and keeps what is defined so far.

    A slot's state before anything ran: constants, buffers and inputs are defined, all else is not. Temporaries may be
    written more than once (exporters reuse them).
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._visits = 0
        self._may_write_constants = False

    def run(self) -> None:
        """Raise ProgramError for a slot out of range, read before it is written, or written where it must not be."""
        graph = self._graph
        first_output = graph.num_constant_tensors + graph.num_input_tensors
        first_buffer = first_output + graph.num_output_tensors
        buffers = range(first_buffer, first_buffer + graph.num_mutable_buffer_tensors)
        scope = _Scope()
        scope.own.update(Tid(index) for index in (*range(graph.num_constant_tensors), *buffers))
        if graph.init_chain_idx >= 0:
            self._may_write_constants = True
            self._chain(graph.init_chain_idx, scope, ())
            self._may_write_constants = False
        scope.own.update(entry.slot for entry in graph.input_map)
        self._chain(graph.main_chain_idx, scope, ())
        for position, entry in enumerate(graph.output_map):
            _require(entry.slot in scope, f"output {position} (slot {entry.idx}) is never written")

    def _chain(self, index: int, scope: _Scope, path: tuple[int, ...]) -> None:
        _require(index not in path, f"instruction chain {index} runs itself")
        _require(len(path) < MAX_CHAIN_DEPTH, f"instruction chains nest deeper than {MAX_CHAIN_DEPTH}")
        path = (*path, index)
        first_free = 0 if self._may_write_constants else self._graph.num_constant_tensors
        for step, node in enumerate(self._graph.instruction_chains[index].instructions):
            where = f"chain {index}, instruction {step} ({node.kind})"
            written = []
            for name, slot in node.slots():
                self._visit()
                self._verify_range(slot, where)
                if node.writes(name):
                    _require(isinstance(slot, Vid) or slot.idx >= first_free, f"{where} writes constant {slot.idx}")
                    written.append(slot)
                else:
                    _require(slot in scope, f"{where}: {name} reads {slot}, which nothing has written yet")
            self._visit()
            self._control_flow(node, scope, path, where)
            scope.own.update(written)

    def _visit(self) -> None:
        self._visits += 1
        _require(self._visits <= MAX_VISITS, f"instruction chains run each other more than {MAX_VISITS} times")

    def _verify_range(self, slot: Tid | Vid, where: str) -> None:
        limit = self._graph.num_tensors if isinstance(slot, Tid) else self._graph.num_values
        _require(slot.idx < limit, f"{where} names {slot}, there are {limit}")

    def _control_flow(self, node: Node, scope: _Scope, path: tuple[int, ...], where: str) -> None:
        if node.kind == "IfNode":
            branches = [
                self._entered(index, scope, (), path, where) for index in (node.then_chain_idx, node.else_chain_idx)
            ]
            scope.own |= branches[0] & branches[1]
        elif node.kind == "ScanNode":
            written = self._entered(node.body_chain_idx, scope, node.sliced, path, where)
            missing = [slot for slot in node.outputs if slot not in written and slot not in scope]
            _require(not missing, f"ScanNode: its body never writes {missing}")

    def _entered(
        self, index: int, scope: _Scope, given: Sequence[Tid], path: tuple[int, ...], where: str
    ) -> set[Tid | Vid]:
        """Walk a chain that an instruction runs; return what it wrote."""
        _require(0 <= index < len(self._graph.instruction_chains), f"{where} runs chain {index}")
        inner = _Scope(scope)
        inner.own.update(given)
        self._chain(index, inner, path)
        return inner.own
