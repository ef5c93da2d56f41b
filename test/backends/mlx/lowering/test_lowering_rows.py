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

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)
NUMBERS = (*FLOATS, *INTS)
ALL = (*NUMBERS, torch.bool)
# The dtypes that the edge dialect's operators are lowered in; ATen's are in all.
EDGE_DTYPES = (torch.float32, torch.int64)


class Sample(NamedTuple):
    """An operator of a tensor [n, 6], in each of these dtypes; ``n`` is dynamic or 4."""

    function: Callable[[torch.Tensor], torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    dynamic: bool = True


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


def weight(x: torch.Tensor) -> torch.Tensor:
    return WEIGHT.to(x.dtype)


SAMPLES: dict[str, Sample] = {
    **{
        name: Sample(getattr(torch, name), NUMBERS if name in ("abs", "cos", "neg") else FLOATS)
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
    "abs_of_both_signs": Sample(lambda x: signed(x).abs()),
    "sigmoid_of_both_signs": Sample(lambda x: signed(x).sigmoid()),
    "pow_of_negatives": Sample(lambda x: signed(x) ** 3),
    "truncation_of_negatives": Sample(lambda x: signed(x).to(torch.int64)),
    "silu": Sample(F.silu),
    "gelu": Sample(F.gelu),
    "gelu_tanh": Sample(lambda x: F.gelu(x, approximate="tanh")),
    "logical_not": Sample(torch.logical_not, ALL),
    "add": Sample(lambda x: x + x, NUMBERS),
    "add_scalar": Sample(lambda x: x + 1.5, NUMBERS),
    "add_integer_scalar": Sample(lambda x: x + 3, NUMBERS),
    "sub": Sample(lambda x: x - (x + 1), NUMBERS),
    "sub_scalar": Sample(lambda x: x - 1.5, NUMBERS),
    "scalar_minus_tensor": Sample(lambda x: 1.5 - x, NUMBERS),
    "mul_mixed_dtypes": Sample(lambda x: x * x.half(), NUMBERS),
    "div": Sample(lambda x: x / (x + 1.0)),
    "integers_divide_to_float": Sample(lambda x: x / 4, INTS),
    "pow_scalar": Sample(lambda x: x**2, NUMBERS),
    "pow_tensor": Sample(lambda x: x**x),
    "scalar_to_the_power": Sample(lambda x: 2.0**x),
    "maximum": Sample(lambda x: torch.maximum(x, 1 - x), NUMBERS),
    "minimum": Sample(lambda x: torch.minimum(x, 1 - x), NUMBERS),
    **{
        f"compare_{name}": Sample(lambda x, name=name: getattr(torch, name)(x, 1.0), NUMBERS)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "compare_tensors_of_two_dtypes": Sample(lambda x: x.to(torch.int64) <= x, NUMBERS),
    "and_or": Sample(lambda x: ((x > 0.5) & (x < 1.0)) | (x > 1.5), NUMBERS),
    "where": Sample(lambda x: torch.where(x > 1, x, -x), NUMBERS),
    "where_scalar": Sample(lambda x: torch.where(x > 1, x, 0), NUMBERS),
    "masked_fill": Sample(lambda x: x.masked_fill(x > 1, -1), NUMBERS),
    "mean": Sample(lambda x: x.mean(-1, keepdim=True)),
    "sum": Sample(lambda x: x.sum(0), ALL),
    "sum_axes": Sample(lambda x: x.sum((0, 1)), ALL),
    "amax": Sample(lambda x: x.amax(-1), NUMBERS),
    "amin": Sample(lambda x: x.amin(0, keepdim=True), NUMBERS),
    "any": Sample(lambda x: (x > 1.5).any(1), NUMBERS),
    "argmax": Sample(lambda x: x.argmax(-1), NUMBERS),
    "softmax": Sample(lambda x: x.softmax(-1)),
    "softmax_to_float": Sample(lambda x: F.softmax(x, -1, dtype=torch.float32)),
    "view": Sample(lambda x: x.view(x.shape[0], 2, 3), ALL),
    "view_inferred": Sample(lambda x: x.view(-1), ALL),
    "reshape_after_transpose": Sample(lambda x: x.t().reshape(-1), ALL),
    "permute": Sample(lambda x: x.view(-1, 2, 3).permute(2, 0, -2), ALL),
    "transpose": Sample(lambda x: x.transpose(0, -1), ALL),
    "unsqueeze": Sample(lambda x: x.unsqueeze(-1), ALL),
    "squeeze": Sample(lambda x: x.unsqueeze(1).squeeze(1), ALL),
    "squeeze_of_another_size": Sample(lambda x: x.squeeze(1), ALL),
    "expand": Sample(lambda x: x[:, None].expand(-1, 5, -1), ALL),
    "expand_with_new_axis": Sample(lambda x: x.expand(2, -1, -1), ALL),
    "slice": Sample(lambda x: x[:, 1:-1], ALL),
    "slice_step": Sample(lambda x: x[:, ::2], ALL),
    "slice_past_the_end": Sample(lambda x: x[:, 2:100], ALL),
    "select": Sample(lambda x: x[:, 2], ALL),
    "select_last": Sample(lambda x: x[:, -1], ALL),
    "select_from_the_end_of_a_dynamic_axis": Sample(lambda x: x[-1], ALL),
    "mean_of_a_scalar": Sample(lambda x: x[0, 0].mean(0)),
    "cat": Sample(lambda x: torch.cat([x, x[:, :2]], -1), ALL),
    "cat_of_two_dtypes": Sample(lambda x: torch.cat([x, x.half()], 0), (torch.float32, torch.float16)),
    # ExecuTorch 1.5.1 makes the input of a program static that holds a split of it.
    "split_sizes": Sample(lambda x: x.split([1, 2, 3], -1)[1], ALL, dynamic=False),
    "chunks": Sample(lambda x: x.chunk(3, -1)[2], ALL, dynamic=False),
    "chunks_the_last_shorter": Sample(lambda x: torch.cat(x.chunk(4, 1)[::-1], 1), ALL, dynamic=False),
    "contiguous": Sample(lambda x: x.t().contiguous(), ALL),
    "dropout_in_evaluation": Sample(lambda x: F.dropout(x + 1.0, 0.5, training=False)),
    "type_as": Sample(lambda x: x.half().type_as(x) + x.to(x.dtype), NUMBERS),
    **{
        f"cast_to_{str(dtype)[6:]}": Sample(lambda x, dtype=dtype: (x * 3).to(dtype), NUMBERS)
        for dtype in (*NUMBERS, torch.bool)
    },
    "embedding": Sample(lambda x: F.embedding((x > 1).to(torch.int64), weight(x)), NUMBERS),
    "index_select": Sample(lambda x: x.index_select(1, torch.tensor([3, 0])), ALL),
    "index": Sample(lambda x: x[:, torch.tensor([3, 0])], ALL),
    "gather": Sample(lambda x: x.gather(1, (x > 1).to(torch.int64)), NUMBERS),
    "linear": Sample(lambda x: F.linear(x, weight(x))),
    "linear_bias": Sample(lambda x: F.linear(x, weight(x), BIAS.to(x.dtype))),
    "linear_three_axes": Sample(lambda x: F.linear(x[None], weight(x), BIAS.to(x.dtype))),
    "matmul": Sample(lambda x: x @ x.t()),
    "bmm": Sample(lambda x: torch.bmm(x[None], x[None].transpose(1, 2))),
    "addmm": Sample(lambda x: torch.addmm(BIAS.to(x.dtype), x, weight(x).t(), beta=0.5, alpha=2.0)),
    "layer_norm": Sample(lambda x: F.layer_norm(x, (6,), weight(x)[0], weight(x)[1], 1e-5)),
    "layer_norm_plain": Sample(lambda x: F.layer_norm(x, (6,))),
    "rms_norm": Sample(lambda x: F.rms_norm(x, (6,), weight(x)[0], 1e-5)),
    "rms_norm_default_eps": Sample(lambda x: F.rms_norm(x * 1e-3, (6,), weight(x)[0])),
    "sdpa": Sample(lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3)),
    "sdpa_causal": Sample(lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True)),
    "sdpa_mask": Sample(
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=x @ x.t() < 9.0, scale=0.3)
    ),
    "arange": Sample(lambda x: torch.arange(x.shape[0]), ALL),
    "arange_step": Sample(lambda x: torch.arange(1, x.shape[0] + 1, 2), ALL, dynamic=False),
    "full": Sample(lambda x: x + torch.full((x.shape[0], 1), 2.5), NUMBERS),
    "full_like": Sample(lambda x: torch.full_like(x, 7), NUMBERS),
    "zeros_of_two_dtypes": Sample(
        lambda x: (x + 0).to(torch.int64) + (x.to(torch.int64) * 0 + (2**24 + 1) + 0), NUMBERS
    ),
    "zeros_of_two_signs": Sample(lambda x: 1.0 / (x * -0.0) + x * 0.0),
    "sizes": Sample(lambda x: x.view(x.shape[0] * 2, 3), ALL),
}

# The forms in which samples are exported: dtype, as ATen's operators in a program that is one call, dynamic.
FORMS = [
    pytest.param(dtype, outline, dynamic, id=f"{str(dtype)[6:]}-{dialect}-{'dynamic' if dynamic else 'static'}")
    for dtype in ALL
    for outline, dialect in ((True, "aten"), *([(False, "edge")] if dtype in EDGE_DTYPES else []))
    for dynamic in (False, True)
]


class Module(torch.nn.Module):
    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *inputs: Any) -> Any:
        results = [function(*inputs) for function in self.functions]
        return results[0] if len(results) == 1 else results


def lowered(
    module: torch.nn.Module, inputs: tuple[Any, ...], *, dynamic: bool, outline: bool = True
) -> tuple[bytes, MLXPartitioner]:
    shapes = ({0: torch.export.Dim("n", min=1, max=64)},) if dynamic else None
    program = torch.export.export(module, inputs, dynamic_shapes=(shapes,) if shapes else None, strict=False)
    partitioner = MLXPartitioner(outline=outline)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    return edge.to_executorch().buffer, partitioner


@pytest.mark.parametrize(("dtype", "outline", "dynamic"), FORMS)
def test_lowering_rows_through_executorch_equal_eager_torch(dtype: torch.dtype, outline: bool, dynamic: bool) -> None:
    # One program of all of them, which is far cheaper than a program for each.
    names = [name for name, row in SAMPLES.items() if dtype in row.dtypes and (row.dynamic or not dynamic)]
    module = Module(*[SAMPLES[name].function for name in names])
    buffer, partitioner = lowered(module, (values(4, 6, dtype=dtype),), dynamic=dynamic, outline=outline)
    assert partitioner.not_delegated == []
    method = load_program(buffer).load_method("forward")
    wrong = {}
    for size in (4, 7, 1) if dynamic else (4,):
        feed = (values(size, 6, dtype=dtype, seed=size),)
        for name, result, wanted in zip(names, method.execute(feed), module(*feed), strict=True):
            is_wide = {dtype, wanted.dtype} & {torch.float16, torch.bfloat16}
            tolerance = 2e-2 if is_wide else 1e-5
            try:
                torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                wrong[name, size] = str(error)
    assert not wrong


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
