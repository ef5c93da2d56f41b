"""What the fusions replace, what they leave alone, and that neither changes a result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executorch_mlx.backends.mlx.passes import fuse_rms_norm, fuse_rope
from oracles.plain_models import rotate

RMS_NORM = "aten.rms_norm.default"
ROPE = "executorch_mlx.rope.default"


class RmsNorm(nn.Module):
    """The form that Hugging Face writes; subclasses vary it."""

    eps = 1e-5

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class WeightLast(RmsNorm):
    def forward(self, x):
        return (torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * x) * self.weight


class OtherAxis(RmsNorm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps))


class Cubed(RmsNorm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps))


class OtherFactor(RmsNorm):
    def forward(self, x):
        return self.weight * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ScaledEps(RmsNorm):
    def forward(self, x):
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(torch.add(mean, self.eps, alpha=1000)))


class ThroughIntegers(RmsNorm):
    def forward(self, x):
        whole = x.to(torch.int32).float()
        return self.weight * (whole * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class NoWeight(RmsNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (RmsNorm, 1),
        (WeightLast, 1),
        (OtherAxis, 0),
        (Cubed, 0),
        (OtherFactor, 0),
        (NoWeight, 0),
        (ScaledEps, 0),
        (ThroughIntegers, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fuse_rms_norm_replaces_exactly_the_norm(model: type[RmsNorm], count: int) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)) + 2.0
    program = torch.export.export(model(), (x,)).run_decompositions({})
    fuse_rms_norm(program)
    assert [str(node.target) for node in program.graph.nodes].count(RMS_NORM) == count
    torch.testing.assert_close(program.module()(x), model()(x))


def test_fuse_rms_norm_in_half_precision_with_casts_is_fused() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    program = torch.export.export(RmsNorm(torch.bfloat16), (x,)).run_decompositions({})
    fuse_rms_norm(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [RMS_NORM]
    torch.testing.assert_close(program.module()(x), RmsNorm(torch.bfloat16)(x), rtol=2e-2, atol=2e-2)


class Rope(nn.Module):
    """Rotates a query and a key; subclasses vary how."""

    def forward(self, q, k, position):
        return rotate(q, position), rotate(k, position)


class InverseFrequenciesInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / 50.0 ** (torch.arange(0, 8, 2) / 8))

    scale = 1.0

    def forward(self, q, k, position):
        angles = (self.inverse[None, :, None] @ position[None, None, :].float()).transpose(1, 2)
        table = torch.cat([angles, angles], dim=-1)
        cos, sin = (table.cos() * self.scale)[:, None], (table.sin() * self.scale)[:, None]

        def turned(x):
            return torch.cat([-x[..., 4:], x[..., :4]], dim=-1)

        return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class Scaled(InverseFrequenciesInBuffer):
    scale = 1.25


class ShiftedPositions(Rope):
    def forward(self, q, k, position):
        return rotate(q, position + 1), rotate(k, position + 1)


class TokensFirst(InverseFrequenciesInBuffer):
    """Rotates [1, n, H, D]: with as many heads as tokens, the shapes alone do not tell the axes apart."""

    def forward(self, q, k, position):
        angles = position[None, :, None, None].float() * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return q * table.cos() + turned * table.sin(), k


class ShortAndLong(InverseFrequenciesInBuffer):
    """Chooses its frequencies by the longest position of the step."""

    def forward(self, q, k, position):
        inverse = torch.where(position.max() > 4096, self.inverse * 0.25, self.inverse)
        angles = position[:, None].float() * inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return q * table.cos() + turned * table.sin(), k


class Subtracted(InverseFrequenciesInBuffer):
    def forward(self, q, k, position):
        angles = position[:, None].float() * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return torch.add(q * table.cos(), turned * table.sin(), alpha=-1), k


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Rope, 2),
        (InverseFrequenciesInBuffer, 2),
        (Scaled, 0),
        (ShiftedPositions, 0),
        (TokensFirst, 0),
        (ShortAndLong, 0),
        (Subtracted, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fuse_rope_replaces_exactly_the_rotation_by_position(model: type[nn.Module], count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (6, 2))
    position = torch.tensor([0, 1, 2, 0, 1, 5000])
    program = torch.export.export(model(), (q, k, position)).run_decompositions({})
    fuse_rope(program)
    program.validate()
    assert [str(node.target) for node in program.graph.nodes].count(ROPE) == count
    for got, expected in zip(program.module()(q, k, position), model()(q, k, position), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_fuse_rope_that_widens_its_operand_is_left_alone() -> None:
    q, k = torch.randn(1, 6, 6, 8).bfloat16(), torch.randn(1, 2, 6, 8).bfloat16()
    program = torch.export.export(Rope(), (q, k, torch.arange(6))).run_decompositions({})
    fuse_rope(program)
    assert ROPE not in [str(node.target) for node in program.graph.nodes]


def test_fuse_rope_positions_with_a_batch_axis_are_flattened_once() -> None:
    class WithBatchAxis(Rope):
        def forward(self, q, k, position):
            return super().forward(q, k, position[0])

    q, k, position = torch.randn(1, 6, 6, 8), torch.randn(1, 2, 6, 8), torch.arange(6)[None]
    program = torch.export.export(WithBatchAxis(), (q, k, position)).run_decompositions({})
    fuse_rope(program)
    targets = [str(node.target) for node in program.graph.nodes]
    assert (targets.count(ROPE), targets.count("aten.squeeze.dims")) == (2, 1)
    for got, expected in zip(program.module()(q, k, position), WithBatchAxis()(q, k, position), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
