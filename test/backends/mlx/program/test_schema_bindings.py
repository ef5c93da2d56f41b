"""The generated field tables say what flatc reads in the same schema."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flatc_oracle import camel, describe_schema, generate_bindings

from executorch_mlx.backends.mlx.program import NODE_KINDS, SlotType
from executorch_mlx.backends.mlx.program._schema import ENUM_BASES, ENUMS, STRUCTS, TABLES, UNIONS
from executorch_mlx.backends.mlx.program.schema import FIELDS, Field

_PREFIX = "mlx_delegate."
# FlatBuffers' name for each scalar of the schema language.
_BASE_TYPES = {
    "bool": "Bool",
    "byte": "Byte",
    "double": "Double",
    "float": "Float",
    "int8": "Byte",
    "int32": "Int",
    "int64": "Long",
    "uint8": "UByte",
    "uint32": "UInt",
    "uint64": "ULong",
    "string": "String",
}
_BUILDER_SUFFIXES = {
    "bool": "Bool",
    "byte": "Int8",
    "double": "Float64",
    "float": "Float32",
    "int8": "Int8",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "Uint8",
    "uint32": "Uint32",
    "uint64": "Uint64",
}
_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int64": 8, "uint64": 8, "double": 8}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return describe_schema(tmp_path_factory.mktemp("described"))


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """flatc's Python package, importable as ``mlx_delegate`` while these tests run."""
    folder = tmp_path_factory.mktemp("bindings")
    generate_bindings(folder)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("mlx_delegate")}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("mlx_delegate")]:
        del sys.modules[name]
    sys.modules.update(held)


class _RecordingBuilder:
    """Stands in for flatbuffers.Builder and notes what a generated function asks of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def recorded(module: Any, function: str, *arguments: Any) -> tuple[Any, ...]:
    builder = _RecordingBuilder()
    getattr(module, function)(builder, *arguments)
    (call,) = builder.calls
    return call


def upper_camel(name: str) -> str:
    text = camel(name)
    return text[0].upper() + text[1:]


def described_type(described: dict[str, Any], type_: dict[str, Any]) -> tuple[str, bool]:
    """Return (name, is a vector) of a described type: a scalar's FlatBuffers name or a declaration's own."""
    is_vector = type_["base_type"] == "Vector"
    base = type_["element"] if is_vector else type_["base_type"]
    if base in ("Obj", "Union") or type_["index"] >= 0:
        where = described["objects"] if base == "Obj" else described["enums"]
        return where[type_["index"]]["name"].removeprefix(_PREFIX), is_vector
    return base, is_vector


def described_default(field: dict[str, Any]) -> Any:
    base = field["type"]["base_type"]
    if field["optional"] or base in ("Vector", "Obj", "Union", "String"):
        return None
    if base in ("Float", "Double"):
        return field["default_real"]
    return bool(field["default_integer"]) if base == "Bool" else field["default_integer"]


def test_field_tables_name_every_table_and_struct_of_the_schema(described: dict[str, Any]) -> None:
    names = {True: set(), False: set()}
    for entry in described["objects"]:
        names[entry["is_struct"]].add(entry["name"].removeprefix(_PREFIX))
    assert names[False] == set(FIELDS) == set(TABLES)
    assert names[True] == set(STRUCTS)


@pytest.mark.parametrize("table", FIELDS)
def test_fields_of_a_table_agree_with_flatc_in_number_type_presence_and_default(
    described: dict[str, Any], table: str
) -> None:
    (entry,) = (entry for entry in described["objects"] if entry["name"] == _PREFIX + table)
    expected = []
    for field in sorted(entry["fields"], key=lambda field: field["id"]):
        if field["type"]["base_type"] == "UType":
            continue
        name, is_vector = described_type(described, field["type"])
        expected.append((field["name"], field["id"], name, is_vector, field["required"], described_default(field)))
        assert field["offset"] == 4 + 2 * field["id"]
    actual = [row._replace(type=_BASE_TYPES.get(row.type, row.type)) for row in FIELDS[table]]
    assert actual == expected


@pytest.mark.parametrize("table", FIELDS)
def test_fields_of_a_table_agree_with_the_bindings_that_flatc_generates(bindings: Path, table: str) -> None:
    module = importlib.import_module(f"mlx_delegate.{table}")
    unpacked = getattr(module, f"{table}T")()
    attributes = [camel(row.name) for row in FIELDS[table]]
    tags = [camel(f"{row.name}_type") for row in FIELDS[table] if row.type in UNIONS]
    assert sorted(vars(unpacked)) == sorted(attributes + tags)
    assert recorded(module, f"{table}Start") == ("StartObject", len(attributes) + len(tags))
    for row in FIELDS[table]:
        base = ENUM_BASES.get(row.type, row.type)
        adder = f"{table}Add{upper_camel(row.name)}"
        is_scalar = not row.is_vector and base in _BUILDER_SUFFIXES
        if is_scalar:
            expected = (f"Prepend{_BUILDER_SUFFIXES[base]}Slot", row.number, "given", row.default)
            assert recorded(module, adder, "given") == expected
            assert getattr(unpacked, camel(row.name)) == row.default
        else:
            kind = "Struct" if row.type in STRUCTS and not row.is_vector else "UOffsetTRelative"
            assert recorded(module, adder, 0) == (f"Prepend{kind}Slot", row.number, 0, 0)
            assert getattr(unpacked, camel(row.name)) is None
        if row.is_vector:
            width = _BYTES.get(base, 4)
            starter = f"{table}Start{upper_camel(row.name)}Vector"
            assert recorded(module, starter, 7) == ("StartVector", width, 7, width)


def test_node_kinds_are_the_op_union_in_order(bindings: Path) -> None:
    union = importlib.import_module("mlx_delegate.OpNode").OpNode
    tags = {name: tag for name, tag in vars(union).items() if isinstance(tag, int)}
    assert tags == {"NONE": 0} | {kind: tag for tag, kind in enumerate(NODE_KINDS, 1)}


def test_slot_types_are_the_enum_of_the_schema(bindings: Path, described: dict[str, Any]) -> None:
    enum = importlib.import_module("mlx_delegate.SlotType").SlotType
    assert {name: value for name, value in vars(enum).items() if isinstance(value, int)} == {
        member.name: int(member) for member in SlotType
    }
    declared = {entry["name"] for entry in described["enums"] if not entry["is_union"]}
    assert declared == {_PREFIX + name for name in ENUMS}


@pytest.mark.parametrize("struct", ["Tid", "Vid"])
def test_slots_are_structs_of_one_uint32(described: dict[str, Any], struct: str) -> None:
    (entry,) = (entry for entry in described["objects"] if entry["name"] == _PREFIX + struct)
    (field,) = entry["fields"]
    assert (field["name"], field["type"]["base_type"], entry["bytesize"]) == ("idx", "UInt", 4)
    assert [Field(*row) for row in STRUCTS[struct]] == [("idx", 0, "uint32", False, False, 0)]
