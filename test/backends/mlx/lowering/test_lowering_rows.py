"""Each row: a small module through the partitioner and ExecuTorch, against eager torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import to_edge_transform_and_lower

from executorch_mlx.backends.mlx import MLXPartitioner, load_program


class Sample(NamedTuple):
    """One operator on inputs: [4, 6] unless given. The first axis is dynamic where ``dynamic`` says so."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...] | None = None
    dynamic: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-9, 9, shape, generator=generator, dtype=dtype)
    return (torch.rand(shape, generator=generator) * 1.5 + 0.25).to(dtype)


def signed(x: torch.Tensor) -> torch.Tensor:
    """Spread positive values over both signs."""
    return (x - 1.0) * 3.0


X = values(4, 6)
WEIGHT, BIAS = values(3, 6, seed=1) - 1.0, values(3, seed=2)

SAMPLES: dict[str, Sample] = {
    **{
        name: Sample(getattr(torch, name), dtypes=FLOATS)
        for name in (
            "abs",
            "cos",
            "exp",
            "log",
            "neg",
            "reciprocal",
            "rsqrt",
            "sigmoid",
            "sin",
            "sqrt",
            "tanh",
        )
    },
    "cos_of_integers": Sample(torch.cos, dtypes=INTS),
    "neg_of_integers": Sample(torch.neg, dtypes=INTS),
    "abs_of_both_signs": Sample(lambda x: signed(x).abs()),
    "sigmoid_of_both_signs": Sample(lambda x: signed(x).sigmoid()),
    "pow_of_negatives": Sample(lambda x: signed(x) ** 3),
    "truncation_of_negatives": Sample(lambda x: signed(x).to(torch.int64)),
    "silu": Sample(F.silu, dtypes=FLOATS),
    "gelu": Sample(F.gelu, dtypes=FLOATS),
    "gelu_tanh": Sample(lambda x: F.gelu(x, approximate="tanh"), dtypes=FLOATS),
    "logical_not": Sample(torch.logical_not, dtypes=(torch.bool,)),
    "add": Sample(lambda x: x + x, dtypes=(*FLOATS, *INTS)),
    "add_scalar": Sample(lambda x: x + 1.5, dtypes=FLOATS),
    "add_integer_scalar": Sample(lambda x: x + 3, dtypes=(*FLOATS, *INTS)),
    "integer_plus_float_scalar": Sample(lambda x: x + 0.5, dtypes=INTS),
    "sub_scalar": Sample(lambda x: x - 1.5),
    "scalar_minus_tensor": Sample(lambda x: 1.5 - x),
    "mul_mixed_dtypes": Sample(lambda x: x * x.half()),
    "div": Sample(lambda x: x / (x + 1.0), dtypes=FLOATS),
    "integers_divide_to_float": Sample(lambda x: x / 4, dtypes=INTS),
    "pow_scalar": Sample(lambda x: x**2, dtypes=FLOATS),
    "pow_tensor": Sample(lambda x: x**x),
    "scalar_to_the_power": Sample(lambda x: 2.0**x),
    "maximum": Sample(lambda x: torch.maximum(x, 1.0 - x)),
    "minimum": Sample(lambda x: torch.minimum(x, 1.0 - x)),
    **{
        f"compare_{name}": Sample(lambda x, name=name: getattr(torch, name)(x, 1.0), dtypes=(*FLOATS, torch.int64))
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "compare_tensors_of_two_dtypes": Sample(lambda x: x.to(torch.int64) <= x),
    "and_or": Sample(lambda x: ((x > 0.5) & (x < 1.0)) | (x > 1.5)),
    "where": Sample(lambda x: torch.where(x > 1.0, x, -x), dtypes=FLOATS),
    "where_scalar": Sample(lambda x: torch.where(x > 1.0, x, 0.0)),
    "masked_fill": Sample(lambda x: x.masked_fill(x > 1.0, -1.0)),
    "mean": Sample(lambda x: x.mean(-1, keepdim=True), dtypes=FLOATS),
    "sum": Sample(lambda x: x.sum(0), dtypes=(*FLOATS, *INTS)),
    "sum_axes": Sample(lambda x: x.sum((0, 1))),
    "amax": Sample(lambda x: x.amax(-1)),
    "amin": Sample(lambda x: x.amin(0, keepdim=True)),
    "any": Sample(lambda x: (x > 1.5).any(1)),
    "argmax": Sample(lambda x: x.argmax(-1)),
    "softmax": Sample(lambda x: x.softmax(-1), dtypes=FLOATS),
    "softmax_to_float": Sample(lambda x: F.softmax(x, -1, dtype=torch.float32), dtypes=FLOATS),
    "view": Sample(lambda x: x.view(x.shape[0], 2, 3)),
    "view_inferred": Sample(lambda x: x.view(-1)),
    "reshape_after_transpose": Sample(lambda x: x.t().reshape(-1)),
    "permute": Sample(lambda x: x.view(-1, 2, 3).permute(2, 0, -2)),
    "transpose": Sample(lambda x: x.transpose(0, -1)),
    "unsqueeze": Sample(lambda x: x.unsqueeze(-1)),
    "squeeze": Sample(lambda x: x.unsqueeze(1).squeeze(1)),
    "squeeze_of_another_size": Sample(lambda x: x.squeeze(1)),
    "expand": Sample(lambda x: x[:, None].expand(-1, 5, -1)),
    "expand_with_new_axis": Sample(lambda x: x.expand(2, -1, -1)),
    "slice": Sample(lambda x: x[:, 1:-1]),
    "slice_step": Sample(lambda x: x[:, ::2]),
    "slice_past_the_end": Sample(lambda x: x[:, 2:100]),
    "select": Sample(lambda x: x[:, 2]),
    "select_last": Sample(lambda x: x[:, -1]),
    "select_from_the_end_of_a_dynamic_axis": Sample(lambda x: x[-1]),
    "mean_of_a_scalar": Sample(lambda x: x[0, 0].mean(0)),
    "cat": Sample(lambda x: torch.cat([x, -x], -1), dtypes=(*FLOATS, *INTS)),
    "cat_of_two_dtypes": Sample(lambda x: torch.cat([x, x.half()], 0)),
    # Static: ExecuTorch 1.5.1 makes the input of a program static that begins with a split.
    "split_sizes": Sample(lambda x: x.split([1, 2, 3], -1)[1], dynamic=False),
    "chunks": Sample(lambda x: x.chunk(3, -1)[2], dynamic=False),
    "chunks_the_last_shorter": Sample(lambda x: torch.cat(x.chunk(4, 1)[::-1], 1), dynamic=False),
    "contiguous": Sample(lambda x: x.t().contiguous()),
    "dropout_in_evaluation": Sample(lambda x: F.dropout(x + 1.0, 0.5, training=False)),
    "type_as": Sample(lambda x: x.half().type_as(x) + x.to(x.dtype)),
    "cast": Sample(lambda x: x.to(torch.float16)),
    "cast_to_integer": Sample(lambda x: (x * 3).to(torch.int64)),
    "embedding": Sample(lambda i: F.embedding(i, WEIGHT), (torch.tensor([[2, 0, 1]]),), False),
    "index_select": Sample(lambda x: x.index_select(1, torch.tensor([3, 0]))),
    "index": Sample(lambda x: x[:, torch.tensor([3, 0])]),
    "gather": Sample(lambda x: x.gather(1, (x > 1.0).to(torch.int64))),
    "linear": Sample(lambda x: F.linear(x, WEIGHT.to(x.dtype)), dtypes=FLOATS),
    "linear_bias": Sample(lambda x: F.linear(x, WEIGHT, BIAS)),
    "linear_three_axes": Sample(lambda x: F.linear(x[None], WEIGHT, BIAS)),
    "matmul": Sample(lambda x: x @ x.t()),
    "bmm": Sample(lambda x: torch.bmm(x[None], x[None].transpose(1, 2))),
    "addmm": Sample(lambda x: torch.addmm(BIAS, x, WEIGHT.t(), beta=0.5, alpha=2.0)),
    "layer_norm": Sample(lambda x: F.layer_norm(x, (6,), WEIGHT[0], WEIGHT[1], 1e-5), dtypes=(torch.float32,)),
    "layer_norm_plain": Sample(lambda x: F.layer_norm(x, (6,))),
    "rms_norm": Sample(lambda x: F.rms_norm(x, (6,), WEIGHT[0], 1e-5)),
    "rms_norm_default_eps": Sample(lambda x: F.rms_norm(x * 1e-3, (6,), WEIGHT[0].to(x.dtype)), dtypes=FLOATS),
    "sdpa": Sample(lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3)),
    "sdpa_causal": Sample(lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True)),
    "sdpa_mask": Sample(
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=x @ x.t() < 9.0, scale=0.3)
    ),
    "arange": Sample(lambda x: torch.arange(x.shape[0])),
    "arange_step": Sample(lambda x: torch.arange(1, x.shape[0] + 1, 2), dynamic=False),
    "full": Sample(lambda x: x + torch.full((x.shape[0], 1), 2.5)),
    "full_like": Sample(lambda x: torch.full_like(x, 7)),
    "zeros_of_two_dtypes": Sample(lambda x: (x + 0).to(torch.int64) + (x.to(torch.int64) * 0 + (2**24 + 1) + 0)),
    "zeros_of_two_signs": Sample(lambda x: 1.0 / (x * -0.0) + x * 0.0),
    "sizes": Sample(lambda x: x.view(x.shape[0] * 2, 3)),
}

# ATen's operators, of a program that is delegated whole, in each dtype; and in one the edge dialect's.
CASES = [(name, dtype, True) for name, sample in SAMPLES.items() for dtype in sample.dtypes]
CASES += [(name, sample.dtypes[0], False) for name, sample in SAMPLES.items()]


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def lowered(
    module: torch.nn.Module, inputs: tuple[Any, ...], *, dynamic: bool, outline: bool = True
) -> tuple[bytes, MLXPartitioner]:
    shapes = ({0: torch.export.Dim("n", min=1, max=64)},) if dynamic else None
    program = torch.export.export(module, inputs, dynamic_shapes=(shapes,) if shapes else None, strict=False)
    partitioner = MLXPartitioner(outline=outline)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    return edge.to_executorch().buffer, partitioner


@pytest.mark.parametrize(
    ("name", "dtype", "outline"),
    CASES,
    ids=[f"{name}-{str(dtype)[6:]}-{'aten' if outline else 'edge'}" for name, dtype, outline in CASES],
)
def test_lowering_row_through_executorch_equals_eager_torch(name: str, dtype: torch.dtype, outline: bool) -> None:
    sample = SAMPLES[name]
    inputs = sample.inputs or (values(4, 6, dtype=dtype),)
    module = Module(sample.function)
    buffer, partitioner = lowered(module, inputs, dynamic=sample.dynamic, outline=outline)
    assert partitioner.not_delegated == []
    method = load_program(buffer).load_method("forward")
    feeds = [inputs]
    if sample.dynamic:
        feeds += [(values(7, 6, dtype=dtype, seed=3),), (values(1, 6, dtype=dtype, seed=4),)]
    for feed in feeds:
        expected = module(*feed)
        got = method.execute(feed)
        wide = expected.dtype in (torch.float16, torch.bfloat16) or dtype in (torch.float16, torch.bfloat16)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if wide else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got[0], expected, **tolerance)


NOT_DELEGATED = {
    "no_row": (lambda x: x.topk(2)[0], "no lowering for this operator"),
    "add_alpha": (lambda x: torch.add(x, x, alpha=2), "alpha is 2"),
    "bitwise_and_of_integers": (lambda x: x.to(torch.int32) & 3, "no lowering|not bools"),
    "index_two_axes": (lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])], "indexes 2 axes"),
    "integer_matmul": (lambda x: x.to(torch.int64) @ x.to(torch.int64).t(), "floats only"),
    "gather_of_a_part": (lambda x: x.gather(1, torch.tensor([[1, 2]])), "part of other axes"),
    "huge_fill": (lambda x: torch.full((2,), 2**62 + 1) + x[0, :2].to(torch.int64), "not exact"),
    "channels_last": (
        lambda x: x.view(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
        "channels_last order",
    ),
    "channels_last_cast": (
        lambda x: x.view(1, 4, 2, 3).to(torch.float16, memory_format=torch.channels_last),
        "channels_last order",
    ),
    "flat_argmax": (lambda x: x.argmax(), "flattens"),
    "float64": (lambda x: x.double() + 1.0, "float64"),
}


@pytest.mark.parametrize("name", NOT_DELEGATED)
def test_partitioner_what_has_no_row_stays_outside_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, reason = NOT_DELEGATED[name]
    module = Module(lambda x: function(x + 1.0))
    buffer, partitioner = lowered(module, (X,), dynamic=False)
    reasons = " ".join(call.reason for call in partitioner.not_delegated)
    assert re.search(reason, reasons)
    assert re.search(reason, caplog.text)
    torch.testing.assert_close(load_program(buffer).load_method("forward").execute([X])[0], module(X))


@pytest.mark.parametrize("index", [[4], [7, 0], [10**9], [-5]], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda i: F.embedding(i, WEIGHT[:, :4].t()),
        lambda i: F.embedding(i.view(-1).to(torch.int32), WEIGHT[:, :4].t()),
        lambda i: WEIGHT[0, :4].gather(0, i),
    ],
    ids=["as_given", "as_a_view", "gather"],
)
def test_indices_past_a_table_are_an_error(function: Callable[..., Any], index: list[int]) -> None:
    buffer, _ = lowered(Module(function), (torch.tensor([0, 1]),), dynamic=True)
    method = load_program(buffer).load_method("forward")
    torch.testing.assert_close(method.execute([torch.tensor([3])])[0], function(torch.tensor([3])))
    with pytest.raises(IndexError, match="index outside"):
        method.execute([torch.tensor(index)])
