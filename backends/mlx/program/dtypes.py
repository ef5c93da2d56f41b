"""ExecuTorch's ScalarType codes (runtime/core/portable_type/scalar_type.h) by name and width."""

SCALAR_TYPE_CODES = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
    "bfloat16": 15,
    "uint16": 27,
    "uint32": 28,
    "uint64": 29,
}
SCALAR_TYPE_NAMES = {code: name for name, code in SCALAR_TYPE_CODES.items()}
