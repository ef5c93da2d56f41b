"""Matrix products and convolutions, dense and quantized."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from ..types import FLOATS, INTEGERS, ONE, SIZE, Range, Shape, TensorType, broadcast, exactly, product, promoted, shown
from .base import Call, Result, Rule, require, require_broadcast, require_same

# What convolutions and quantized products are computed in.
COMPUTED = FLOATS - {"float64"}


def _matmul_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """Return the shape of a product of matrices; vectors are rows on the left and columns on the right."""
    require(a != () and b != (), "a factor has no axes")
    if a is None or b is None:
        return None
    left, right = (a if len(a) > 1 else (ONE, *a)), (b if len(b) > 1 else (*b, ONE))
    _check_inner(left, right)
    batch = broadcast(left[:-2], right[:-2])
    assert batch is not None, "both are known"
    return (*batch, *(left[-2:-1] if len(a) > 1 else ()), *(right[-1:] if len(b) > 1 else ()))


def _check_inner(a: Shape, b: Shape) -> None:
    require(a[-1].meets(b[-2]), f"{a[-1]} columns and {b[-2]} rows, of tensors of shapes {shown(a)} and {shown(b)}")


def _addmm(call: Call) -> Result:
    mat1, mat2 = call.tensor("mat1"), call.tensor("mat2")
    bias = [call.tensor("bias")] if call.has("bias") else []
    dtype = promoted(mat1.dtype, mat2.dtype, *[x.dtype for x in bias])
    _check_floats(dtype)
    shape = _matmul_shape(mat1.shape, mat2.shape)
    for x in bias:
        require_broadcast("bias", x.shape, "the product", shape)
    return TensorType(shape, dtype)


def _check_floats(dtype: str | None, floats: Collection[str] = FLOATS) -> None:
    require(dtype is None or dtype in floats, f"computed in {dtype}, expected one of {', '.join(sorted(floats))}")


def _convolution(letters: str, *, is_transposed: bool = False) -> Rule:
    """A convolution: x [N, sizes, channels], w [out channels, sizes, channels / groups]."""
    endings = [f"_{letter}" for letter in letters] if len(letters) > 1 else [""]

    def rule(call: Call) -> Result:
        rank = len(letters) + 2
        x, w = call.rank("x", rank), call.rank("w", rank)
        groups = call.node.groups
        call.number("groups", 1)
        ways = []
        for ending in endings:
            stride, dilation = call.number(f"stride{ending}", 1), call.number(f"dilation{ending}", 1)
            padding, more = call.number(f"padding{ending}", 0), exactly(0)
            if is_transposed:
                more = call.number(f"output_padding{ending}", 0)
                bound = max(stride.low, dilation.low)
                require(more.low < bound, f"output_padding{ending} is {more}, expected less than {bound}")
            ways.append((stride, padding, dilation, more))
        dtype = promoted(x.dtype, w.dtype)
        for given in (x.dtype, dtype):
            _check_floats(given, COMPUTED)
        if w.shape is None:
            return TensorType(None, dtype)
        require(all(size.high > 0 for size in w.shape), f"w has shape {shown(w.shape)}, without elements")
        require(
            not w.shape[0].is_exact or w.shape[0].low % groups == 0, f"{w.shape[0]} channels out, for {groups} groups"
        )
        if x.shape is None:
            return TensorType(None, dtype)
        is_empty = is_transposed and any(size.high == 0 for size in x.shape[1:-1])
        require(not is_empty, f"x has shape {shown(x.shape)}, without places")
        require_same(x.shape[-1], w.shape[-1] * exactly(groups), "channels of x, and of w times groups")
        padded = [
            size * stride + dilation * kernel + more if is_transposed else size + padding + padding
            for size, kernel, (stride, padding, dilation, more) in zip(x.shape[1:-1], w.shape[1:-1], ways, strict=True)
        ]
        sizes = [
            _transposed_size(size, kernel, *way) if is_transposed else _convolved_size(size, kernel, *way)
            for size, kernel, way in zip(x.shape[1:-1], w.shape[1:-1], ways, strict=True)
        ]
        # MLX unfolds its padded operand: a row for each place of the result, of what the kernel covers there.
        places, channels = (x.shape[0], *sizes), w.shape[-1] * exactly(groups)
        unfolded = product((*places, *w.shape[1:-1], channels))
        call.scratch = TensorType((unfolded + product((x.shape[0], *padded, channels)),), dtype).bytes
        return TensorType((*places, w.shape[0]), dtype)

    return rule


def _convolved_size(size: Range, kernel: Range, stride: Range, padding: Range, dilation: Range, _: Range) -> Range:
    room = size + padding + padding - (dilation * (kernel - ONE) + ONE)
    require(room.high >= 0, f"an axis of {size}, padded by {padding}, is smaller than a kernel of {kernel}")
    return Range(max(room.low, 0), room.high) // stride + ONE


def _transposed_size(size: Range, kernel: Range, stride: Range, padding: Range, dilation: Range, more: Range) -> Range:
    reach = dilation * (kernel - ONE)
    result = (size - ONE) * stride - padding - padding + reach + more + ONE
    require(result.high > 0, f"an axis of {size}, of which padding {padding} leaves nothing")
    return Range(max(result.low, 0), result.high)


# -- quantized ------------------------------------------------------------------


class _Mode(NamedTuple):
    """A form of quantization: what ``mlx.core.quantize`` says of its modes."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]
    has_biases: bool


_MODES = {
    "affine": _Mode((32, 64, 128), (2, 3, 4, 5, 6, 8), True),
    "mxfp4": _Mode((32,), (4,), False),
    "mxfp8": _Mode((32,), (8,), False),
    "nvfp4": _Mode((16,), (4,), False),
}


def _packed(call: Call, least: int) -> tuple[Shape | None, str | None]:
    """Check a quantized matrix; return its shape as it is unpacked, and the dtype of its numbers."""
    call.one_of("mode", _MODES)
    mode = _MODES[call.node.mode]
    call.one_of("group_size", mode.group_sizes)
    call.one_of("bits", mode.bits)
    require(call.has("biases") == mode.has_biases, f"biases: mode {call.node.mode!r} {_needs(mode.has_biases)} them")
    w, scales = call.tensor("w", {"uint32"}), call.tensor("scales", FLOATS if mode.has_biases else {"uint8"})
    biases = call.tensor("biases", FLOATS)
    call.rank("w", least, math.inf)
    dtype = promoted(scales.dtype, biases.dtype) if mode.has_biases else None
    if w.shape is None:
        return None, dtype
    columns = w.shape[-1] * exactly(32)
    if columns.is_exact:
        require(columns.low % call.node.bits == 0, f"w has {w.shape[-1]} words a row, which are no numbers of its bits")
        columns = columns // exactly(call.node.bits)
    else:
        columns = SIZE
    for name, x in (("scales", scales), ("biases", biases)):
        if x.shape is None:
            continue
        # MLX takes their word for it.
        call.is_open |= not all(size.is_exact for size in (*w.shape, *x.shape))
        fits = len(x.shape) == len(w.shape) and all(a.meets(b) for a, b in zip(x.shape[:-1], w.shape[:-1], strict=True))
        require(
            fits and (x.shape[-1] * exactly(call.node.group_size)).meets(columns),
            f"{name} has shape {shown(x.shape)}, for w of {shown((*w.shape[:-1], columns))} in groups of"
            f" {call.node.group_size}",
        )
    return (*w.shape[:-1], columns), dtype


def _needs(has: bool) -> str:
    return "needs" if has else "has none of"


def _dequantize(call: Call) -> Result:
    shape, dtype = _packed(call, 1)
    if call.has("dtype"):
        dtype = call.scalar_type("dtype")
        require(dtype in FLOATS, f"dtype is {dtype}, expected floats")
    if call.has("global_scale"):
        require(call.node.mode == "nvfp4", "global_scale: of mode 'nvfp4' only")
        call.tensor("global_scale", {"float32"})
    return TensorType(shape, dtype)


def _quantized_factors(call: Call) -> tuple[Shape | None, Shape | None, str | None]:
    """Check the factors of a quantized product; return their shapes and the product's dtype."""
    x, (w, dtype) = call.tensor("x", COMPUTED), _packed(call, 2)
    dtype = promoted(x.dtype, dtype) if call.node.mode == "affine" else x.dtype
    _check_floats(dtype, COMPUTED)
    if w is not None and call.node.transpose:
        w = (*w[:-2], w[-1], w[-2])
    require(x.shape is None or len(x.shape) < 2 or x.shape[-2].high > 0, f"x has shape {shown(x.shape)}, without rows")
    return x.shape, w, dtype


def _quantized_matmul(call: Call) -> Result:
    x, w, dtype = _quantized_factors(call)
    return TensorType(_matmul_shape(x, w), dtype)


def _gathered(call: Call, a: Shape | None, b: Shape | None) -> Shape | None:
    """Return the shape of products of matrices chosen from two batches."""
    require(a is None or len(a) >= 2, f"a factor of shape {shown(a)} holds no matrices")
    require(b is None or len(b) >= 2, f"a factor of shape {shown(b)} holds no matrices")
    chosen = []
    for field, batch in (("lhs_indices", a), ("rhs_indices", b)):
        if call.has(field):
            chosen.append(call.tensor(field, INTEGERS).shape)
        else:
            chosen.append(None if batch is None else batch[:-2])
    places = broadcast(*chosen)
    if a is None or b is None:
        return None
    _check_inner(a, b)
    return None if places is None else (*places, a[-2], b[-1])


def _gather_mm(call: Call) -> Result:
    _check_flag(call)
    a, b = call.tensor("a", FLOATS), call.tensor("b", FLOATS)
    return TensorType(_gathered(call, a.shape, b.shape), a.dtype)


def _gather_qmm(call: Call) -> Result:
    _check_flag(call)
    x, w, dtype = _quantized_factors(call)
    return TensorType(_gathered(call, x, w), dtype)


def _check_flag(call: Call) -> None:
    if call.has("sorted_indices_flag"):
        call.number("sorted_indices_flag")


RULES: dict[str, Rule] = {
    "AddmmNode": _addmm,
    "Conv1DNode": _convolution("w"),
    "Conv2DNode": _convolution("hw"),
    "Conv3DNode": _convolution("dhw"),
    "ConvTranspose1DNode": _convolution("w", is_transposed=True),
    "ConvTranspose2DNode": _convolution("hw", is_transposed=True),
    "ConvTranspose3DNode": _convolution("dhw", is_transposed=True),
    "DequantizeNode": _dequantize,
    "GatherMmNode": _gather_mm,
    "GatherQmmNode": _gather_qmm,
    "QuantizedMatmulNode": _quantized_matmul,
}
