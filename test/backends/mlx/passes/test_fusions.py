"""What the fusions replace, what they leave alone, and that neither changes a result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.graph import lift_constant
from executorch_mlx.backends.mlx.passes import fuse_rms_norm, fuse_rope
from oracles.plain_models import PlainAttentionModel, export_flat, rotate
from oracles.small_programs import num_delegates, outside_the_delegate

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
    assert calls(program) == [RMS_NORM]
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
    """Rotates [1, n, H, D]: with as many heads as tokens, the shapes of q alone do not tell the axes apart."""

    def forward(self, q, k, position):
        angles = position[None, :, None, None].float() * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        q = q.transpose(1, 2)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return (q * table.cos() + turned * table.sin()).transpose(1, 2), k


class ShortAndLong(InverseFrequenciesInBuffer):
    """Chooses its frequencies by the longest position of the step."""

    def forward(self, q, k, position):
        inverse = torch.where(position.max() > 4096, self.inverse * 0.25, self.inverse)
        angles = position[:, None].float() * inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return q * table.cos() + turned * table.sin(), k


class ClampedPositions(Rope):
    def forward(self, q, k, position):
        return rotate(q, position.clamp(min=0)), rotate(k, position.clamp(min=0))


class Subtracted(InverseFrequenciesInBuffer):
    def forward(self, q, k, position):
        angles = position[:, None].float() * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return torch.add(q * table.cos(), turned * table.sin(), alpha=-1), k


class ScaledCosine(InverseFrequenciesInBuffer):
    def forward(self, q, k, position):
        angles = position[:, None].float() * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return q * (table.cos() * 1.25) + turned * table.sin(), k


class ScaledByPosition(InverseFrequenciesInBuffer):
    def forward(self, q, k, position):
        angles = position[:, None].float() * self.inverse
        scale = 1.0 + position[:, None] / 8192
        table = torch.cat([angles, angles], dim=-1)
        turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
        return q * (table.cos() * scale) + turned * (table.sin() * scale), k


class TablesInBuffers(InverseFrequenciesInBuffer):
    """Looks cos and sin up by position; of 6,000 positions."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(6000.0)[:, None] * self.inverse
        table = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", table.cos())
        self.register_buffer("sin", table.sin())

    def forward(self, q, k, position):
        cos, sin = self.cos[position], self.sin[position]

        def turned(x):
            return torch.cat([-x[..., 4:], x[..., :4]], dim=-1)

        return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class Neighbours(InverseFrequenciesInBuffer):
    """Cohere's form; subclasses vary the table and where things are cast."""

    def table(self, position):
        return (position[:, None].float() * self.inverse).repeat_interleave(2, -1)

    def turned(self, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)

    def forward(self, q, k, position):
        table = self.table(position)
        cos, sin = (table.cos() * self.scale).to(q.dtype), (table.sin() * self.scale).to(q.dtype)

        def rotated(x):
            wide = x.float()
            return (wide * cos + self.turned(wide) * sin).to(x.dtype)

        return rotated(q), rotated(k)


class ScaledNeighbours(Neighbours):
    scale = 0.7


class NeighboursOfHalfTheTable(Neighbours):
    """GLM's way to the table."""

    def table(self, position):
        angles = position[:, None].float() * self.inverse
        return torch.cat([angles, angles], dim=-1)[..., :4].repeat_interleave(2, dim=-1)


class NeighboursCastAfterTheyAreTurned(Neighbours):
    """Ernie's way."""

    def forward(self, q, k, position):
        table = self.table(position)

        def rotated(x):
            return (x.float() * table.cos() + self.turned(x).float() * table.sin()).to(x.dtype)

        return rotated(q), rotated(k)


class NeighboursWithTablesForHalves(Neighbours):
    def table(self, position):
        angles = position[:, None].float() * self.inverse
        return torch.cat([angles, angles], dim=-1)


class NeighboursTurnedBack(Neighbours):
    def turned(self, x):
        return torch.stack([x[..., 1::2], -x[..., ::2]], dim=-1).flatten(-2)


class NeighboursByTheLongest(Neighbours):
    def table(self, position):
        inverse = torch.where(position.max() > 4096, self.inverse * 0.25, self.inverse)
        return (position[:, None].float() * inverse).repeat_interleave(2, -1)


class Complex(InverseFrequenciesInBuffer):
    """DeepSeek's form."""

    def cis(self, position):
        angles = position[:, None].float() * self.inverse
        return torch.polar(torch.ones_like(angles), angles) * self.scale

    def forward(self, q, k, position):
        cis = self.cis(position)

        def rotated(x):
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * cis).flatten(3).type_as(x)

        return rotated(q), rotated(k)


class ScaledComplex(Complex):
    scale = 1.25


class ShiftedComplex(Complex):
    def cis(self, position):
        return super().cis(position + 1)


class ComplexByTheLongest(Complex):
    def cis(self, position):
        return super().cis(torch.where(position.max() > 4096, position * 4, position))


class ComplexTable(Complex):
    """Meta's form: a table of 6,000 positions, and x as [1, n, H, D]."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6000.0), self.inverse)
        self.register_buffer("stored", torch.polar(torch.ones_like(angles), angles))

    def cis(self, position):
        return self.stored[position].view(1, -1, 1, 4)

    def forward(self, q, k, position):
        q, k = super().forward(q.transpose(1, 2), k.transpose(1, 2), position)
        return q.transpose(1, 2), k.transpose(1, 2)


FUSED = {
    Rope: 2,
    InverseFrequenciesInBuffer: 2,
    Scaled: 2,
    TablesInBuffers: 2,
    TokensFirst: 1,
    Neighbours: 2,
    ScaledNeighbours: 2,
    NeighboursOfHalfTheTable: 2,
    NeighboursCastAfterTheyAreTurned: 2,
    Complex: 2,
    ScaledComplex: 2,
    ComplexTable: 2,
}
UNFUSED = (
    ShiftedPositions,
    ClampedPositions,
    ShortAndLong,
    Subtracted,
    ScaledCosine,
    ScaledByPosition,
    NeighboursWithTablesForHalves,
    NeighboursTurnedBack,
    NeighboursByTheLongest,
)
# These do not go to ExecuTorch, which has no operators for complex numbers.
UNFUSED_COMPLEX = (ShiftedComplex, ComplexByTheLongest)
ROTATIONS = {**FUSED, **dict.fromkeys([*UNFUSED, *UNFUSED_COMPLEX], 0)}


def step(n: int = 6, dtype: torch.dtype = torch.float32, farthest: int = 5000) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.randn(1, heads, n, 8, generator=generator).to(dtype) for heads in (6, 2))
    return q, k, torch.tensor([0, 1, 2, 0, 1, farthest, *range(n)][:n])


def calls(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def by_name(model: type[nn.Module]) -> str:
    return model.__name__


@pytest.mark.parametrize("is_decomposed", [False, True], ids=["as exported", "decomposed"])
@pytest.mark.parametrize("model", ROTATIONS, ids=by_name)
def test_fuse_rope_replaces_exactly_the_rotation_by_position(model: type[nn.Module], is_decomposed: bool) -> None:
    program = torch.export.export(model(), step())
    if is_decomposed:
        program = program.run_decompositions({})
    fuse_rope(program)
    program.validate()
    assert calls(program).count(ROPE) == ROTATIONS[model]
    for got, expected in zip(program.module()(*step()), model()(*step()), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", [model for model in ROTATIONS if model not in UNFUSED_COMPLEX], ids=by_name)
def test_rotations_in_an_executorch_program_give_eager_results(model: type[nn.Module]) -> None:
    n = torch.export.Dim("n", min=2, max=16)
    shapes = ({2: n}, {2: n}, {0: n})
    program = torch.export.export(model().eval(), step(), dynamic_shapes=shapes, strict=False)
    partitioner = MLXPartitioner(outline=False)
    assert calls(partitioner.transform_for_pre_decomposition(program)).count(ROPE) == ROTATIONS[model]
    content = bytes(to_edge_transform_and_lower(program, partitioner=[partitioner]).to_executorch().buffer)
    assert num_delegates(content) == 1
    method = load_program(content).load_method("forward")
    for count in (6, 2, 16):
        inputs = step(count)
        for got, expected in zip(method.execute(list(inputs)), model()(*inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "model",
    [Neighbours, NeighboursOfHalfTheTable, NeighboursCastAfterTheyAreTurned, Complex, ComplexTable],
    ids=by_name,
)
def test_fuse_rope_in_half_precision_takes_the_casts_with_it(model: type[nn.Module], dtype: torch.dtype) -> None:
    inputs = step(dtype=dtype, farthest=40)
    program = torch.export.export(model(), inputs)
    fuse_rope(program)
    program.validate()
    assert {*calls(program)} <= {ROPE, "aten.transpose.int"}
    assert calls(program).count(ROPE) == 2
    for got, expected in zip(program.module()(*inputs), model()(*inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_fuse_rope_finds_the_frequencies_bit_by_bit_down_to_the_lowest() -> None:
    class Low(InverseFrequenciesInBuffer):
        def __init__(self) -> None:
            super().__init__()
            self.inverse = torch.tensor([1.0, 3.1e-2, 7.7e-8, 0.0])

    program = torch.export.export(Low(), step())
    fuse_rope(program)
    torch.testing.assert_close(program.constants["rope_freqs_0"], 1.0 / Low().inverse, rtol=0, atol=0)


def test_fuse_rope_that_widens_its_operand_is_left_alone() -> None:
    q, k = torch.randn(1, 6, 6, 8).bfloat16(), torch.randn(1, 2, 6, 8).bfloat16()
    program = torch.export.export(Rope(), (q, k, torch.arange(6))).run_decompositions({})
    fuse_rope(program)
    assert ROPE not in [str(node.target) for node in program.graph.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8], ids=str)
def test_fuse_rope_leaves_positions_alone_that_the_kernel_would_round(dtype: torch.dtype) -> None:
    q, k, position = step()
    position = (position.float() / 4).to(dtype)
    program = torch.export.export(InverseFrequenciesInBuffer(), (q, k, position))
    fuse_rope(program)
    assert ROPE not in calls(program)


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


class InParts(PlainAttentionModel):
    """Rotates before and after what stays outside the delegates."""

    def __init__(self, *, is_greedy: bool = False) -> None:
        super().__init__()
        self.is_greedy = is_greedy
        self.register_buffer("buffer", torch.linspace(0.5, 1.0, 8), persistent=False)
        self.constant = torch.linspace(1.0, 0.5, 8)

    def attend(self, q, k, v, position):
        q = q * self.constant * self.buffer + outside_the_delegate(q)
        return super().attend(self.encode(q, position) * self.constant, k * self.constant * self.buffer, v, position)

    def forward(self, input_ids, position):
        logits = super().forward(input_ids, position)
        return logits.argmax(-1) if self.is_greedy else logits


@pytest.mark.parametrize(
    ("methods", "is_outlined"),
    [(("forward",), False), (("forward", "forward_greedy"), True)],
    ids=["one method, no outline", "two methods, outline"],
)
def test_constants_that_several_delegates_use_often_are_right(methods: tuple[str, ...], is_outlined: bool) -> None:
    models: dict[str, Any] = {name: InParts(is_greedy=name != "forward").eval() for name in methods}
    programs = {name: export_flat(model) for name, model in models.items()}
    partitioners = {name: [MLXPartitioner(outline=is_outlined)] for name in methods}
    assert calls(partitioners["forward"][0].transform_for_pre_decomposition(programs["forward"])).count(ROPE) == 6
    content = bytes(to_edge_transform_and_lower(programs, partitioner=partitioners).to_executorch().buffer)
    assert num_delegates(content) > 1
    loaded = load_program(content)
    inputs = [torch.arange(7)[None], torch.arange(7)]
    for name, model in models.items():
        (got,) = loaded.load_method(name).execute(inputs)
        torch.testing.assert_close(got, model(*inputs).detach())


def test_lifted_constants_of_one_name_stay_apart() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    values = [torch.full((2,), float(value)) for value in range(3)]
    names = [lift_constant(program, "weight", value).name for value in values]
    names += [lift_constant(copy.deepcopy(program), "weight", values[0]).name]
    assert len({*names, "weight"}) == 5
    program.validate()
    assert [program.constants[name] for name in names[:3]] == values
