"""The build step that turns a FlatBuffers schema into field tables."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from flatc_oracle import SCHEMA

from executorch_mlx.backends.mlx.program import _schema
from oracles.tools import tool

# The Python types of False, 0 and 0.0 tell the scalars apart; == does not.
Row = tuple[str, int, str, bool, bool, Any]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    module: ModuleType = tool("generate_schema")
    return module


def evaluated(generator: ModuleType, schema: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(generator.generate(schema), namespace)
    return namespace


def rows_of(generator: ModuleType, fields: str, others: str = "") -> tuple[Row, ...]:
    rows: tuple[Row, ...] = evaluated(generator, f"{others} table T {{ {fields} }}")["TABLES"]["T"]
    return rows


def test_the_tables_in_use_are_those_of_the_installed_schema(generator: ModuleType) -> None:
    generated = evaluated(generator, SCHEMA.read_text())
    for name in ("TABLES", "STRUCTS", "UNIONS", "ENUMS", "ENUM_BASES"):
        assert generated[name] == getattr(_schema, name)


def test_generated_source_is_the_same_for_the_same_schema(generator: ModuleType) -> None:
    schema = SCHEMA.read_text()
    assert generator.generate(schema) == generator.generate(schema)


FIELD_SAMPLES = [
    ("x: int32;", "int32", False, False, 0),
    ("x: int32 = 7;", "int32", False, False, 7),
    ("x: int32 = -1;", "int32", False, False, -1),
    ("x: int8 = null;", "int8", False, False, None),
    ("x: float = null;", "float", False, False, None),
    ("x: uint64 = 18446744073709551615;", "uint64", False, False, 2**64 - 1),
    ("x: float;", "float", False, False, 0.0),
    ("x: float = 1;", "float", False, False, 1.0),
    ("x: float = 500000.0;", "float", False, False, 500000.0),
    ("x: double = -2.5e-3;", "double", False, False, -0.0025),
    ("x: bool;", "bool", False, False, False),
    ("x: bool = true;", "bool", False, False, True),
    ("x: bool = false;", "bool", False, False, False),
    ("x: string;", "string", False, False, None),
    ("x: string (required);", "string", False, True, None),
    ("x:string(required);", "string", False, True, None),
    ("x : [ int32 ] ;", "int32", True, False, None),
    ("x: [S] (required);", "S", True, True, None),
    ("x: S;", "S", False, False, None),
    ("x: Other (required);", "Other", False, True, None),
    ("x: E;", "E", False, False, 0),
    ("x: E = Two;", "E", False, False, 2),
    ("x: E = null;", "E", False, False, None),
    ("x: int32 = 3 (deprecated);", "int32", False, False, 3),
]
DECLARED = "struct S { idx: uint32; } table Other {} enum E : byte { Zero = 0, Two = 2 }"


@pytest.mark.parametrize(
    ("field", "type_name", "is_vector", "is_required", "default"),
    [pytest.param(*sample, id=sample[0]) for sample in FIELD_SAMPLES],
)
def test_a_field_is_read_with_its_type_presence_and_default(
    generator: ModuleType, field: str, type_name: str, is_vector: bool, is_required: bool, default: Any
) -> None:
    (row,) = rows_of(generator, field, DECLARED)
    assert row == ("x", 0, type_name, is_vector, is_required, default)
    assert type(row[-1]) is type(default)


def test_fields_are_numbered_in_order_and_a_union_takes_two_numbers(generator: ModuleType) -> None:
    rows = rows_of(generator, "a: int32; op: U; b: [int8]; c: bool;", "table A {} table B {} union U { A, B }")
    assert [(name, number, type_name) for name, number, type_name, *_ in rows] == [
        ("a", 0, "int32"),
        ("op", 2, "U"),
        ("b", 3, "int8"),
        ("c", 4, "bool"),
    ]


def test_unions_keep_their_order(generator: ModuleType) -> None:
    schema = "table B {} table A {} union Op { B,\n  A // last\n }"
    assert evaluated(generator, schema)["UNIONS"] == {"Op": ["B", "A"]}


def test_enums_keep_their_values_and_their_base(generator: ModuleType) -> None:
    generated = evaluated(generator, "enum Sort : byte { One = 1, Two = 2, Nine = 9, }")
    assert generated["ENUMS"] == {"Sort": {"One": 1, "Two": 2, "Nine": 9}}
    assert generated["ENUM_BASES"] == {"Sort": "byte"}


def test_structs_are_apart_from_tables(generator: ModuleType) -> None:
    generated = evaluated(generator, "struct S { idx: uint32; } table T {}")
    assert generated["STRUCTS"] == {"S": [("idx", 0, "uint32", False, False, 0)]}
    assert generated["TABLES"] == {"T": ()}


def test_comments_are_not_read(generator: ModuleType) -> None:
    fields = """
        // a: int32; table X { y: int32; }
        b: int32 = 4; // = 5; (required)
        /// documented: c: bool;
        d: [int32];   // Empty = all
    """
    assert [row[0] for row in rows_of(generator, fields)] == ["b", "d"]
    assert rows_of(generator, fields)[0] == ("b", 0, "int32", False, False, 4)


def test_the_order_of_declarations_does_not_matter(generator: ModuleType) -> None:
    before = evaluated(generator, "enum E : byte { A = 3 } table T { x: E = A; }")
    after = evaluated(generator, "table T { x: E = A; } enum E : byte { A = 3 }")
    assert before["TABLES"] == after["TABLES"] == {"T": (("x", 0, "E", False, False, 3),)}


@pytest.mark.parametrize(
    "field",
    [
        "x int32",
        "x: [int32",
        "x: [int32:4]",
        "x: other.Thing",
        "x: int32 = ",
        "x: int32 = 1 2",
        "/* x: int32",
    ],
)
def test_a_field_that_cannot_be_read_raises_naming_it_and_its_table(generator: ModuleType, field: str) -> None:
    with pytest.raises(ValueError, match=r"schema\.fbs: cannot read the field .*x.* of table Broken"):
        generator.generate(f"table Broken {{ good: int32; {field}; }}")


@pytest.mark.parametrize("type_name", ["int16", "ushort", "ubyte", "int", "long", "float64", "Undeclared"])
def test_a_type_that_is_not_known_raises_naming_the_field(generator: ModuleType, type_name: str) -> None:
    with pytest.raises(ValueError, match=r"'?x.* of table Broken"):
        generator.generate(f"table Broken {{ x: {type_name}; }}")


def test_an_explicit_field_number_is_not_passed_over(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"'x: int32 \(id: 1\)' of table Broken"):
        generator.generate("table Broken { x: int32 (id: 1); y: int32 (id: 0); }")


def test_a_default_that_the_enum_does_not_have_raises_naming_it(generator: ModuleType) -> None:
    with pytest.raises((KeyError, ValueError), match="Three"):
        generator.generate("enum E : byte { One = 1 } table T { x: E = Three; }")


def test_enum_members_without_a_value_count_on(generator: ModuleType) -> None:
    generated = evaluated(generator, "enum Sort : byte { Zero, Four = 4, Five }")
    assert generated["ENUMS"] == {"Sort": {"Zero": 0, "Four": 4, "Five": 5}}
