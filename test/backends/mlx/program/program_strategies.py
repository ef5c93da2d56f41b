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
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_NAMES
from executorch_mlx.backends.mlx.program.schema import FIELDS, Field
from samples.nodes import SAMPLES

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


# -- graphs that can run --------------------------------------------------------

# What the fields that are no slots are set to where no sample says it, or says it for another number of operands than
# the two that each list of slots gets.
_LITERALS: dict[str, dict[str, Any]] = {
    "GatherNode": {"axes": [0, 1], "slice_sizes": [1, 1]},
    "MetalKernelNode": {
        "name": "kernel",
        "source": "",
        "input_names": ["a", "b"],
        "output_names": ["c", "d"],
        "output_shape_lengths": [1, 1],
        "output_dtypes": [6, 6],
    },
    "RollNode": {"axes": [0, 1]},
    "UpdateAndAttendNode": {"layer_id": 0, "scale": 1.0},
}
_LENGTHS = {"grid": 3, "threadgroup": 3}
# Fields that are not given together: each of these nodes comes in several forms.
_FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "DequantizeNode": (
        {"global_scale": None},
        {"mode": "nvfp4", "group_size": 16, "bits": 4, "biases": None},
    ),
}
_SLOT_TYPES = frozenset({"Tid", "Vid", "VidOrTid", "IntOrVid", "FloatOrVid", "IntOrVidOrTid"})
_TENSOR_TYPES = frozenset({"Tid", "VidOrTid", "IntOrVidOrTid"})


def whole_nodes(kind: str, read: tuple[Tid, Vid], written: tuple[Tid, Vid], sliced: Tid, chain: int) -> list[Node]:
    """Return a kind's nodes that make sense of operands of which nothing is known, in all forms that it has.

    Args:
        kind: the kind.
        read: the tensor and the value in each field that may name one, two of them in lists.
        written: likewise for what it writes.
        sliced: what a scan writes its slices to.
        chain: what it runs, if it runs any.
    """
    sample = next((sample.fields for sample in SAMPLES if sample.kind == kind), {})
    fields: dict[str, Any] = {}
    for row in FIELDS[kind]:
        if row.type in _SLOT_TYPES:
            tensor, value = written if row.name in WRITTEN_FIELDS else read
            slot = sliced if row.name == "sliced" else tensor if row.type in _TENSOR_TYPES else value
            fields[row.name] = [slot] * _LENGTHS.get(row.name, 2) if row.is_vector else slot
        elif row.name.endswith("chain_idx"):
            fields[row.name] = chain
        elif row.name in sample:
            fields[row.name] = sample[row.name]
    fields |= _LITERALS.get(kind, {})
    return [make_node(kind, **fields | form) for form in _FORMS.get(kind, ({},))]


def _of_tensors(*names: str) -> tuple[str, ...]:
    """Return the kinds that have just these fields, of tensors of any dtype."""
    return tuple(
        kind
        for kind in NODE_KINDS
        if [(row.name, row.type) for row in FIELDS[kind]] == [(name, "Tid") for name in names]
        and not kind.startswith("Bitwise")
    )


# Kinds that give a tensor of two or more axes, of size 2 all of them, where their first operand is one and the others
# have such sizes; and the fields that are no slots, or not any.
_AXES = st.sampled_from((0, 1, -1, -2))
_CODES = st.sampled_from(sorted(SCALAR_TYPE_NAMES))
_TWOS = st.just([2, 2])
_FITTING: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    **{kind: {} for kind in (*_of_tensors("x", "out"), *_of_tensors("a", "b", "out"))},
    "ArgsortNode": {"axis": _AXES},
    "AsTypeNode": {"scalar_type": _CODES},
    "ClipNode": {"a_max": st.none()},
    "CumsumNode": {"axis": _AXES},
    "FlipNode": {"axes": st.lists(_AXES, max_size=1)},
    "FullLikeNode": {"scalar_type": st.none() | _CODES},
    "FullNode": {"shape": _TWOS, "scalar_type": _CODES},
    "GeluNode": {"approximate": st.sampled_from(("none", "tanh"))},
    "NoopNode": {},
    "RandomBitsNode": {"shape": _TWOS, "width": st.sampled_from((1, 2, 4))},
    "RepeatNode": {"axis": _AXES, "repeats": st.just(1)},
    "RollNode": {"axes": _AXES.map(lambda axis: [axis]), "shift": st.integers(-3, 3).map(lambda by: [by])},
    "RoundNode": {"decimals": st.integers(-2, 2)},
    "SoftmaxNode": {"axis": _AXES},
    "SortNode": {"axis": _AXES},
    "TileNode": {"reps": st.just([1])},
    "TriNode": {"n": st.just(2), "m": st.just(2), "scalar_type": _CODES},
    "TrilNode": {"k": st.integers(-3, 3)},
    "TriuNode": {"k": st.integers(-3, 3)},
    "WhereNode": {},
    # values
    "AddIntNode": {},
    "FloorDivideIntNode": {"b": st.sampled_from((-2, 1, 3))},
    "ModIntNode": {"b": st.sampled_from((-2, 1, 3))},
    "MultiplyIntNode": {},
    "SubtractIntNode": {},
    "SymSizeNode": {"dim": _AXES},
}
_CONTROL = ("IfNode", "ScanNode")
# Control flow comes often: it is where a verifier errs.
_RUN_KINDS = st.one_of(
    st.sampled_from(sorted(_FITTING)), st.sampled_from(("IdCopyNode", *_CONTROL)), st.sampled_from(NODE_KINDS)
)


class _RunnableGraphs:
    """Draws one graph whose chains read only what is written before they do, and only what fits.

    Of its temporaries, one takes the slices of scans, which have an axis less than all others, and one takes the
    results of kinds that are not ``_FITTING``. Those read the last inputs, of which nothing is known.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        limits = ((0, 2), (1, 2), (1, 2), (0, 2), (1, 3), (1, 3))
        constants, inputs, outputs, buffers, temps, values = [draw(st.integers(low, high)) for low, high in limits]
        inputs, values = inputs + 1, values + 1
        self._first_output = constants + inputs
        self._unknown = Tid(self._first_output - 1), Vid(values - 1)
        first_temp = self._first_output + outputs + buffers
        self._writable = [Tid(index) for index in range(constants, first_temp + temps) if index != self._unknown[0].idx]
        self._slice, self._other = Tid(first_temp + temps), Tid(first_temp + temps + 1)
        self._values = [Vid(index) for index in range(values - 1)]
        meta: list[TensorMeta | None] = [TensorMeta([ShapeDim(2), ShapeDim(2)], 6) for _ in range(first_temp)]
        for index in (self._unknown[0].idx, *range(self._first_output, self._first_output + outputs)):
            meta[index] = None
        self.graph = Graph(
            "1",
            constants,
            inputs,
            outputs,
            buffers,
            temps + 2,
            values,
            input_map=[SlotVariant(constants + index) for index in range(inputs)],
            output_map=[SlotVariant(self._first_output + index) for index in range(outputs)],
            mutable_buffer_map=[SlotVariant(self._first_output + outputs + index) for index in range(buffers)],
            named_slots=[NamedSlot(f"constant {index}", SlotVariant(index)) for index in range(constants)],
            tensor_meta=meta,
        )
        buffers_from = self._first_output + outputs
        defined: set[Tid | Vid] = {
            Tid(index) for index in (*range(self._first_output - 1), *range(buffers_from, buffers_from + buffers))
        }
        for value in (self._unknown[1], *([Vid(0)] if draw(st.booleans()) else [])):
            self.graph.input_map.append(SlotVariant(value.idx, int(SlotType.IntValueSlot)))
            defined.add(value)
        self._chain(defined, depth=0)
        copied = Tid(constants)
        self.graph.instruction_chains[0].instructions += [
            make_node("IdCopyNode", x=copied, out=Tid(slot.idx))
            for slot in self.graph.output_map
            if Tid(slot.idx) not in defined
        ]
        # Whatever was written to a buffer, at the end it has its shape again.
        self.graph.instruction_chains[0].instructions += [
            make_node("FullNode", out=Tid(entry.idx), shape=[2, 2], v=0.0, scalar_type=6)
            for entry in self.graph.mutable_buffer_map
        ]

    def _chain(self, defined: set[Tid | Vid], depth: int) -> int:
        """Draw a chain and return its index; what it writes is added to ``defined``."""
        index = len(self.graph.instruction_chains)
        instructions: list[Node] = []
        self.graph.instruction_chains.append(InstructionChain(instructions))
        for _ in range(self._draw(st.integers(0, 4 - depth))):
            kind = self._draw(_RUN_KINDS)
            if kind in _CONTROL:
                if depth < 2:
                    instructions.append(self._control(kind, defined, depth))
                continue
            node = self._fitting(kind, defined) if kind in _FITTING else self._other_kind(kind)
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
        tids = self._readable("Tid", defined)
        originals = self._draw(st.lists(tids, min_size=1, max_size=2))
        carry = self._draw(st.lists(tids, max_size=2))
        sliced = [self._slice] * len(originals)
        after = defined | set(sliced)
        body = self._chain(after, depth + 1)
        written = sorted((slot for slot in after if slot in self._writable), key=str)
        outputs = self._draw(st.lists(st.sampled_from(written), max_size=2)) if written else []
        defined.update(sliced, outputs)
        return make_node(
            "ScanNode",
            originals=originals,
            sliced=sliced,
            outputs=outputs,
            carry=carry,
            body_chain_idx=body,
            scan_axis=self._draw(_AXES),
        )

    def _other_kind(self, kind: str) -> Node:
        written = self._other, self._draw(st.sampled_from(self._values))
        return self._draw(st.sampled_from(whole_nodes(kind, self._unknown, written, self._slice, chain=0)))

    def _fitting(self, kind: str, defined: set[Tid | Vid]) -> Node:
        fields: dict[str, Any] = {}
        for row in FIELDS[kind]:
            if row.name in _FITTING[kind]:
                values = _FITTING[kind][row.name]
            elif row.name in WRITTEN_FIELDS:
                values = st.sampled_from(self._values if row.type == "Vid" else self._writable)
            else:
                values = self._readable(row.type, defined)
                if row.type == "Tid" and fields and self._slice in defined:
                    values |= st.just(self._slice)
                if not row.required and row.default is None and row.name != "a_min":
                    values |= st.none()
            fields[row.name] = self._draw(values)
        return make_node(kind, **fields)

    def _readable(self, type_name: str, defined: set[Tid | Vid]) -> st.SearchStrategy[Any]:
        """Return what a field may be set to: slots of tensors that fit, and of values."""
        is_special = {self._unknown[0], self._slice, self._other}.__contains__
        tids = sorted((slot for slot in defined if isinstance(slot, Tid) and not is_special(slot)), key=str)
        vids = st.sampled_from(sorted((slot for slot in defined if isinstance(slot, Vid)), key=str))
        return {
            "Tid": st.sampled_from(tids),
            "Vid": vids,
            "IntOrVid": st.integers(-5, 5) | vids,
            "FloatOrVid": st.floats(width=32, allow_nan=False) | vids,
        }.get(type_name, _BY_TYPE.get(type_name, st.nothing()))


@st.composite
def runnable_graphs(draw: st.DrawFn) -> Graph:
    """Graphs that the verifier has to accept."""
    return _RunnableGraphs(draw).graph
