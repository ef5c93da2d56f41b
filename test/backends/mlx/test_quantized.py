"""The affine form of weights against ``mlx.core``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executorch_mlx.backends.mlx.quantized import BITS, GROUP_SIZES, affine, dequantize, pack, unpack


def as_torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array).view(np.int32) if array.dtype == mx.uint32 else np.array(array))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_numbers_are_those_of_mlx(bits: int, group_size: int) -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(bits))
    parts = mx.quantize(mx.array(weight.numpy()), group_size=group_size, bits=bits)
    packed, scales, biases = map(as_torch, parts)
    expected = as_torch(mx.dequantize(*parts, group_size=group_size, bits=bits))
    torch.testing.assert_close(dequantize(packed, scales, biases, group_size, bits), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


@given(bits=st.sampled_from(BITS), rows=st.integers(1, 9), groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_what_is_packed_is_unpacked(bits: int, rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (rows, 32 * groups), generator=generator, dtype=torch.uint8)
    packed = pack(numbers, bits)
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, groups * bits))
    assert torch.equal(unpack(packed, bits), numbers)


@pytest.mark.parametrize(
    ("numbers", "bits"),
    [
        (torch.zeros(2, 31, dtype=torch.uint8), 4),
        (torch.zeros(2, 32, dtype=torch.int8), 4),
        (torch.zeros(2, 32, dtype=torch.uint8), 7),
    ],
    ids=["columns", "dtype", "bits"],
)
def test_what_cannot_be_packed_is_refused(numbers: torch.Tensor, bits: int) -> None:
    with pytest.raises(ValueError, match="pack: expected uint8 in rows of a multiple of 32"):
        pack(numbers, bits)


@pytest.mark.parametrize(
    ("lowest", "highest", "bits"), [(-8, 7, 4), (0, 15, 4), (-128, 127, 8), (0, 2, 2), (-3, 3, 3), (0, 63, 6)]
)
@pytest.mark.parametrize("block", [32, 96, 128, 256])
def test_scaled_whole_numbers_become_affine(lowest: int, highest: int, bits: int, block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    dtype = torch.int8 if lowest < 0 else torch.uint8
    numbers = torch.randint(lowest, highest + 1, (3, 2 * block), generator=generator).to(dtype)
    scales = torch.rand(3, 2, generator=generator) + 0.5
    zeros = torch.randint(lowest, highest + 1, (3, 2), generator=generator).to(dtype)
    made = affine(numbers, scales, zeros, lowest, highest)
    assert made.bits == bits
    assert block % made.group_size == 0
    wide = numbers.double().unflatten(-1, (2, block))
    expected = ((wide - zeros[..., None]) * scales[..., None]).flatten(-2)
    torch.testing.assert_close(dequantize(*made).double(), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("block", "highest", "reason"),
    [(16, 7, "16 numbers share a scale, and MLX takes groups of 128, 64, 32"), (32, 300, "more than 8 bits hold")],
)
def test_what_is_not_affine_is_refused(block: int, highest: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        affine(torch.zeros(2, 2 * block, dtype=torch.int8), torch.ones(2, 2), None, 0, highest)
