"""Quantized weights in MLX's affine form, as an operator that PyTorch runs and exports.

A row of a weight is cut into groups; each group has a scale s and a bias b, and each number is a whole number q of a
few bits that stands for ``s * q + b`` (``mlx.core.quantize``, mode "affine").
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP_SIZES = (128, 64, 32)
"""Numbers that share a scale and a bias."""

BITS = (2, 3, 4, 5, 6, 8)
"""Bits of a number."""

# Rows are packed in pieces of about so many numbers: widths that are no power of two are spread out bit by bit.
_PIECE = 1 << 22


@torch.library.custom_op("executorch_mlx::dequantize", mutates_args=())
def dequantize(
    weight: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, group_size: int, bits: int
) -> torch.Tensor:
    """Return a quantized weight's numbers.

    In front of ``linear`` and ``embedding`` it is exported as one instruction with them, and the numbers never exist as
    a whole.

    Args:
        weight: int32 [rows, columns * bits / 32], see ``pack``.
        scales: [rows, columns / group_size].
        biases: as ``scales``.
        group_size: one of ``GROUP_SIZES``.
        bits: one of ``BITS``.

    Returns:
        [rows, columns], in the scales' dtype.
    """
    numbers = unpack(weight, bits).unflatten(-1, (-1, group_size)).to(scales.dtype)
    return (numbers * scales[..., None] + biases[..., None]).flatten(-2)


@dequantize.register_fake
def _(weight: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, group_size: int, bits: int) -> torch.Tensor:
    return scales.new_empty([weight.shape[0], weight.shape[1] * 32 // bits])


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack whole numbers densely, the first one in the lowest bits.

    Args:
        numbers: uint8 [rows, columns], each below 2^bits; the columns are a multiple of 32.
        bits: one of ``BITS``.

    Returns:
        int32 [rows, columns * bits / 32]: MLX takes them for unsigned, ExecuTorch's verifier refuses such.
    """
    rows, columns = numbers.shape
    if numbers.dtype is not torch.uint8 or bits not in BITS or columns % 32:
        raise ValueError(
            f"pack: expected uint8 in rows of a multiple of 32, and bits among {BITS}, got {numbers.dtype} in rows of"
            f" {columns}, {bits} bits"
        )
    if bits == 8:
        packed = numbers.contiguous()
    elif bits in (2, 4):
        parts = numbers.view(rows, -1, 8 // bits)
        packed = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            packed |= parts[..., place] << (place * bits)
    else:
        packed = torch.empty(rows, columns * bits // 8, dtype=torch.uint8)
        step = max(1, _PIECE // columns)
        for start in range(0, rows, step):
            packed[start : start + step] = _regrouped(numbers[start : start + step], bits, 8)
    return packed.view(torch.int32)


def unpack(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers that ``pack`` has packed, uint8 [rows, columns]."""
    return _regrouped(weight.view(torch.uint8), 8, bits)


def _regrouped(numbers: torch.Tensor, given: int, wanted: int) -> torch.Tensor:
    """Cut rows of numbers of ``given`` bits into numbers of ``wanted`` bits, lowest bits first."""
    if given == wanted:
        return numbers
    digits = numbers[..., None] >> torch.arange(given, dtype=torch.uint8) & 1
    groups = digits.flatten(-2).unflatten(-1, (-1, wanted))
    return (groups << torch.arange(wanted, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


class Affine(NamedTuple):
    """A weight in MLX's affine form: the arguments of ``dequantize``."""

    weight: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor
    group_size: int
    bits: int


def affine(
    numbers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, lowest: int, highest: int
) -> Affine:
    """Bring ``scale * (number - zero point)`` into MLX's form.

    Args:
        numbers: int8 or uint8 [rows, columns], from ``lowest`` to ``highest``.
        scales: [rows, blocks] of equal width, in the weight's dtype.
        zero_points: as the scales; None is zero.
        lowest: the lowest number that may occur.
        highest: the highest one.

    Raises:
        ValueError: the form cannot hold it; the message says why.
    """
    columns, blocks = numbers.shape[1], scales.shape[1]
    block = columns // blocks
    group_size = next((size for size in GROUP_SIZES if block % size == 0), None)
    if group_size is None:
        raise ValueError(f"{block} numbers share a scale, and MLX takes groups of {', '.join(map(str, GROUP_SIZES))}")
    bits = next((bits for bits in BITS if highest - lowest < 1 << bits), None)
    if bits is None:
        raise ValueError(f"its numbers are from {lowest} to {highest}, more than 8 bits hold")
    zero = torch.zeros((), dtype=torch.float32) if zero_points is None else zero_points.float()
    biases = (scales.float() * (lowest - zero)).to(scales.dtype)
    repeats = block // group_size
    return Affine(
        pack((numbers.to(torch.int16) - lowest).to(torch.uint8), bits),
        scales.repeat_interleave(repeats, 1),
        biases.repeat_interleave(repeats, 1),
        group_size,
        bits,
    )
