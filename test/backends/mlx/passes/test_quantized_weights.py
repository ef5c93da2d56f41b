"""Quantized weights through ExecuTorch: torchao's, and those that the exporter quantizes itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, MappingType, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.passes import quantize_weights
from executorch_mlx.backends.mlx.program import read_payload
from executorch_mlx.backends.mlx.quantized import affine, dequantize

SYMMETRIC, ASYMMETRIC = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
VOCABULARY, WIDTH = 48, 128
TOKENS = torch.tensor([[3, 47, 0, 5, 5]])


class Model(nn.Module):
    """An embedding, a linear layer with a bias, and a head that has the embedding's weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.linear = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.eval().requires_grad_(False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.linear(self.embedding(index))))
        return out


def by_torchao(model: nn.Module, bits: int, granularity: Any, mapping: MappingType) -> nn.Module:
    config = IntxWeightOnlyConfig(
        weight_dtype={4: torch.int4, 8: torch.int8}[bits], granularity=granularity, mapping_type=mapping
    )
    quantize_(model, config)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Embedding))
    return model


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=1, max=16)
    return torch.export.export(model, (TOKENS,), dynamic_shapes=({1: n},), strict=False)


def lowered(program: torch.export.ExportedProgram, *, outline: bool = True) -> tuple[bytes, list[str]]:
    """Return the program's bytes and the kinds of its instructions; it is one delegate."""
    partitioner = MLXPartitioner(outline=outline)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    assert partitioner.not_delegated == []
    module = edge.exported_program().graph_module
    (delegate,) = (getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr")
    kinds = [node.kind for node in read_payload(delegate.processed_bytes).instruction_chains[0].instructions]
    return edge.to_executorch().buffer, kinds


def run(buffer: bytes, tokens: torch.Tensor = TOKENS, **options: Any) -> torch.Tensor:
    result: torch.Tensor = load_program(buffer, **options).load_method("forward").execute([tokens])[0]
    return result


# Bits, granularity, mapping, dtype; and whether the program is one call.
CONFIGURATIONS = [
    *[
        pytest.param(bits, granularity, mapping, torch.float32, True, id=f"{bits}-{name}-{mapping.name.lower()}")
        for bits in (4, 8)
        for granularity, name, mapping in (
            (PerGroup(32), "g32", SYMMETRIC),
            (PerGroup(64), "g64", ASYMMETRIC),
            (PerGroup(128), "g128", SYMMETRIC),
            (PerAxis(0), "rows", ASYMMETRIC),
        )
    ],
    *[
        pytest.param(bits, PerGroup(32), ASYMMETRIC, dtype, True, id=f"{bits}-{str(dtype)[6:]}")
        for bits in (4, 8)
        for dtype in (torch.float16, torch.bfloat16)
    ],
    pytest.param(4, PerGroup(64), ASYMMETRIC, torch.float32, False, id="edge"),
    pytest.param(4, PerGroup(64), ASYMMETRIC, torch.bfloat16, False, id="edge-bfloat16"),
]


@pytest.mark.parametrize(("bits", "granularity", "mapping", "dtype", "outline"), CONFIGURATIONS)
def test_torchao_weights_equal_eager_torchao(
    bits: int, granularity: Any, mapping: MappingType, dtype: torch.dtype, outline: bool
) -> None:
    model = by_torchao(Model().to(dtype), bits, granularity, mapping)
    buffer, kinds = lowered(exported(model), outline=outline)
    assert kinds.count("QuantizedMatmulNode") == 2
    assert kinds.count("DequantizeNode") == 1
    expected = model(TOKENS)
    # A bias of -8 to -128 scales is rounded to the scales' dtype, and so are products.
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype] * float(expected.abs().max())
    for options in ({}, {"cpu_weights": "float32"}):
        result = run(buffer, **options)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128)])
def test_weights_quantized_at_export_are_those_of_torchao(bits: int, group_size: int) -> None:
    model = Model()
    before = model.embedding.weight.clone()
    program = quantize_weights(exported(model).run_decompositions({}), bits, group_size)
    buffer, kinds = lowered(program)
    assert kinds.count("QuantizedMatmulNode") == 2
    assert torch.equal(model.embedding.weight, before), "the model was changed"
    expected = by_torchao(model, bits, PerGroup(group_size), ASYMMETRIC if bits == 4 else SYMMETRIC)(TOKENS)
    torch.testing.assert_close(run(buffer), expected, rtol=0, atol=1e-4)


def test_a_tied_weight_is_stored_once() -> None:
    sizes = {}
    for is_tied in (True, False):
        model = Model()
        if not is_tied:
            model.head.weight = nn.Parameter(model.head.weight.flip(0), requires_grad=False)
        sizes[is_tied] = len(lowered(quantize_weights(exported(model).run_decompositions({}), 8, 32))[0])
    numbers = VOCABULARY * WIDTH
    assert sizes[False] - sizes[True] > numbers


def test_scales_that_are_halves_are_stored_as_halves() -> None:
    model = by_torchao(Model(), 4, PerGroup(32), SYMMETRIC)
    sizes = {}
    for is_half in (True, False):
        for module in (model.embedding, model.linear, model.head):
            module.weight.scale = torch.full_like(module.weight.scale, 0.25 if is_half else 0.1)
        sizes[is_half] = len(lowered(exported(model))[0])
        torch.testing.assert_close(run(lowered(exported(model))[0]), model(TOKENS), rtol=1e-5, atol=1e-4)
    assert sizes[True] < sizes[False]


def test_a_weight_that_mlx_cannot_hold_is_kept_in_floats_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = by_torchao(Model(), 4, PerGroup(16), SYMMETRIC)
    buffer, kinds = lowered(exported(model))
    assert "QuantizedMatmulNode" not in kinds
    assert "16 numbers share a scale" in caplog.text
    torch.testing.assert_close(run(buffer), model(TOKENS), rtol=1e-5, atol=1e-4)


def test_rows_that_are_no_whole_number_of_groups_stay_floats_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(width=96)
    buffer, kinds = lowered(quantize_weights(exported(model).run_decompositions({}), 4, 64))
    assert "QuantizedMatmulNode" not in kinds
    assert "its rows of 96 are no whole number of groups of 64" in caplog.text
    torch.testing.assert_close(run(buffer), model(TOKENS), rtol=1e-5, atol=1e-4)


class Gated(nn.Module):
    """A router, and linear layers whose names are much like it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"gate": nn.Linear(64, 4, bias=False)})
        self.w_gate = nn.Linear(64, 4, bias=False)
        self.gate = nn.Linear(64, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.router["gate"](x) * self.w_gate(x)).sum() * self.gate(x)


def test_routers_stay_floats() -> None:
    program = torch.export.export(Gated().eval(), (torch.ones(2, 64),), strict=False)
    _, kinds = lowered(quantize_weights(program, 4, 32))
    assert (kinds.count("QuantizedMatmulNode"), kinds.count("AddmmNode")) == (2, 1)


def test_eight_bits_in_half_precision_stay_close() -> None:
    model = Model().to(torch.bfloat16)
    exact = model(TOKENS).float()
    errors = {}
    for bits in (4, 8):
        result = run(lowered(quantize_weights(exported(model).run_decompositions({}), bits, 64))[0])
        errors[bits] = float((result.float() - exact).pow(2).mean().sqrt())
    assert errors[8] * 6 < errors[4]


class Varied(nn.Module):
    """A weight whose scales are an input, or made of it."""

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.packed, _, self.biases, *_ = affine(torch.zeros(64, 64, dtype=torch.int8), SCALES, None, -8, 7)
        self.factor = factor

    def forward(self, scales: torch.Tensor) -> torch.Tensor:
        scales = scales if self.factor is None else scales * self.factor
        result: torch.Tensor = dequantize(self.packed, scales, self.biases, 32, 4)
        return result


SCALES = torch.ones(64, 2)


def test_a_weight_whose_parts_are_inputs_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="scales: expected a constant of the program, got an input"):
        lowered(torch.export.export(Varied(None), (SCALES,), strict=False))


def test_a_weight_whose_parts_are_computed_stays_outside_with_a_reason() -> None:
    partitioner = MLXPartitioner()
    to_edge_transform_and_lower(torch.export.export(Varied(2.0), (SCALES,), strict=False), partitioner=[partitioner])
    (call,) = partitioner.not_delegated
    assert "its operands are computed" in call.reason


class Both(nn.Module):
    """Uses a quantized weight as a matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randint(-8, 8, (64, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
        made = affine(numbers, torch.full((64, 2), 0.1), None, -8, 7)
        self.packed, self.scales, self.biases = made[:3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantize(self.packed, self.scales, self.biases, 32, 4)
        return nn.functional.linear(x, weight) + weight.sum(0)


def test_a_weight_with_other_uses_is_expanded_for_those() -> None:
    model, x = Both().eval(), torch.rand(2, 64)
    buffer, kinds = lowered(torch.export.export(model, (x,), strict=False))
    assert (kinds.count("QuantizedMatmulNode"), kinds.count("DequantizeNode")) == (1, 1)
    for options in ({}, {"cpu_weights": "float32"}):
        torch.testing.assert_close(run(buffer, x, **options), model(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("bits", "group_size", "reason"),
    [(3, 64, "bits: expected 4 or 8, got 3"), (4, 48, "group_size: expected one of 32, 64, 128, got 48")],
)
def test_other_forms_are_refused(bits: int, group_size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        quantize_weights(exported(Model()), bits, group_size)


@pytest.mark.parametrize("rows", [1, 15, 16, 40])
def test_few_and_many_rows_multiply_alike(rows: int) -> None:
    model = by_torchao(nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False), 4, PerGroup(32), ASYMMETRIC)
    x = torch.rand(40, 64)
    n = torch.export.Dim("n", min=1, max=64)
    buffer, _ = lowered(torch.export.export(model, (x,), dynamic_shapes=({0: n},), strict=False))
    torch.testing.assert_close(run(buffer, x[:rows]), model(x[:rows]), rtol=1e-5, atol=1e-5)


def test_cpu_weights_are_stored_or_float32() -> None:
    buffer, _ = lowered(exported(Model()))
    with pytest.raises(ValueError, match="cpu_weights: expected one of stored, float32, got 'float16'"):
        load_program(buffer, cpu_weights="float16")
