"""Turn ExecuTorch's MLX wire format (schema.fbs) into the field tables that `program/` works from.

The installed wheel's schema is the source; nothing generated is committed. What a field's position in its vtable is,
how wide it is and whether it may be absent follows from FlatBuffers' rules for table layout
(https://flatbuffers.dev/internals): fields are numbered in order of declaration, a union takes two numbers.
"""

import re

_DECLARATION = re.compile(r"\b(table|struct|union|enum)\s+(\w+)\s*(?::\s*(\w+)\s*)?\{(.*?)\}", re.S)
_FIELD = re.compile(r"(\w+)\s*:\s*(\[?)\s*(\w+)\s*\]?\s*(?:=\s*([^\s(;]+))?\s*(\([^)]*\))?\s*$")
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


def generate(schema: str) -> str:
    """Return Python source holding TABLES, STRUCTS, UNION and ENUMS for the schema text given."""
    text = re.sub(r"//[^\n]*", "", schema)
    tables, structs, unions, enums = {}, {}, {}, {}
    declarations = _DECLARATION.findall(text)
    for kind, name, base, body in declarations:
        if kind == "enum":
            members = [part.strip() for part in body.split(",") if part.strip()]
            pairs = [[piece.strip() for piece in member.split("=")] for member in members]
            enums[name] = {key: int(value) for key, value in pairs}
            enums[name]["__base__"] = base
        elif kind == "union":
            unions[name] = [part.strip() for part in body.split(",") if part.strip()]
    for kind, name, _, body in declarations:
        if kind not in ("table", "struct"):
            continue
        rows, number = [], 0
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            match = _FIELD.match(statement)
            if not match:
                raise ValueError(f"schema.fbs: cannot read the field {statement!r} of {kind} {name}")
            field, vector, type_name, default, attributes = match.groups()
            if type_name in unions:
                number += 1  # the union's type tag comes first
            scalar = not vector and (type_name in _SCALARS or type_name in enums)
            required = "required" in (attributes or "")
            value = _default(default, type_name, enums) if scalar else None
            rows.append((field, number, type_name, bool(vector), required, value))
            number += 1
        (tables if kind == "table" else structs)[name] = rows
    bases = {name: members.pop("__base__") for name, members in enums.items()}
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
