"""Graphs to test with: one of every node kind, and hypothesis strategies for any and for runnable graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from hypothesis import strategies as st

from executorch_mlx.backends.mlx.program import (
    NODE_KINDS,
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
)
from executorch_mlx.backends.mlx.program.schema import FIELDS, Field

INT_LIMITS = {
    "int8": (-(2**7), 2**7 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
# The slots an instruction writes; it reads all others.
WRITTEN_FIELDS = {"out", "outs", "outputs", "sliced"}

# One node of every kind each: what the optional fields, the choices and the limits are set to.
VARIANTS = ("required fields only", "literals", "slots", "smallest", "largest")


def filled_node(kind: str, variant: str) -> Node:
    """Return a node with fields set by rule; floats are such that six decimals print them exactly."""
    numbers = count(1)
    fields = {
        row.name: _filled(row, variant, numbers)
        for row in FIELDS[kind]
        if row.required or variant != "required fields only"
    }
    return make_node(kind, **fields)


def _filled(row: Field, variant: str, numbers: Iterator[int]) -> Any:
    if row.is_vector:
        length = {"required fields only": 0, "smallest": 0, "literals": 3, "slots": 2}.get(variant, 1)
        return [_filled_item(row.type, variant, numbers) for _ in range(length)]
    return _filled_item(row.type, variant, numbers)


def _filled_item(type_name: str, variant: str, numbers: Iterator[int]) -> Any:
    number = next(numbers)
    is_slot = variant in ("slots", "largest")
    slot = 2**32 - 1 if variant == "largest" else 0 if variant == "smallest" else number
    if type_name == "Tid":
        return Tid(slot)
    if type_name == "Vid" or (is_slot and type_name in ("IntOrVid", "FloatOrVid")):
        return Vid(slot)
    if type_name == "VidOrTid" or (is_slot and type_name == "IntOrVidOrTid"):
        return Vid(slot) if variant == "slots" else Tid(slot)
    if type_name == "string":
        return "" if variant == "smallest" else f'"é\u0000😀\n{number}'
    if type_name == "bool":
        return variant != "smallest"
    if type_name in ("float", "double", "FloatOrVid"):
        return {"smallest": -1024.5, "largest": 0.03125}.get(variant, number / 8)
    low, high = INT_LIMITS["int64" if type_name in ("IntOrVid", "IntOrVidOrTid") else type_name]
    return {"smallest": low, "largest": high}.get(variant, number)


def graph_of_every_kind(variant: str) -> Graph:
    """Return a graph (not one that could run) with every node kind in order and all of its own fields set."""
    limits = {"smallest": 0, "largest": 2**32 - 1}
    number = count(1)

    def any_count() -> int:
        return limits.get(variant, next(number))

    slots = [SlotVariant(any_count(), slot_type) for slot_type in SlotType]
    meta = [
        TensorMeta([ShapeDim(3), ShapeDim(-1, 2, 5)], 6, [1, 0]),
        TensorMeta([], -1, None),
        TensorMeta([ShapeDim(-(2**31), -(2**31), 2**31 - 1)], 127, []),
    ]
    return Graph(
        version="1",
        num_constant_tensors=any_count(),
        num_input_tensors=any_count(),
        num_output_tensors=any_count(),
        num_mutable_buffer_tensors=any_count(),
        num_temp_tensors=any_count(),
        num_values=any_count(),
        instruction_chains=[
            InstructionChain([filled_node(kind, variant) for kind in NODE_KINDS]),
            InstructionChain([]),
        ],
        main_chain_idx=any_count(),
        init_chain_idx={"smallest": -(2**31), "largest": 2**31 - 1}.get(variant, 0),
        input_map=slots,
        output_map=slots[1:],
        mutable_buffer_map=slots[2:],
        named_slots=[NamedSlot("", slots[0]), NamedSlot("layers.0.weight", slots[1])],
        tensor_meta=meta,
    )


_INDICES = st.integers(0, 2**32 - 1)
_TIDS = st.builds(Tid, _INDICES)
_VIDS = st.builds(Vid, _INDICES)
_TEXTS = st.text(max_size=8)
_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "Tid": _TIDS,
    "Vid": _VIDS,
    "string": _TEXTS,
    "bool": st.booleans(),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    **{name: st.integers(*limits) for name, limits in INT_LIMITS.items()},
}
_BY_TYPE |= {
    "IntOrVid": _BY_TYPE["int64"] | _VIDS,
    "FloatOrVid": _BY_TYPE["double"] | _VIDS,
    "VidOrTid": _VIDS | _TIDS,
    "IntOrVidOrTid": _BY_TYPE["int64"] | _VIDS | _TIDS,
}


def _values(row: Field) -> st.SearchStrategy[Any]:
    values = _BY_TYPE[row.type]
    if row.is_vector:
        values = st.lists(values, max_size=3)
    is_optional = not row.required and row.default is None
    return st.none() | values if is_optional else values


NODES = {
    kind: st.builds(
        lambda kind, fields: make_node(kind, **fields),
        st.just(kind),
        st.fixed_dictionaries({row.name: _values(row) for row in FIELDS[kind]}),
    )
    for kind in NODE_KINDS
}
_ANY_NODE = st.sampled_from(NODE_KINDS).flatmap(NODES.__getitem__)
_SLOT_VARIANTS = st.builds(SlotVariant, _INDICES, st.sampled_from([int(member) for member in SlotType]))
_DIMS = st.builds(ShapeDim, *[_BY_TYPE["int32"]] * 3)
_METAS = st.builds(
    TensorMeta,
    st.lists(_DIMS, max_size=3),
    _BY_TYPE["int8"],
    st.none() | st.lists(_BY_TYPE["uint8"], max_size=3),
)


@st.composite
def any_graphs(draw: st.DrawFn, *, with_absent_meta: bool = True) -> Graph:
    """Graphs that can be written, most of which make no sense."""
    metas = st.none() | _METAS if with_absent_meta else _METAS
    counts = draw(st.lists(st.integers(0, 8) | _INDICES, min_size=6, max_size=6))
    return Graph(
        draw(st.none() | st.just("1") | _TEXTS),
        *counts,
        instruction_chains=draw(st.lists(st.builds(InstructionChain, st.lists(_ANY_NODE, max_size=3)), max_size=3)),
        main_chain_idx=draw(st.integers(0, 3) | _INDICES),
        init_chain_idx=draw(st.integers(-1, 3) | _BY_TYPE["int32"]),
        input_map=draw(st.lists(_SLOT_VARIANTS, max_size=2)),
        output_map=draw(st.lists(_SLOT_VARIANTS, max_size=2)),
        mutable_buffer_map=draw(st.lists(_SLOT_VARIANTS, max_size=2)),
        named_slots=draw(st.lists(st.builds(NamedSlot, _TEXTS, _SLOT_VARIANTS), max_size=2)),
        tensor_meta=draw(st.lists(metas, max_size=3)),
    )


# Control flow comes often: it is where a verifier errs.
_RUN_KINDS = st.one_of(st.sampled_from(NODE_KINDS), st.sampled_from(("IdCopyNode", "IfNode", "ScanNode")))


class _RunnableGraphs:
    """Draws one graph whose chains read only what is written before they do."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        sizes = [draw(st.integers(low, high)) for low, high in ((0, 2), (1, 2), (1, 2), (0, 2), (1, 3), (1, 3))]
        constants, inputs, outputs, buffers, temps, values = sizes
        self._first_output = constants + inputs
        self._first_temp = self._first_output + outputs + buffers
        self._writable = [Tid(index) for index in range(constants + inputs, self._first_temp + temps)]
        self._values = [Vid(index) for index in range(values)]
        self.graph = Graph(
            "1",
            *sizes,
            input_map=[SlotVariant(constants + index) for index in range(inputs)],
            output_map=[SlotVariant(self._first_output + index) for index in range(outputs)],
            mutable_buffer_map=[SlotVariant(self._first_output + outputs + index) for index in range(buffers)],
            named_slots=[NamedSlot(f"constant {index}", SlotVariant(index)) for index in range(constants)],
            tensor_meta=[TensorMeta([ShapeDim(2), ShapeDim(3)], 6) for _ in range(self._first_temp)],
        )
        buffers_from = self._first_output + outputs
        defined: set[Tid | Vid] = {
            Tid(index) for index in (*range(self._first_output), *range(buffers_from, buffers_from + buffers))
        }
        if draw(st.booleans()):
            self.graph.input_map.append(SlotVariant(0, int(SlotType.IntValueSlot)))
            defined.add(Vid(0))
        self._chain(defined, depth=0)
        copied = Tid(constants)
        self.graph.instruction_chains[0].instructions += [
            make_node("IdCopyNode", x=copied, out=Tid(slot.idx))
            for slot in self.graph.output_map
            if Tid(slot.idx) not in defined
        ]

    def _chain(self, defined: set[Tid | Vid], depth: int) -> int:
        """Draw a chain and return its index; what it writes is added to ``defined``."""
        index = len(self.graph.instruction_chains)
        instructions: list[Node] = []
        self.graph.instruction_chains.append(InstructionChain(instructions))
        for _ in range(self._draw(st.integers(0, 4 - depth))):
            kind = self._draw(_RUN_KINDS)
            if kind in ("IfNode", "ScanNode"):
                if depth < 2:
                    instructions.append(self._control(kind, defined, depth))
                continue
            node = make_node(kind, **{row.name: self._field(row, defined) for row in FIELDS[kind]})
            defined.update(slot for name, slot in node.slots() if name in WRITTEN_FIELDS)
            instructions.append(node)
        return index

    def _control(self, kind: str, defined: set[Tid | Vid], depth: int) -> Node:
        if kind == "IfNode":
            cond = self._draw(self._readable("IntOrVid", defined))
            branches = [set(defined), set(defined)]
            indices = [self._chain(branch, depth + 1) for branch in branches]
            defined |= branches[0] & branches[1]
            return make_node("IfNode", cond=cond, then_chain_idx=indices[0], else_chain_idx=indices[1])
        tids = st.lists(self._readable("Tid", defined), max_size=2)
        originals = self._draw(tids)
        carry = self._draw(tids)
        sliced = [self._draw(st.sampled_from(self._writable)) for _ in originals]
        after = defined | set(sliced)
        body = self._chain(after, depth + 1)
        written = sorted((slot for slot in after if isinstance(slot, Tid) and slot in self._writable), key=str)
        outputs = self._draw(st.lists(st.sampled_from(written), max_size=2)) if written else []
        defined.update(sliced, outputs)
        return make_node(
            "ScanNode", originals=originals, sliced=sliced, outputs=outputs, carry=carry, body_chain_idx=body
        )

    def _readable(self, type_name: str, defined: set[Tid | Vid]) -> st.SearchStrategy[Any]:
        tids = st.sampled_from(sorted((slot for slot in defined if isinstance(slot, Tid)), key=str))
        known = sorted((slot for slot in defined if isinstance(slot, Vid)), key=str)
        vids = st.sampled_from(known) if known else st.nothing()
        return {
            "Tid": tids,
            "Vid": vids,
            "VidOrTid": tids | vids,
            "IntOrVid": st.integers(-5, 5) | vids,
            "FloatOrVid": st.floats(width=32, allow_nan=False) | vids,
            "IntOrVidOrTid": st.integers(-5, 5) | vids | tids,
        }.get(type_name, _BY_TYPE.get(type_name, st.nothing()))

    def _field(self, row: Field, defined: set[Tid | Vid]) -> Any:
        if row.name in WRITTEN_FIELDS:
            values: st.SearchStrategy[Any] = st.sampled_from(self._values if row.type == "Vid" else self._writable)
        else:
            values = self._readable(row.type, defined)
        if row.is_vector:
            values = st.lists(values, max_size=2)
        if not row.required and row.default is None:
            values = st.none() | values
        return self._draw(values)


@st.composite
def runnable_graphs(draw: st.DrawFn) -> Graph:
    """Graphs that the verifier has to accept."""
    return _RunnableGraphs(draw).graph
