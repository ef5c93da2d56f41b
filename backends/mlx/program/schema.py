"""The wire format's tables as Python classes, made from the field tables generated at build.

A slot of a graph is a ``Tid`` (tensor) or a ``Vid`` (scalar value). Where the format lets a field be one of several
things (a literal or a slot), Python's own types say which: an int or float is the literal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from ._schema import ENUMS, TABLES, UNIONS


@dataclass(frozen=True)
class Tid:
    """A tensor slot. Slots are numbered constants, inputs, outputs, mutable buffers, temporaries, in this order."""

    idx: int


@dataclass(frozen=True)
class Vid:
    """A scalar value's slot."""

    idx: int


class Field(NamedTuple):
    """One field of a table: see ``tools/generate_schema.py``."""

    name: str
    number: int
    type: str
    is_vector: bool
    required: bool
    default: Any


FIELDS: dict[str, tuple[Field, ...]] = {name: tuple(Field(*row) for row in rows) for name, rows in TABLES.items()}
NODE_KINDS: tuple[str, ...] = tuple(UNIONS["OpNode"])


class SlotType(IntEnum):
    """What a slot of an input or output map holds."""

    TensorSlot = ENUMS["SlotType"]["TensorSlot"]
    IntValueSlot = ENUMS["SlotType"]["IntValueSlot"]
    FloatValueSlot = ENUMS["SlotType"]["FloatValueSlot"]
    BoolValueSlot = ENUMS["SlotType"]["BoolValueSlot"]


_WRITTEN = frozenset({"out", "outs", "outputs"})
_WRITTEN_BY_KIND = {"ScanNode": frozenset({"outputs", "sliced"})}


class Node:
    """One instruction: its kind (a name of the format's op union) and its fields as attributes."""

    __slots__ = ("__dict__", "kind")

    kind: str

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.kind, dict(self.__dict__))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.kind} has no field {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.kind == other.kind and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # nodes are mutable

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if value is not None)
        return f"{self.kind}({fields})"

    def writes(self, name: str) -> bool:
        """Whether a field names what the node writes; all others that name a slot are read."""
        return name in _WRITTEN_BY_KIND.get(self.kind, _WRITTEN)

    def slots(self) -> Iterator[tuple[str, Tid | Vid]]:
        """Yield (field name, slot) for every slot the node names, those in lists included."""
        for name, value in self.__dict__.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, (Tid, Vid)):
                    yield name, item


def make_node(kind: str, **fields: Any) -> Node:
    """Build a node, with the format's defaults for fields not given.

    Raises:
        TypeError: an unknown kind or field, or a required field left out.
    """
    if kind not in NODE_KINDS:
        raise TypeError(f"{kind!r} is no op node of the installed format")
    declared = FIELDS[kind]
    unknown = fields.keys() - {row.name for row in declared}
    missing = [row.name for row in declared if row.required and fields.get(row.name) is None]
    if unknown or missing:
        raise TypeError(f"{kind}: unknown fields {sorted(unknown)}, missing fields {missing}")
    return Node(kind, {row.name: fields.get(row.name, row.default) for row in declared})


@dataclass
class InstructionChain:
    """Instructions that run in order."""

    instructions: list[Node]


@dataclass
class SlotVariant:
    """A slot in an input or output map: a tensor's, or a value's with its type."""

    idx: int
    slot_type: int = 0

    @property
    def slot(self) -> Tid | Vid:
        """The slot as instructions name it."""
        return Tid(self.idx) if self.slot_type == SlotType.TensorSlot else Vid(self.idx)


@dataclass
class NamedSlot:
    """A slot by name; a constant's name is its key in the program's named data."""

    name: str
    slot: SlotVariant


@dataclass
class ShapeDim:
    """One dimension: a static ``value``, or -1 and bounds (``max_value`` -1: unbounded)."""

    value: int = -1
    min_value: int = 0
    max_value: int = -1


@dataclass
class TensorMeta:
    """Shape and ScalarType of a constant, input, output or mutable buffer."""

    shape: list[ShapeDim]
    scalar_type: int = 0
    dim_order: list[int] | None = None


@dataclass
class Graph:
    """The root: one delegate's program.

    ``tensor_meta`` is indexed by Tid and covers all tensors but the temporaries; an entry may be None.
    """

    version: str | None = None
    num_constant_tensors: int = 0
    num_input_tensors: int = 0
    num_output_tensors: int = 0
    num_mutable_buffer_tensors: int = 0
    num_temp_tensors: int = 0
    num_values: int = 0
    instruction_chains: list[InstructionChain] = field(default_factory=list)
    main_chain_idx: int = 0
    init_chain_idx: int = -1
    input_map: list[SlotVariant] = field(default_factory=list)
    output_map: list[SlotVariant] = field(default_factory=list)
    mutable_buffer_map: list[SlotVariant] = field(default_factory=list)
    named_slots: list[NamedSlot] = field(default_factory=list)
    tensor_meta: list[TensorMeta | None] = field(default_factory=list)

    @property
    def input_tensors(self) -> range:
        """The tensor slots of inputs."""
        return range(self.num_constant_tensors, self.num_constant_tensors + self.num_input_tensors)

    @property
    def buffer_tensors(self) -> range:
        """The tensor slots of mutable buffers."""
        first = self.input_tensors.stop + self.num_output_tensors
        return range(first, first + self.num_mutable_buffer_tensors)

    @property
    def num_tensors(self) -> int:
        """All tensor slots."""
        return self.buffer_tensors.stop + self.num_temp_tensors


# Tables that have a class of their own; all others are op nodes.
CONTAINERS: dict[str, type] = {
    "InstructionChain": InstructionChain,
    "MLXGraph": Graph,
    "NamedSlot": NamedSlot,
    "ShapeDim": ShapeDim,
    "SlotVariant": SlotVariant,
    "TensorMeta": TensorMeta,
}
