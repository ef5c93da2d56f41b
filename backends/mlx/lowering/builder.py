"""Builds a wire-format graph from an edge program whose every call has a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from ..program import (
    Graph,
    InstructionChain,
    NamedSlot,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    verify_graph,
)
from ..program.dtypes import SCALAR_TYPE_CODES
from ..program.verify import FORMAT_VERSION

# Slots are numbered per space while the graph grows, and densely, in this order, when it is finished.
_CONSTANT, _INPUT, _OUTPUT, _TEMP = range(4)
_SPACE = 1 << 24

# The format's bound on a dimension is an int32; what exceeds it is unbounded.
_MAX_BOUND = 2**31 - 1


def scalar_type(dtype: torch.dtype) -> int:
    """Return ExecuTorch's code for a dtype.

    Raises:
        ValueError: the format has none.
    """
    name = str(dtype).rsplit(".", 1)[-1]
    if name not in SCALAR_TYPE_CODES:
        raise ValueError(f"dtype {name} has no form in the MLX program format")
    return SCALAR_TYPE_CODES[name]


class GraphBuilder:
    """Collects instructions, slots and constants; rows call ``read``, ``write`` and ``emit``."""

    def __init__(self, program: ExportedProgram, digest: Callable[[torch.Tensor], str]) -> None:
        """Begin a graph.

        Args:
            program: the edge program.
            digest: gives a text that tells a constant's bytes from others.
        """
        self._program = program
        self._digest = digest
        self._counts = [0, 0, 0, 0]
        self._num_values = 0
        self._slots: dict[Node, Any] = {}
        self._targets: dict[Node, str] = {}
        self._instructions: list[Any] = []
        self._constants: dict[str, tuple[Tid, torch.Tensor]] = {}
        self._scalars: dict[str, Tid] = {}
        self._casts: dict[tuple[Tid, torch.dtype], Tid] = {}
        self._meta: dict[Tid, TensorMeta] = {}
        self._inputs: list[Tid | Vid] = []
        self._output_tids: dict[Node, Tid] = {}
        self._declare_placeholders()

    # -- for rows ----------------------------------------------------------

    def read(self, node: Any) -> Any:
        """Return the slot of a node; a literal as it is, a list item by item."""
        if isinstance(node, Node):
            if node not in self._slots:
                self._slots[node] = self.constant(node)
            return self._slots[node]
        if isinstance(node, (list, tuple)):
            return [self.read(item) for item in node]
        return node

    def stored(self, node: Node) -> torch.Tensor:
        """Return a parameter, buffer or constant of the program."""
        if node not in self._targets:
            raise ValueError(f"{node.name}: expected a constant of the program, got an input")
        target = self._targets[node]
        stored = self._program.state_dict if target in self._program.state_dict else self._program.constants
        tensor: torch.Tensor = stored[target]
        return tensor

    def constant(self, node: Node, tensor: torch.Tensor | None = None) -> Tid:
        """Return the slot of a parameter, buffer or constant of the program, or of a tensor made of it."""
        return self._constant(self._targets[node], self.stored(node) if tensor is None else tensor)

    def write(self, node: Node) -> Any:
        """Return a new slot for a node's result: a ``Tid``, a ``Vid``, or a list for several results."""
        value = node.meta["val"]
        if isinstance(value, (list, tuple)):
            slot: Any = [self._new_tensor(_TEMP) for _ in value]
        elif isinstance(value, torch.Tensor):
            slot = self._output_tids[node] if node in self._output_tids else self._new_tensor(_TEMP)
        else:
            slot = self._new_value()
        self._slots[node] = slot
        return slot

    def alias(self, node: Node, slot: Any) -> None:
        """Let a node's result be a slot that exists; an output of the program is copied to its own."""
        if node in self._output_tids:
            self.emit("IdCopyNode", x=slot, out=self.write(node))
        else:
            self._slots[node] = slot

    def temp(self) -> Tid:
        """Return a slot for an intermediate result."""
        return self._new_tensor(_TEMP)

    def value(self) -> Vid:
        """Return a slot for an intermediate scalar value."""
        return self._new_value()

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an instruction."""
        self._instructions.append(make_node(kind, **fields))

    def compute(self, kind: str, **fields: Any) -> Tid:
        """Append an instruction whose result is an intermediate tensor, and return the slot of that."""
        out = self.temp()
        self.emit(kind, out=out, **fields)
        return out

    def scalar(self, value: float | bool, dtype: torch.dtype) -> Tid:
        """Return a constant without dimensions; equal ones are stored once."""
        # By their text: 0.0 and -0.0 are equal. With the dtype: zeros of several have the same bytes.
        key = f"scalar_{value!r}_{str(dtype).removeprefix('torch.')}"
        if key not in self._scalars:
            self._scalars[key] = self._constant(key, torch.tensor(value, dtype=dtype))
        return self._scalars[key]

    def cast(self, node_or_slot: Any, current: torch.dtype, wanted: torch.dtype) -> Tid:
        """Return a slot with the value in the wanted dtype."""
        slot: Tid = self.read(node_or_slot)
        if current == wanted:
            return slot
        key = (slot, wanted)
        if key not in self._casts:
            out = self._casts[key] = self.temp()
            self.emit("AsTypeNode", x=slot, out=out, scalar_type=scalar_type(wanted))
        return self._casts[key]

    # -- finishing ---------------------------------------------------------

    def finish(self) -> tuple[Graph, dict[str, torch.Tensor]]:
        """Return the verified graph and its constants by their keys in the named data."""
        outputs = self._collect_outputs()
        starts, total = [], 0
        for count in self._counts:
            starts.append(total)
            total += count

        def final(slot: Any) -> Any:
            if isinstance(slot, Tid):
                return Tid(starts[slot.idx // _SPACE] + slot.idx % _SPACE)
            if isinstance(slot, (list, tuple)):
                return [final(item) for item in slot]
            return slot

        for node in self._instructions:
            node.__dict__.update({name: final(value) for name, value in node.__dict__.items()})
        metas = {final(tid).idx: meta for tid, meta in self._meta.items()}
        graph = Graph(
            version=FORMAT_VERSION,
            num_constant_tensors=self._counts[_CONSTANT],
            num_input_tensors=self._counts[_INPUT],
            num_output_tensors=self._counts[_OUTPUT],
            num_temp_tensors=self._counts[_TEMP],
            num_values=self._num_values,
            instruction_chains=[InstructionChain(self._instructions)],
            input_map=[_variant(final(slot)) for slot in self._inputs],
            output_map=[_variant(final(slot)) for slot in outputs],
            named_slots=[NamedSlot(key, _variant(final(tid))) for key, (tid, _) in self._constants.items()],
            tensor_meta=[metas.get(index) for index in range(total - self._counts[_TEMP])],
        )
        verify_graph(graph)
        return graph, {key: tensor for key, (_, tensor) in self._constants.items()}

    # -- inside ------------------------------------------------------------

    def _declare_placeholders(self) -> None:
        program = self._program
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        mutated = [s.target for s in program.graph_signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION]
        if mutated:
            raise ValueError(f"the delegated graph mutates buffers ({', '.join(map(str, mutated))})")
        for node in program.graph.nodes:
            if node.op == "output":
                self._declare_outputs(node)
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                self._declare_input(node)
            else:
                self._targets[node] = str(spec.target)

    def _declare_input(self, node: Node) -> None:
        slot: Tid | Vid
        if isinstance(node.meta["val"], torch.Tensor):
            slot = self._new_tensor(_INPUT)
            self._meta[slot] = _tensor_meta(node.meta["val"])
        else:
            slot = self._new_value()
        self._slots[node] = slot
        self._inputs.append(slot)

    def _declare_outputs(self, output: Node) -> None:
        """Give each computed output tensor a slot of the output space."""
        for result in output.args[0]:
            is_new = isinstance(result, Node) and result.op == "call_function" and result not in self._output_tids
            if is_new and isinstance(result.meta["val"], torch.Tensor):
                tid = self._output_tids[result] = self._new_tensor(_OUTPUT)
                self._meta[tid] = _tensor_meta(result.meta["val"])

    def _collect_outputs(self) -> list[Tid | Vid]:
        (output,) = (node for node in self._program.graph.nodes if node.op == "output")
        results = output.args[0]
        slots: list[Tid | Vid] = []
        for result in results:
            slot = self.read(result)
            if isinstance(slot, Tid) and (slot.idx // _SPACE != _OUTPUT or slot in slots):
                copy = self._new_tensor(_OUTPUT)
                self._meta[copy] = _tensor_meta(result.meta["val"])
                self.emit("IdCopyNode", x=slot, out=copy)
                slot = copy
            slots.append(slot)
        return slots

    def _new_tensor(self, space: int) -> Tid:
        index = self._counts[space]
        self._counts[space] += 1
        return Tid(space * _SPACE + index)

    def _new_value(self) -> Vid:
        self._num_values += 1
        return Vid(self._num_values - 1)

    def _constant(self, name: str, tensor: torch.Tensor) -> Tid:
        # The digest tells apart equal names of different methods, and lets equal constants of all methods meet.
        key = f"{name}:{self._digest(tensor)}"
        if key not in self._constants:
            tid = self._new_tensor(_CONSTANT)
            self._meta[tid] = _tensor_meta(tensor)
            self._constants[key] = (tid, tensor)
        return self._constants[key][0]


def _variant(slot: Tid | Vid) -> SlotVariant:
    return SlotVariant(slot.idx, SlotType.TensorSlot if isinstance(slot, Tid) else SlotType.IntValueSlot)


def _tensor_meta(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        shape=[_shape_dim(size) for size in value.shape],
        scalar_type=scalar_type(value.dtype),
        dim_order=list(range(value.ndim)) or None,
    )


def _shape_dim(size: Any) -> ShapeDim:
    if isinstance(size, int):
        return ShapeDim(size)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    low, high = (
        int(bound) if bound.is_finite and abs(bound) <= _MAX_BOUND else None for bound in (bounds.lower, bounds.upper)
    )
    return ShapeDim(-1, low or 0, -1 if high is None else high)


def flat_ints(values: Iterable[Any] | None) -> list[int]:
    """Return a list of axes as the format wants them; None is empty."""
    return [int(value) for value in values or ()]
