"""Turn ExecuTorch's MLX wire format (schema.fbs) into the field tables that `program/` works from.

The installed wheel's schema is the source; nothing generated is committed. What a field's position in its vtable is,
how wide it is and whether it may be absent follows from FlatBuffers' rules for table layout
(https://flatbuffers.dev/internals): fields are numbered in order of declaration, a union takes two numbers.
"""

import re

_DECLARATION = re.compile(r"\b(table|struct|union|enum)\s+(\w+)\s*(?::\s*(\w+)\s*)?\{(.*?)\}", re.S)
_FIELD = re.compile(
    r"(?P<name>\w+)\s*:\s*(?:\[\s*(?P<item>\w+)\s*\]|(?P<type>\w+))"
    r"\s*(?:=\s*(?P<default>[^\s(;]+))?\s*(?:\(\s*(?P<attribute>required|deprecated)\s*\))?\s*$"
)
# What program/codec.py can read; another scalar needs a line there first.
_SCALARS = {"bool", "byte", "double", "float", "int8", "int32", "int64", "uint8", "uint32", "uint64"}

_HEADER = '''"""Field tables of ExecuTorch's MLX wire format.

Generated at build from the installed schema.fbs; do not edit.
"""

# table: (field, vtable index, type, is a vector, required, default); the default None marks an absent value.
'''


def _default(text, type_name, enums):
    if text is None:
        return {"bool": False, "float": 0.0, "double": 0.0}.get(type_name, 0)
    if text == "null":
        return None
    if text in ("true", "false"):
        return text == "true"
    if type_name in enums:
        return enums[type_name][text]
    return float(text) if type_name in ("float", "double") else int(text)


def _enum(body):
    members, value = {}, 0
    for member in filter(None, (part.strip() for part in body.split(","))):
        name, _, given = (piece.strip() for piece in member.partition("="))
        value = int(given) if given else value
        members[name] = value
        value += 1
    return members


def generate(schema: str) -> str:
    """Return Python source holding TABLES, STRUCTS, UNION and ENUMS for the schema text given."""
    text = re.sub(r"//[^\n]*", "", schema)
    tables, structs, unions, enums, bases = {}, {}, {}, {}, {}
    declarations = _DECLARATION.findall(text)
    for kind, name, base, body in declarations:
        if kind == "enum":
            enums[name], bases[name] = _enum(body), base
        elif kind == "union":
            unions[name] = [part.strip() for part in body.split(",") if part.strip()]
    known = {"string", *_SCALARS, *unions, *enums, *(name for kind, name, _, _ in declarations)}
    for kind, name, _, body in declarations:
        if kind not in ("table", "struct"):
            continue
        rows, number = [], 0
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            match = _FIELD.match(statement)
            if not match:
                raise ValueError(f"schema.fbs: cannot read the field {statement!r} of {kind} {name}")
            type_name = match["item"] or match["type"]
            if type_name not in known:
                raise ValueError(f"schema.fbs: unknown type {type_name!r} of field {match['name']} of {kind} {name}")
            if type_name in unions:
                number += 1  # the union's type tag comes first
            scalar = match["type"] is not None and (type_name in _SCALARS or type_name in enums)
            value = _default(match["default"], type_name, enums) if scalar else None
            required = match["attribute"] == "required"
            rows.append((match["name"], number, type_name, match["item"] is not None, required, value))
            number += 1
        (tables if kind == "table" else structs)[name] = rows
    parts = [_HEADER, "TABLES = {\n"]
    for name, rows in tables.items():
        parts.append(f"    {name!r}: (\n")
        parts += [f"        {row!r},\n" for row in rows]
        parts.append("    ),\n")
    parts.append("}\n\n")
    parts.append(f"STRUCTS = {structs!r}\n\n")
    parts.append(f"UNIONS = {unions!r}\n\n")
    parts.append(f"ENUMS = {enums!r}\n\n")
    parts.append(f"ENUM_BASES = {bases!r}\n")
    return "".join(parts)
