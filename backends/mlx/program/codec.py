"""Payload bytes <-> graphs.

A payload is a 24-byte header (four zero bytes, the magic, then offset and size of a data segment that the format
reserves and nobody fills: constants travel in ExecuTorch's named data) and a FlatBuffer. The reader trusts no byte:
every offset is checked against the buffer, and no more is read than the buffer could hold, so that tables which share
their parts cannot make it run for long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import flatbuffers

from ._schema import ENUM_BASES
from .errors import ProgramError
from .schema import CONTAINERS, FIELDS, NODE_KINDS, Field, Graph, Node, Tid, Vid

MAGIC = b"MLX0"
HEADER_BYTES = 24
_ALIGNMENT = 16

# Wire name -> (struct format, the flatbuffers Builder's suffix).
_SCALARS = {
    "bool": ("<?", "Bool"),
    "byte": ("<b", "Int8"),
    "double": ("<d", "Float64"),
    "float": ("<f", "Float32"),
    "int8": ("<b", "Int8"),
    "int32": ("<i", "Int32"),
    "int64": ("<q", "Int64"),
    "uint8": ("<B", "Uint8"),
    "uint32": ("<I", "Uint32"),
    "uint64": ("<Q", "Uint64"),
}
_SCALARS |= {name: _SCALARS[base] for name, base in ENUM_BASES.items()}
_STRUCTS: dict[str, type[Tid] | type[Vid]] = {"Tid": Tid, "Vid": Vid}
# Literal-or-slot tables, and what stands for them in Python.
_SLOT_TABLES: dict[str, tuple[type, ...]] = {
    "IntOrVid": (int, Vid),
    "FloatOrVid": (float, int, Vid),
    "VidOrTid": (Vid, Tid),
    "IntOrVidOrTid": (int, Vid, Tid),
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {**_SLOT_TABLES, "Tid": (Tid,), "Vid": (Vid,), "string": (str,)}


def read_payload(payload: bytes) -> Graph:
    """Decode a delegate payload.

    Raises:
        ProgramError: too short, wrong magic, or a FlatBuffer that is damaged or lacks a required field.
    """
    if len(payload) < HEADER_BYTES:
        raise ProgramError(
            f"the delegate payload is truncated: expected a header of {HEADER_BYTES} bytes, got {len(payload)}"
        )
    magic, offset, size = struct.unpack_from("<4x4sQQ", payload)
    if magic != MAGIC:
        raise ProgramError(f"not an MLX delegate payload: expected magic {MAGIC!r}, got {magic!r}")
    if offset + size > len(payload) or (offset and offset < HEADER_BYTES):
        raise ProgramError(
            f"the delegate payload is truncated: its header promises {offset + size} bytes, got {len(payload)}"
        )
    reader = _Reader(payload[HEADER_BYTES : offset or len(payload)])
    try:
        graph: Graph = reader.table("MLXGraph", reader.offset(0))
    except struct.error as error:
        raise ProgramError(f"the delegate payload is damaged: {error}") from None
    return graph


def write_payload(graph: Graph) -> bytes:
    """Encode a graph as a delegate payload.

    Raises:
        TypeError: a field holds something else than the format has there, or a required one holds nothing.
    """
    builder = flatbuffers.Builder(4096)
    builder.Finish(_Writer(builder).table("MLXGraph", graph))
    body = bytes(builder.Output())
    end = HEADER_BYTES + len(body)
    padding = -end % _ALIGNMENT
    return struct.pack("<4x4sQQ", MAGIC, end + padding, 0) + body + bytes(padding)


class _Reader:
    """Reads tables by their field lists. ``struct`` refuses to read past the end; positions here are never negative."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._budget = len(data) + 1024
        self._strings: dict[int, str] = {}

    def offset(self, at: int) -> int:
        """Return the position that the unsigned offset at ``at`` points to."""
        return at + int(self._unpack("<I", at))

    def table(self, name: str, at: int) -> Any:
        """Read the table of this type at a position."""
        self._spend(1)
        vtable = at - self._unpack("<i", at)
        size = self._unpack("<H", vtable) if vtable >= 0 else 0
        if size < 4:
            raise ProgramError(f"the delegate payload is damaged: {name} at byte {at} has no field table")
        values = {}
        for row in FIELDS[name]:
            entry = 4 + 2 * row.number
            place = self._unpack("<H", vtable + entry) if entry + 2 <= size else 0
            if not place:
                if row.required:
                    raise ProgramError(f"the delegate payload is damaged: {name} lacks its field {row.name!r}")
                values[row.name] = row.default
            elif row.type == "OpNode":
                tag_place = self._unpack("<H", vtable + entry - 2)
                tag = self._unpack("<B", at + tag_place) if tag_place else 0
                values[row.name] = self._op(tag, self.offset(at + place))
            elif row.is_vector:
                values[row.name] = self._vector(row, self.offset(at + place))
            else:
                values[row.name] = self._value(row.type, at + place)
        return _finish(name, values)

    def _op(self, tag: int, at: int) -> Any:
        if not 1 <= tag <= len(NODE_KINDS):
            raise ProgramError(
                f"unknown instruction {tag}: the installed ExecuTorch knows {len(NODE_KINDS)}; the program was made by"
                " a newer one, or is damaged"
            )
        return self.table(NODE_KINDS[tag - 1], at)

    def _value(self, type_name: str, at: int) -> Any:
        if type_name in _SCALARS:
            return self._unpack(_SCALARS[type_name][0], at)
        if type_name in _STRUCTS:
            return _STRUCTS[type_name](self._unpack("<I", at))
        at = self.offset(at)
        if type_name == "string":
            return self._string(at)
        return self.table(type_name, at)

    def _vector(self, row: Field, at: int) -> list[Any]:
        length = self._unpack("<I", at)
        self._spend(length)
        scalar = _SCALARS.get(row.type)
        stride = struct.calcsize(scalar[0]) if scalar else 4
        start = at + 4
        if start + stride * length > len(self._data):
            raise ProgramError(f"the delegate payload is damaged: {row.name!r} claims {length} entries")
        places = range(start, start + stride * length, stride)
        if row.name == "tensor_meta":
            # The one vector whose entries may be absent: an offset of zero.
            return [self._value(row.type, place) if self._unpack("<I", place) else None for place in places]
        return [self._value(row.type, place) for place in places]

    def _string(self, at: int) -> str:
        if at in self._strings:
            return self._strings[at]
        length = self._unpack("<I", at)
        self._spend(length)
        raw = self._data[at + 4 : at + 4 + length]
        if len(raw) != length:
            raise ProgramError(f"the delegate payload is damaged: a string claims {length} bytes")
        try:
            text = self._strings[at] = raw.decode()
        except UnicodeDecodeError as error:
            raise ProgramError(f"the delegate payload is damaged: {error}") from None
        return text

    def _unpack(self, form: str, at: int) -> Any:
        return struct.unpack_from(form, self._data, at)[0]

    def _spend(self, units: int) -> None:
        self._budget -= units
        if self._budget < 0:
            raise ProgramError("the delegate payload is damaged: its tables overlap")


def _finish(name: str, values: dict[str, Any]) -> Any:
    """Turn a table's values into its Python form."""
    if name in CONTAINERS:
        if name in ("MLXGraph", "InstructionChain"):
            lists = {row.name for row in FIELDS[name] if row.is_vector}
            values = {key: [] if key in lists and value is None else value for key, value in values.items()}
        return CONTAINERS[name](**values)
    if name == "Instruction":
        return values["op"]
    if name in _SLOT_TABLES:
        return _slot_value(name, values)
    return Node(name, values)


def _slot_value(name: str, values: dict[str, Any]) -> Any:
    kind = values.get("kind", 0)
    if values.get("is_vid") or kind == 1:
        chosen = values["vid"]
    elif kind == 2 or "literal" not in values:
        chosen = values["tid"]
    else:
        chosen = values["literal"]
    if chosen is None or kind not in (0, 1, 2):
        raise ProgramError(f"the delegate payload is damaged: {name} names no slot")
    return chosen


class _Writer:
    """Writes tables depth first, as FlatBuffers wants."""

    def __init__(self, builder: flatbuffers.Builder) -> None:
        self._builder = builder

    def table(self, name: str, value: Any) -> int:
        """Write a table and return its offset."""
        if name in _SLOT_TABLES:
            value = _slot_fields(name, value)
        elif name == "Instruction":
            return self._instruction(value)
        fields = FIELDS[name]
        values = value if isinstance(value, dict) else {row.name: getattr(value, row.name) for row in fields}
        for row in fields:
            _check_field(name, row, values[row.name])
        offsets = {
            row.name: self._offset(row, values[row.name])
            for row in fields
            if values[row.name] is not None and not self._is_inline(row)
        }
        builder = self._builder
        builder.StartObject(max((row.number for row in fields), default=-1) + 1)
        for row in fields:
            item = values[row.name]
            if item is None or (not self._is_inline(row) and not offsets[row.name]):
                continue
            if not self._is_inline(row):
                builder.PrependUOffsetTRelativeSlot(row.number, offsets[row.name], 0)
            elif row.type in _STRUCTS:
                builder.PrependStructSlot(row.number, self._struct(item), 0)
            else:
                add: Callable[..., None] = getattr(builder, f"Prepend{_SCALARS[row.type][1]}Slot")
                add(row.number, item, row.default)
        return int(builder.EndObject())

    @staticmethod
    def _is_inline(row: Field) -> bool:
        return not row.is_vector and (row.type in _SCALARS or row.type in _STRUCTS)

    def _instruction(self, node: Node) -> int:
        offset = self.table(node.kind, node)
        builder = self._builder
        builder.StartObject(2)
        builder.PrependUint8Slot(0, NODE_KINDS.index(node.kind) + 1, 0)
        builder.PrependUOffsetTRelativeSlot(1, offset, 0)
        return int(builder.EndObject())

    def _offset(self, row: Field, value: Any) -> int:
        builder = self._builder
        if row.is_vector:
            return self._vector(row, value)
        if row.type == "string":
            return int(builder.CreateSharedString(value))
        return self.table(row.type, value)

    def _vector(self, row: Field, items: list[Any]) -> int:
        builder = self._builder
        if row.type in _SCALARS:
            form, suffix = _SCALARS[row.type]
            width = struct.calcsize(form)
            builder.StartVector(width, len(items), width)
            for item in reversed(items):
                getattr(builder, f"Prepend{suffix}")(item)
        elif row.type in _STRUCTS:
            builder.StartVector(4, len(items), 4)
            for item in reversed(items):
                self._struct(item)
        else:
            offsets = [
                0
                if item is None
                else builder.CreateSharedString(item)
                if row.type == "string"
                else self.table(row.type, item)
                for item in items
            ]
            builder.StartVector(4, len(items), 4)
            for offset in reversed(offsets):
                if offset:
                    builder.PrependUOffsetTRelative(offset)
                else:
                    builder.PrependUint32(0)
        return int(builder.EndVector())

    def _struct(self, slot: Tid | Vid) -> int:
        self._builder.Prep(4, 4)
        self._builder.PrependUint32(slot.idx)
        return int(self._builder.Offset())


def _check_field(table: str, row: Field, value: Any) -> None:
    if value is None:
        if row.required:
            raise TypeError(f"{table}.{row.name}: required, got None")
        return
    expected = _PYTHON_TYPES.get(row.type)
    for item in value if row.is_vector else (value,):
        if expected is not None and not isinstance(item, expected):
            names = " or ".join(kind.__name__ for kind in expected)
            raise TypeError(f"{table}.{row.name}: expected {names}, got {item!r}")


def _slot_fields(name: str, value: Any) -> dict[str, Any]:
    """The fields of a literal-or-slot table; the slots not meant are left out."""
    is_vid, is_tid = isinstance(value, Vid), isinstance(value, Tid)
    fields: dict[str, Any] = {row.name: row.default for row in FIELDS[name]}
    if is_vid or is_tid:
        fields["vid" if is_vid else "tid"] = value
    else:
        fields["literal"] = value
    if "kind" in fields:
        fields["kind"] = 1 if is_vid else 2 if is_tid else 0
    else:
        fields["is_vid"] = is_vid
    return fields
