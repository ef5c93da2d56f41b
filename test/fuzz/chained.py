"""Programs chained from the samples of nodes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.choosers import Chooser
from fuzz.runner import Case, Data

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
    make_node,
    write_payload,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.program.schema import FIELDS, NODE_KINDS
from samples.nodes import FLOATS, SAMPLES, SIZES, N, Sample, code, draw

Slot = Tid | Vid

# -- samples as data ----------------------------------------------------------

SAMPLES_BY_KIND: dict[str, list[Sample]] = {
    kind: [sample for sample in SAMPLES if sample.kind == kind] for kind in NODE_KINDS
}


def _positions(rng: torch.Generator, dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.arange(size)


_NOOP = Sample("NoopNode", list)
_METAL = Sample(
    "MetalKernelNode",
    list,
    fields={"name": "k", "source": "", "inputs": [], "outputs": [], "grid": [1, 1, 1], "threadgroup": [1, 1, 1]},
)
# Over the caches that ``runner`` opens: of two key and value heads each.
_ATTENDING = [
    Sample(
        "UpdateAndAttendNode",
        lambda q, k, v, positions, size=size: torch.zeros(*q.shape[:3], size, dtype=q.dtype),
        (draw(1, 4, N, 8), draw(1, 2, N, 8), draw(1, 2, N, size), _positions),
        ("q", "k", "v", "position"),
        {"layer_id": layer, "scale": 0.3},
        dtypes=FLOATS,
    )
    for layer, size in enumerate((4, 8))
]
SAMPLES_BY_KIND |= {"NoopNode": [_NOOP], "MetalKernelNode": [_METAL], "UpdateAndAttendNode": _ATTENDING}
KINDS: tuple[str, ...] = tuple(NODE_KINDS)
# Refused whole, or without anything to go wrong: enough of them come anyway.
_KINDS = tuple(kind for kind in KINDS if kind not in ("NoopNode", "MetalKernelNode"))
_RARE_KINDS = ("NoopNode", "MetalKernelNode")


@dataclass(frozen=True)
class _Facts:
    """A sample's tensors, and the shape and scalar type of each result; of one that is a number, nothing."""

    inputs: tuple[Data, ...]
    results: tuple[tuple[tuple[int, ...], int] | None, ...]


@functools.cache
def _facts(kind: str, index: int, dtype: torch.dtype, size: int) -> _Facts:
    sample = SAMPLES_BY_KIND[kind][index]
    tensors = sample.make_inputs(dtype, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of deviations of one element
        expected = sample.expected(*tensors, *sample.values)
    results = expected if isinstance(expected, list) else [expected]
    return _Facts(
        tuple(Data(tuple(tensor.shape), code(tensor.dtype), _raw(tensor)) for tensor in tensors),
        tuple((tuple(it.shape), code(it.dtype)) if isinstance(it, torch.Tensor) else None for it in results),
    )


def _raw(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy().tobytes()


# -- programs -----------------------------------------------------------------


@dataclass
class TensorSlot:
    """A tensor slot of a program as it is put together; ``role`` says which of the format's groups it will be in."""

    role: str
    shape: tuple[int, ...] | None = None
    scalar_type: int = 0
    data: Data | None = None
    meta: TensorMeta | None = None


_ROLES = ("constant", "input", "output", "buffer", "temp")


class Program:
    """A program whose tensor slots are numbered as they come; ``case`` puts them in the format's order."""

    def __init__(self, choose: Chooser) -> None:
        self.choose = choose
        self.size = choose.pick(SIZES)
        self.tensors: list[TensorSlot] = []
        self.values: list[int | float | None] = []  # None: written by the program
        self.chains: list[list[Node]] = [[]]
        self.init_chain: int = -1
        self.written: list[Slot] = []
        self.outputs: list[Slot] = []
        self.value_types: dict[int, SlotType] = {}

    # How nodes are added.

    def add_node(self) -> None:
        """Add a sample's node to the main chain, at times inside a branch or the body of a scan."""
        choose = self.choose
        kind = choose.pick(_RARE_KINDS) if choose.chance(1) else choose.pick(_KINDS)
        index = choose.below(len(SAMPLES_BY_KIND[kind]))
        sample = SAMPLES_BY_KIND[kind][index]
        facts = _facts(kind, index, choose.pick(sample.dtypes), self.size)
        tensors = {place: self._operand(data) for place, data in enumerate(facts.inputs)}
        numbers: dict[int, Vid] = {}
        fields = dict(zip(sample.reads, map(Tid, range(len(sample.inputs))), strict=False)) | sample.fields

        def slot_of(slot: Slot) -> Slot:
            if isinstance(slot, Tid):
                if slot.idx not in tensors:
                    tensors[slot.idx] = self.new_tensor("temp")
                return tensors[slot.idx]
            if slot.idx not in numbers:
                numbers[slot.idx] = self.new_value(sample.values[slot.idx] if slot.idx < len(sample.values) else None)
            return numbers[slot.idx]

        row_types = {row.name: row.type for row in FIELDS[kind]}
        results: list[Slot] = [slot_of(slot) for slot in sample.results]
        if sample.num_outs:
            results = [self._target() for _ in range(sample.num_outs)]
            fields["outs"] = [_Placed(slot) for slot in results]
        elif "out" in row_types:
            results = [self._target() if row_types["out"] == "Tid" else self.new_value(None)]
            fields["out"] = _Placed(results[0])
        first_chain = len(self.chains)
        self.chains += [[_with_slots(node, slot_of) for node in chain] for chain in sample.chains]
        for name in ("then_chain_idx", "else_chain_idx", "body_chain_idx"):
            for node in (chain_node for chain in self.chains[first_chain:] for chain_node in chain):
                if name in node.__dict__:
                    setattr(node, name, getattr(node, name) + first_chain - 1)
            if name in fields:
                fields[name] += first_chain - 1
        node = _with_slots(make_node(kind, **fields), slot_of)
        self._exchange_literals(node)
        for slot, result in zip(results, facts.results, strict=False):
            if isinstance(slot, Tid) and result is not None:
                self.tensors[slot.idx].shape, self.tensors[slot.idx].scalar_type = result
        self._append(node)
        self.written += results

    def new_tensor(self, role: str, data: Data | None = None) -> Tid:
        """Add a tensor slot."""
        shape, scalar_type = (None, 0) if data is None else (data.shape, data.scalar_type)
        self.tensors.append(TensorSlot(role, shape, scalar_type, data))
        return Tid(len(self.tensors) - 1)

    def new_value(self, number: int | float | None) -> Vid:
        """Add a value slot: an input, or with None for a number one that the program writes."""
        self.values.append(number)
        return Vid(len(self.values) - 1)

    def _operand(self, data: Data) -> Tid:
        """Return a slot to read: one that holds such a tensor, or a new input, constant or buffer."""
        choose = self.choose
        same = [
            Tid(index)
            for index, tensor in enumerate(self.tensors)
            if (tensor.shape, tensor.scalar_type) == (data.shape, data.scalar_type)
        ]
        if same and choose.chance(60):
            return choose.pick(same)
        known = [Tid(index) for index, tensor in enumerate(self.tensors) if tensor.shape is not None]
        if known and choose.chance(4):
            return choose.pick(known)
        is_index = data.scalar_type in (SCALAR_TYPE_CODES["int32"], SCALAR_TYPE_CODES["int64"])
        if choose.chance(50 if is_index else 25):
            return self.new_tensor("constant", data)
        return self.new_tensor("buffer" if choose.chance(5) else "input", data)

    def _target(self) -> Tid:
        """Return a slot to write: mostly one of its own."""
        free = [Tid(index) for index, tensor in enumerate(self.tensors) if tensor.role in ("buffer", "temp")]
        return self.choose.pick(free) if free and self.choose.chance(8) else self.new_tensor("temp")

    def _exchange_literals(self, node: Node) -> None:
        """Hand in some of a node's literals as values, and write some of the values as literals."""
        for row in FIELDS[node.kind]:
            if row.type not in ("IntOrVid", "FloatOrVid"):
                continue
            given = getattr(node, row.name)
            items = given if row.is_vector else [given]
            swapped = [self._exchanged(item) for item in items or []]
            setattr(node, row.name, swapped if row.is_vector else swapped[0] if swapped else given)

    def _exchanged(self, item: Any) -> Any:
        if isinstance(item, Vid):
            number = self.values[item.idx]
            return number if number is not None and self.choose.chance(40) else item
        return self.new_value(item) if item is not None and self.choose.chance(6) else item

    def _append(self, node: Node) -> None:
        choose, main = self.choose, self.chains[0]
        if choose.chance(8):
            first = len(self.chains)
            self.chains += [[node], [Node(node.kind, dict(node.__dict__))]]
            cond = self.new_value(choose.below(2)) if choose.chance(70) else choose.below(2)
            main.append(make_node("IfNode", cond=cond, then_chain_idx=first, else_chain_idx=first + 1))
        elif choose.chance(5) and not any(isinstance(slot, Vid) for name, slot in node.slots() if node.writes(name)):
            read = [slot for name, slot in node.slots() if isinstance(slot, Tid) and not node.writes(name)]
            originals = [choose.pick(read)] if read else []
            sliced = [self.new_tensor("temp") for _ in originals]
            if choose.chance(30) and originals:
                node = _with_slots(node, lambda slot: sliced[0] if slot == originals[0] else slot)
            outputs = [slot for name, slot in node.slots() if node.writes(name) and isinstance(slot, Tid)]
            self.chains.append([node])
            scan = {"originals": originals, "sliced": sliced, "outputs": outputs, "carry": []}
            axis = choose.pick((0, 0, 1, -1))
            main.append(make_node("ScanNode", **scan, body_chain_idx=len(self.chains) - 1, scan_axis=axis))
        else:
            main.append(node)

    # How it is completed.

    def arrange(self) -> None:
        """Choose what is put out, what of it is declared, and how the inputs are described."""
        choose = self.choose
        unique = list(dict.fromkeys(self.written))
        self.outputs = [slot for slot in unique if not choose.chance(10)] or unique
        form = choose.pick(("static", "static", "static", "dynamic", "none", "mixed"))
        for tensor in self.tensors:
            if tensor.data is not None and tensor.shape is not None:
                tensor.shape, tensor.scalar_type = tensor.data.shape, tensor.data.scalar_type
            chosen = choose.pick(("static", "dynamic", "none")) if form == "mixed" else form
            tensor.meta = self._meta(tensor, "static" if tensor.role in ("constant", "buffer") else chosen)
        for slot in self.outputs:
            if isinstance(slot, Tid) and self.tensors[slot.idx].role == "temp" and choose.chance(15):
                self.tensors[slot.idx].role = "output"
        if choose.chance(4):
            constant = {Tid(i) for i, tensor in enumerate(self.tensors) if tensor.role in ("constant", "buffer")}
            main = self.chains[0]
            early = [
                node
                for node in main
                if node.kind not in ("IfNode", "ScanNode")
                and all(node.writes(name) or slot in constant for name, slot in node.slots())
            ]
            self.chains[0] = [node for node in main if node not in early]
            self.chains.append(early)
            self.init_chain = len(self.chains) - 1

    def _meta(self, tensor: TensorSlot, form: str) -> TensorMeta | None:
        if form == "none" or tensor.shape is None:
            return None
        choose = self.choose
        dims = [
            ShapeDim(-1, choose.below(2), choose.pick((-1, size + 3, size, 1024)))
            if form == "dynamic" and choose.chance(60)
            else ShapeDim(size, size, size)
            for size in tensor.shape
        ]
        return TensorMeta(dims, tensor.scalar_type)

    def redescribe(self, tensor: TensorSlot) -> None:
        """Let a tensor's description say what its data is; at times it stays as it was."""
        if tensor.data is None or self.choose.chance(12):
            return
        is_dynamic = tensor.meta is not None and any(dim.value < 0 for dim in tensor.meta.shape)
        tensor.shape, tensor.scalar_type = tensor.data.shape, tensor.data.scalar_type
        if tensor.meta is not None:
            tensor.meta = self._meta(tensor, "dynamic" if is_dynamic else "static")

    def nodes(self) -> list[Node]:
        """All nodes of all chains."""
        return [node for chain in self.chains for node in chain]

    def sources(self) -> list[TensorSlot]:
        """The tensors that hold something before the program runs."""
        return [tensor for tensor in self.tensors if tensor.role in ("constant", "input", "buffer")]

    def case(self) -> Case:
        """Number the slots as the format has them, and write the program."""
        order = sorted(range(len(self.tensors)), key=lambda index: _ROLES.index(self.tensors[index].role))
        place = {old: new for new, old in enumerate(order)}

        def renumbered(slot: Slot) -> Slot:
            return Tid(place.get(slot.idx, slot.idx)) if isinstance(slot, Tid) else slot

        chains = [InstructionChain([_with_slots(node, renumbered) for node in chain]) for chain in self.chains]
        by_role = {role: [index for index in order if self.tensors[index].role == role] for role in _ROLES}
        value_inputs = [index for index, number in enumerate(self.values) if number is not None]
        described = [index for index in order if self.tensors[index].role != "temp"]
        names = {place[index]: f"c{index}" for index in by_role["constant"]}
        graph = Graph(
            version="1",
            num_constant_tensors=len(by_role["constant"]),
            num_input_tensors=len(by_role["input"]),
            num_output_tensors=len(by_role["output"]),
            num_mutable_buffer_tensors=len(by_role["buffer"]),
            num_temp_tensors=len(by_role["temp"]),
            num_values=len(self.values),
            instruction_chains=chains,
            init_chain_idx=self.init_chain,
            input_map=[
                *(SlotVariant(place[index], SlotType.TensorSlot) for index in by_role["input"]),
                *(SlotVariant(index, self._value_type(index)) for index in value_inputs),
            ],
            output_map=[
                SlotVariant(renumbered(slot).idx, SlotType.TensorSlot)
                if isinstance(slot, Tid)
                else SlotVariant(slot.idx, SlotType.IntValueSlot)
                for slot in self.outputs
            ],
            mutable_buffer_map=[SlotVariant(place[index], SlotType.TensorSlot) for index in by_role["buffer"]],
            named_slots=[NamedSlot(name, SlotVariant(index, SlotType.TensorSlot)) for index, name in names.items()],
            tensor_meta=[self.tensors[index].meta for index in described],
        )
        constants = {f"c{index}": self.tensors[index].data or NOTHING for index in by_role["constant"]}
        inputs: list[Data | int | float] = [self.tensors[index].data or NOTHING for index in by_role["input"]]
        numbers = [self.values[index] for index in value_inputs]
        return Case(write_payload(graph), constants, (*inputs, *(number for number in numbers if number is not None)))

    def _value_type(self, index: int) -> SlotType:
        is_float = isinstance(self.values[index], float)
        return self.value_types.get(index, SlotType.FloatValueSlot if is_float else SlotType.IntValueSlot)


NOTHING = Data((0,), SCALAR_TYPE_CODES["float32"], b"")


class _Placed(Tid):
    """A slot that already has the program's number, and not the sample's."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.idx)
        object.__setattr__(self, "slot", slot)


def _with_slots(node: Node, function: Callable[[Slot], Slot]) -> Node:
    """Return a node with other slots."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(item) for item in value]
        if isinstance(value, _Placed):
            return value.slot  # type: ignore[attr-defined]
        return function(value) if isinstance(value, (Tid, Vid)) else value

    return Node(node.kind, {name: changed(value) for name, value in node.__dict__.items()})
