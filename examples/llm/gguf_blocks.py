"""GGUF's quantized blocks as MLX's affine form, number for number.

A block of 32 numbers with a scale, and an offset where it has one, is a group of the affine form; so are the eighths of
a block of Q4_K and Q5_K. Q2_K, Q3_K and Q6_K have a scale for each 16 numbers, which no group can hold. Layouts: ggml's
``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from executorch_mlx.backends.mlx.quantized import Affine, pack

GROUP_SIZE = 32
"""Numbers that share a scale, in all of these forms."""

Bytes = np.ndarray
# Numbers [blocks, numbers per block], scales and offsets [blocks, groups per block].
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def _halves(blocks: Bytes, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return low halves, then high ones: [blocks, n] to [blocks, 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return the bits of 4 bytes, lowest first, as the fifth ones of 32 numbers."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> Parts:
    scale = _halves(blocks, 0, 2)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0, 2), _halves(blocks, 2, 4)


def _q5_0(blocks: Bytes) -> Parts:
    scale = _halves(blocks, 0, 2)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0, 2), _halves(blocks, 2, 4)


def _q8_0(blocks: Bytes) -> Parts:
    scale = _halves(blocks, 0, 2)
    return blocks[:, 2:] ^ 0x80, scale, -128 * scale


def _k_parameters(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    scales, offsets = Q4_K.get_scale_min(blocks[:, 4:16])
    return _halves(blocks, 0, 2) * scales.astype(np.float32), -(_halves(blocks, 2, 4) * offsets.astype(np.float32))


def _q4_k(blocks: Bytes) -> Parts:
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 32))
    return numbers.reshape(len(blocks), 256), *_k_parameters(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    # Bit g of byte i belongs to number i of group g.
    high = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little").reshape(len(blocks), 32, 8).swapaxes(1, 2)
    numbers = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    return (numbers | high << 4).reshape(len(blocks), 256), *_k_parameters(blocks)


class _Form(NamedTuple):
    bits: int
    parts: Callable[[Bytes], Parts]


_FORMS = {
    GGMLQuantizationType.Q4_0: _Form(4, _q4_0),
    GGMLQuantizationType.Q4_1: _Form(4, _q4_1),
    GGMLQuantizationType.Q5_0: _Form(5, _q5_0),
    GGMLQuantizationType.Q5_1: _Form(5, _q5_1),
    GGMLQuantizationType.Q8_0: _Form(8, _q8_0),
    GGMLQuantizationType.Q4_K: _Form(4, _q4_k),
    GGMLQuantizationType.Q5_K: _Form(5, _q5_k),
}


def is_affine(kind: GGMLQuantizationType) -> bool:
    """Whether blocks of a kind can be kept."""
    return kind in _FORMS


def keeps_scales(kind: GGMLQuantizationType, dtype: torch.dtype) -> bool:
    """Whether a dtype holds the scales as they are: halves in the file, or products of one with six bits more."""
    is_product = kind in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K)
    return dtype is torch.float32 or (dtype is torch.float16 and not is_product)


def affine_of(data: Bytes, kind: GGMLQuantizationType, dtype: torch.dtype) -> Affine:
    """Repack a matrix's blocks.

    Args:
        data: uint8 [rows, bytes of a row], as in the file.
        kind: of which ``is_affine`` is true.
        dtype: the scales' dtype, to which they are rounded.

    Returns:
        The weight; in float32 each number is the file's.
    """
    form, (_, size) = _FORMS[kind], GGML_QUANT_SIZES[kind]
    numbers, scales, biases = form.parts(data.reshape(-1, size))
    rows = data.shape[0]
    return Affine(
        pack(torch.from_numpy(np.ascontiguousarray(numbers.reshape(rows, -1))), form.bits),
        torch.from_numpy(scales.reshape(rows, -1)).to(dtype),
        torch.from_numpy(biases.reshape(rows, -1)).to(dtype),
        GROUP_SIZE,
        form.bits,
    )
