"""Each row: a small module through the partitioner and ExecuTorch, against eager torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

from executorch_mlx.backends.mlx import MLXPartitioner, load_program

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)
NUMBERS = (*FLOATS, *INTS)
ALL = (*NUMBERS, torch.bool)
# The dtypes that the edge dialect's operators are lowered in, and all samples with static sizes.
EDGE_DTYPES = (torch.float32, torch.int64)

# Neither core operators nor decomposed: ExecuTorch refuses programs with them, unless they are outlined or it is told.
NOT_CORE = [torch.ops.aten.exp2.default, torch.ops.aten.remainder.Scalar_Tensor, torch.ops.aten.sort.stable]


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


def awkward(x: torch.Tensor) -> torch.Tensor:
    """Spread positive values over both signs, with NaN, infinities and zeros of both signs among them."""
    x = signed(x)
    x = torch.where(x > 1.7, torch.nan, torch.where(x > 1.4, torch.inf, x))
    return torch.where(x < -1.8, -torch.inf, torch.where(x < -1.4, -0.0, torch.where(abs(x) < 0.3, 0.0, x)))


def distinct(x: torch.Tensor) -> torch.Tensor:
    """Return values of which no two on an axis are equal, and which all dtypes hold."""
    rows, columns = torch.arange(x.shape[0]) * 5 % 13, torch.tensor([30, 0, 50, 10, 40, 20])
    return torch.where(rows[:, None] > 4, -1, 1).to(x.dtype) * (rows[:, None] + columns).to(x.dtype)


def hidden(empty: torch.Tensor) -> torch.Tensor:
    """Return a tensor as large as an empty one, which may hold anything, with nothing of what it holds."""
    return torch.where(torch.ones_like(empty, dtype=torch.bool), 1, empty)


X = values(4, 6)
WEIGHT, BIAS = values(3, 6, seed=1) - 1.0, values(3, seed=2)
KERNELS, KERNEL_BIAS = values(4, 2, 3, 2, seed=3) - 1.0, values(4, seed=4)


def weight(x: torch.Tensor) -> torch.Tensor:
    return WEIGHT.to(x.dtype)


def kernels(x: torch.Tensor, *, channels: int = 2, axes: int = 2) -> torch.Tensor:
    picked = KERNELS[:, :channels] if axes == 2 else KERNELS[:, :channels, 0]
    return picked.to(x.dtype)


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
    **{
        name: Sample(getattr(torch, name), NUMBERS)
        for name in ("atan", "asinh", "cosh", "erf", "exp2", "expm1", "log1p", "log10", "log2", "sinh", "tan")
    },
    **{name: Sample(lambda x, name=name: getattr(torch, name)(x - 1)) for name in ("acos", "asin", "atanh")},
    "acosh": Sample(lambda x: torch.acosh(x + 1)),
    **{
        name: Sample(lambda x, name=name: getattr(torch, name)(x * 2 - 3), NUMBERS)
        for name in ("ceil", "floor", "round", "sign", "square", "trunc", "relu", "isnan", "isinf", "isfinite")
    },
    **{
        f"{name}_of_awkward": Sample(lambda x, name=name: getattr(torch, name)(awkward(x)))
        for name in ("ceil", "sign", "relu", "isnan", "isinf", "isfinite", "exp", "logical_not")
    },
    "sign_of_bools": Sample(torch.sign, (torch.bool,)),
    "square_of_bools": Sample(torch.square, (torch.bool,)),
    "hardtanh": Sample(lambda x: F.hardtanh(awkward(x), -0.5, 1.25)),
    "relu6": Sample(lambda x: F.relu6(signed(x) * 4)),
    "leaky_relu": Sample(lambda x: F.leaky_relu(awkward(x), 0.125)),
    "softplus": Sample(lambda x: F.softplus(awkward(x))),
    "softplus_threshold": Sample(lambda x: F.softplus(signed(x) * 30, beta=2.0, threshold=3.0)),
    "clamp": Sample(lambda x: x.clamp(-2, 1), NUMBERS),
    "clamp_of_awkward": Sample(lambda x: awkward(x).clamp(-1.0, 1.0)),
    "clamp_crossed": Sample(lambda x: x.clamp(1, -1), NUMBERS),
    "clamp_to_floats": Sample(lambda x: x.clamp(-0.5, 1.5), INTS),
    "clamp_min": Sample(lambda x: x.clamp_min(1) + x.clamp(min=0), NUMBERS),
    "clamp_max": Sample(lambda x: x.clamp_max(1) + x.clamp(max=2), NUMBERS),
    "clamp_tensors": Sample(lambda x: torch.clamp(x, x[:1] - 1, x[:, :1]), NUMBERS),
    "clamp_by_nan": Sample(lambda x: torch.clamp(x, awkward(x), max=None)),
    "clamp_by_tensors": Sample(lambda x: x.clamp_min(x[:, :1]) - x.clamp_max(x[:, 1:2]), NUMBERS),
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
    "div_by_a_number_past_halves": Sample(lambda x: x * 1000 / 1e5),
    "mul_by_a_number_below_halves": Sample(lambda x: x * 1000 * 1e-8),
    "mul_by_a_wide_scalar": Sample(lambda x: x * 1e-3 * torch.tensor(1e5)),
    "transpose_and_squeeze_of_a_scalar": Sample(lambda x: x[0, 0].transpose(0, -1).squeeze(0) + 1, NUMBERS),
    "mul_mixed_dtypes": Sample(lambda x: x * x.half(), NUMBERS),
    "div": Sample(lambda x: x / (x + 1.0)),
    "multiply": Sample(lambda x: torch.multiply(x, x), NUMBERS),
    "divide": Sample(lambda x: torch.divide(x, 4), NUMBERS),
    "subtract": Sample(lambda x: torch.subtract(x, x[:1]), NUMBERS),
    **{
        f"div_{mode}": Sample(lambda x, mode=mode: torch.div(signed(x) - 0.5, x, rounding_mode=mode))
        for mode in ("floor", "trunc", None)
    },
    **{
        f"div_of_integers_{mode}": Sample(lambda x, mode=mode: torch.div(x, x[:1] * 2 + 1, rounding_mode=mode), INTS)
        for mode in ("floor", "trunc", None)
    },
    "div_by_scalar_trunc": Sample(lambda x: torch.div(x * 5 - 3, -2, rounding_mode="trunc"), NUMBERS),
    # ExecuTorch makes the number an int64, and refuses that beside an int32.
    "floor_divide": Sample(lambda x: (x * 5 - 3) // 2 + (x * 7) // (x * 0 - 4), (*FLOATS, torch.int64)),
    "remainder": Sample(lambda x: (x * 5 - 3) % 2 + (x * 7) % (x * 0 - 4), NUMBERS),
    "remainder_of_scalar": Sample(lambda x: 7 % (x * x + 1), NUMBERS),
    "atan2": Sample(lambda x: torch.atan2(x - 1, x[:1] - 1), NUMBERS),
    "logaddexp": Sample(lambda x: torch.logaddexp(awkward(x), awkward(x[:1]))),
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
    "maximum_of_awkward": Sample(lambda x: torch.maximum(awkward(x), awkward(x[:1]))),
    "max_other": Sample(lambda x: torch.max(x, x[:1]) - torch.min(x, x[:1]), NUMBERS),
    "logic": Sample(lambda x: torch.logical_xor(torch.logical_and(x, x - 1), torch.logical_or(x > 1, x)), NUMBERS),
    "bitwise_of_integers": Sample(lambda x: ((x & 3) | (x ^ x[:1])) ^ ~(x | 8), INTS),
    "bitwise_of_integer_tensors": Sample(lambda x: (x & x[:1]) | (5 & x) | (x ^ -1), INTS),
    "bitwise_of_bools": Sample(lambda x: (x & x[:1]) ^ (x | ~x[:, :1]), (torch.bool,)),
    "and_or": Sample(lambda x: ((x > 0.5) & (x < 1.0)) | (x > 1.5), NUMBERS),
    "where": Sample(lambda x: torch.where(x > 1, x, -x), NUMBERS),
    "where_scalar": Sample(lambda x: torch.where(x > 1, x, 0), NUMBERS),
    "where_other_scalar": Sample(lambda x: torch.where(x > 1, 2, x), NUMBERS),
    "where_of_scalars": Sample(lambda x: torch.where(x > 1, 2.5, -1.0), NUMBERS),
    "where_promotes": Sample(lambda x: torch.where(x > 1, x, 0.5), INTS),
    "masked_fill_infinity": Sample(lambda x: x.masked_fill(x[:1] > 1, -torch.inf)),
    "masked_fill_tensor": Sample(lambda x: x.masked_fill(x > 1, torch.tensor(2)), NUMBERS),
    "masked_fill": Sample(lambda x: x.masked_fill(x > 1, -1), NUMBERS),
    "mean": Sample(lambda x: x.mean(-1, keepdim=True)),
    "sum": Sample(lambda x: x.sum(0), ALL),
    "sum_axes": Sample(lambda x: x.sum((0, 1)), ALL),
    "amax": Sample(lambda x: x.amax(-1), NUMBERS),
    "amin": Sample(lambda x: x.amin(0, keepdim=True), NUMBERS),
    "any": Sample(lambda x: (x > 1.5).any(1), NUMBERS),
    "mean_of_all": Sample(lambda x: x.mean()),
    "mean_of_integers": Sample(lambda x: x.mean(1, dtype=torch.float32), NUMBERS),
    "sum_of_all": Sample(lambda x: x.sum(), ALL),
    "sum_to_int32": Sample(lambda x: x.sum(1, dtype=torch.int32), INTS),
    "prod": Sample(lambda x: x.prod(1), ALL),
    "prod_of_all": Sample(lambda x: (x > 0).prod(), ALL),
    "max_of_all": Sample(lambda x: x.max(), ALL),
    "min_of_all": Sample(lambda x: x.min(), ALL),
    "amax_of_awkward": Sample(lambda x: awkward(x).amax(-1)),
    "max_of_axis": Sample(lambda x: x.max(0)[0], NUMBERS),
    "place_of_max": Sample(lambda x: distinct(x).max(-1, keepdim=True)[1], NUMBERS),
    "min_of_axis": Sample(lambda x: x.min(-1, keepdim=True).values, NUMBERS),
    "place_of_min": Sample(lambda x: distinct(x).min(0).indices, NUMBERS),
    "any_of_all": Sample(lambda x: (x > 1.5).any() ^ x.any(), ALL),
    "all": Sample(lambda x: x.all(1, keepdim=True) | (x > 0.5).all(0) | x.all(), ALL),
    "all_of_axes": Sample(lambda x: torch.all(x, (0, 1)) ^ torch.any(x, (0, 1)), ALL),
    "var": Sample(lambda x: x.var(0)),
    "var_of_all": Sample(lambda x: x.var()),
    "std": Sample(lambda x: x.std((0, 1), correction=0, keepdim=True)),
    "std_unbiased": Sample(lambda x: x.std(-1, unbiased=True)),
    "logsumexp": Sample(lambda x: x.logsumexp(-1, keepdim=True), NUMBERS),
    "log_softmax_with_infinities": Sample(lambda x: torch.cat([x * torch.inf, x, x * -torch.inf], 0).log_softmax(-1)),
    "log_softmax": Sample(lambda x: x.log_softmax(0)),
    "log_softmax_to_float": Sample(lambda x: F.log_softmax(x, -1, dtype=torch.float32)),
    "log_softmax_of_awkward": Sample(lambda x: awkward(x).clamp(max=1.0).log_softmax(1)),
    "cumsum": Sample(lambda x: x.cumsum(0), ALL),
    "cumsum_to_int32": Sample(lambda x: x.cumsum(-1, dtype=torch.int32), INTS),
    **{
        f"topk_{name}_{'largest' if largest else 'smallest'}_of_{dim}": Sample(
            lambda x, index=index, dim=dim, largest=largest: distinct(x).topk(3, dim, largest)[index],
            NUMBERS,
            dynamic=dim == 1,
        )
        for index, name in enumerate(("values", "places"))
        for dim in (0, 1)
        for largest in (True, False)
    },
    "topk_of_a_dynamic_number": Sample(lambda x: x.topk(x.shape[0], 0)[0], NUMBERS),
    "topk_of_awkward": Sample(lambda x: awkward(x).topk(4)[0]),
    **{
        f"sort_{name}_{'descending' if descending else 'ascending'}": Sample(
            lambda x, index=index, descending=descending: distinct(x).sort(0, descending)[index], NUMBERS
        )
        for index, name in enumerate(("values", "places"))
        for descending in (True, False)
    },
    "sort_of_awkward": Sample(lambda x: awkward(x).sort(descending=True)[0]),
    "sort_of_bools": Sample(lambda x: x.sort()[0], (torch.bool,)),
    **{
        f"sort_stable_{'descending' if descending else 'ascending'}_of_{dim}": Sample(
            lambda x, dim=dim, descending=descending: torch.sort(x > 1, stable=True, dim=dim, descending=descending)[1],
            ALL,
        )
        for dim in (0, 1)
        for descending in (True, False)
    },
    "argsort": Sample(lambda x: distinct(x).argsort(0, descending=True), NUMBERS),
    "argsort_stable": Sample(lambda x: torch.argsort(x, dim=1, stable=True, descending=True), ALL),
    "argmin": Sample(lambda x: distinct(x).argmin(-1, keepdim=True), NUMBERS),
    "argmax": Sample(lambda x: x.argmax(-1), NUMBERS),
    "softmax": Sample(lambda x: x.softmax(-1)),
    "softmax_to_float": Sample(lambda x: F.softmax(x, -1, dtype=torch.float32)),
    "view": Sample(lambda x: x.view(x.shape[0], 2, 3), ALL),
    "flatten": Sample(lambda x: x.flatten(), ALL),
    "flatten_dynamic_and_static": Sample(lambda x: x.view(-1, 2, 3).flatten(0, 1), ALL),
    "flatten_beside_dynamic": Sample(lambda x: x.view(-1, 2, 3).flatten(-2), ALL),
    "flatten_of_a_scalar": Sample(lambda x: x[0, 0].flatten(), ALL),
    "unflatten": Sample(lambda x: x.unflatten(-1, (2, -1)), ALL),
    "stack": Sample(lambda x: torch.stack([x, x[:, :1].expand(-1, 6)], -1), ALL),
    "stack_of_two_dtypes": Sample(lambda x: torch.stack([x, x > 1], 1), NUMBERS),
    "repeat": Sample(lambda x: x.repeat(1, 3), ALL),
    "repeat_with_new_axes": Sample(lambda x: x.repeat(2, 1, 3, x.shape[0]), ALL),
    "repeat_interleave": Sample(lambda x: x.repeat_interleave(3, -1), ALL),
    "repeat_interleave_of_dynamic": Sample(lambda x: x.repeat_interleave(2, 0), ALL),
    "repeat_interleave_all": Sample(lambda x: x.repeat_interleave(2), ALL),
    "flip": Sample(lambda x: x.flip(0, -1), ALL),
    "roll": Sample(lambda x: x.roll((1, -2), (0, -1)), ALL),
    "roll_all": Sample(lambda x: x.roll(7), ALL),
    "tril": Sample(lambda x: x.tril(-1), ALL),
    "triu": Sample(lambda x: x.triu(2), ALL),
    "triu_far": Sample(lambda x: x.triu(-(2**40)), ALL),
    "pad": Sample(lambda x: F.pad(x, (1, 2)), ALL),
    "pad_of_two_axes": Sample(lambda x: F.pad(x, (0, 1, 2, 0), value=7), NUMBERS),
    "pad_with_infinity": Sample(lambda x: F.pad(x, (1, 0), value=-torch.inf)),
    "pad_constant": Sample(lambda x: torch.constant_pad_nd(x, (x.shape[0], 0), 1), ALL),
    "pad_negative": Sample(lambda x: F.pad(x, (-1, -2, 1, -1)) - F.pad(x, (-2, -1, 0, 0)), NUMBERS),
    "pad_replicate": Sample(lambda x: F.pad(x, (1, 2), mode="replicate")),
    "view_inferred": Sample(lambda x: x.view(-1), ALL),
    "reshape_after_transpose": Sample(lambda x: x.t().reshape(-1), ALL),
    "permute": Sample(lambda x: x.view(-1, 2, 3).permute(2, 0, -2), ALL),
    "transpose": Sample(lambda x: x.transpose(0, -1), ALL),
    "t_of_a_vector": Sample(lambda x: x[0].t() + x.t()[:, 0], NUMBERS),
    "detach": Sample(lambda x: (x + x).detach() + 1, NUMBERS),
    "unsqueeze": Sample(lambda x: x.unsqueeze(-1), ALL),
    "squeeze": Sample(lambda x: x.unsqueeze(1).squeeze(1), ALL),
    "squeeze_of_another_size": Sample(lambda x: x.squeeze(1), ALL),
    "expand": Sample(lambda x: x[:, None].expand(-1, 5, -1), ALL),
    "expand_with_new_axis": Sample(lambda x: x.expand(2, -1, -1), ALL),
    "slice": Sample(lambda x: x[:, 1:-1], ALL),
    "slice_step": Sample(lambda x: x[:, ::2], ALL),
    "slice_scatter": Sample(lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 3), NUMBERS),
    "slice_scatter_step": Sample(lambda x: torch.slice_scatter(x, x[:, :3], 1, 1, 100, 2), ALL),
    "slice_scatter_from_the_end": Sample(lambda x: torch.slice_scatter(x, x[:1] * 2, 0, -1), NUMBERS),
    "slice_scatter_casts": Sample(lambda x: torch.slice_scatter(x, x[:, :2].half() + 0.5, 1, -2), NUMBERS),
    "select_scatter": Sample(lambda x: torch.select_scatter(x, x[:, 2], 1, 0), ALL),
    "select_scatter_last": Sample(lambda x: torch.select_scatter(x, x[0], 0, -1), ALL),
    "scatter_value": Sample(lambda x: x.scatter(1, (x > 1).to(torch.int64) + 2, 7), NUMBERS),
    "scatter_value_of_bools": Sample(lambda x: x.scatter(1, x.to(torch.int64), True), (torch.bool,)),
    "scatter_value_of_a_part": Sample(lambda x: awkward(x).scatter(1, torch.tensor([[0, 5, 5]]), -torch.inf)),
    "scatter_value_of_dynamic": Sample(lambda x: x.scatter(0, (x > 100).to(torch.int64), 7), NUMBERS),
    "scatter_add": Sample(lambda x: x.scatter_add(1, (x > 1).to(torch.int64), x), NUMBERS),
    "scatter_add_of_a_part": Sample(lambda x: x.scatter_add(-1, torch.tensor([[0, 5, 5]]), x), NUMBERS),
    "slice_past_the_end": Sample(lambda x: x[:, 2:100], ALL),
    "select": Sample(lambda x: x[:, 2], ALL),
    "select_by_size": Sample(lambda x: x[x.shape[0] - 1], ALL),
    "select_last": Sample(lambda x: x[:, -1], ALL),
    "select_from_the_end_of_a_dynamic_axis": Sample(lambda x: x[-1], ALL),
    "mean_of_a_scalar": Sample(lambda x: x[0, 0].mean(0)),
    "cat": Sample(lambda x: torch.cat([x, x[:, :2]], -1), ALL),
    "cat_with_an_empty_vector": Sample(lambda x: torch.cat([torch.zeros(0, dtype=x.dtype), x], 0), ALL),
    "cat_of_two_dtypes": Sample(lambda x: torch.cat([x, x.half()], 0), (torch.float32, torch.float16)),
    # ExecuTorch 1.5.1 makes the input of a program static that holds a split of it.
    "split_sizes": Sample(lambda x: x.split([1, 2, 3], -1)[1], ALL, dynamic=False),
    "chunks": Sample(lambda x: x.chunk(3, -1)[2], ALL, dynamic=False),
    "chunks_the_last_shorter": Sample(lambda x: torch.cat(x.chunk(4, 1)[::-1], 1), ALL, dynamic=False),
    "contiguous": Sample(lambda x: x.t().contiguous(), ALL),
    "dropout_in_evaluation": Sample(lambda x: F.dropout(x + 1.0, 0.5, training=False)),
    "to_device": Sample(lambda x: x.to("cpu", torch.float32) + x.to(torch.zeros(1).half()), NUMBERS),
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
    "baddbmm": Sample(
        lambda x: torch.baddbmm(weight(x)[None, :1, :1], x[None], x[None].transpose(1, 2), beta=0.5, alpha=2)
    ),
    "addmm_of_no_bias": Sample(lambda x: torch.addmm(BIAS.to(x.dtype) * torch.nan, x, weight(x).t(), beta=0)),
    "conv1d": Sample(lambda x: F.conv1d(x.view(-1, 2, 3), kernels(x, axes=1), KERNEL_BIAS.to(x.dtype))),
    "conv1d_ways": Sample(
        lambda x: F.conv1d(x[:, None], kernels(x, channels=1, axes=1), stride=2, padding=1, dilation=3)
    ),
    "conv2d": Sample(lambda x: F.conv2d(x.view(-1, 1, 3, 2), kernels(x, channels=1), KERNEL_BIAS.to(x.dtype))),
    "conv2d_ways": Sample(
        lambda x: F.conv2d(
            x.view(-1, 2, 1, 3), kernels(x, channels=1), stride=(1, 2), padding=(2, 1), dilation=(1, 2), groups=2
        )
    ),
    "conv2d_that_keeps_its_size": Sample(
        lambda x: F.conv2d(x.view(-1, 2, 3, 1), kernels(x), padding="same", dilation=2)
    ),
    "conv2d_without_padding": Sample(
        lambda x: F.conv2d(x.view(-1, 2, 3, 1), KERNELS[:, :, :, :1].to(x.dtype), padding="valid")
    ),
    "conv3d": Sample(lambda x: F.conv3d(x.view(-1, 2, 1, 3, 1), KERNELS[:, :, None].to(x.dtype), padding=(0, 0, 1))),
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
    "full_likes": Sample(lambda x: torch.ones_like(x) + torch.zeros_like(x) + hidden(torch.empty_like(x)), NUMBERS),
    "full_likes_of_another_dtype": Sample(lambda x: torch.ones_like(x, dtype=torch.int32), ALL),
    "new_ones": Sample(lambda x: x.new_ones(x.shape[0], 2), ALL),
    "new_zeros": Sample(lambda x: x.new_zeros((3,)) + hidden(x.new_empty((x.shape[0], 3))), NUMBERS),
    "new_full": Sample(lambda x: x.new_full((x.shape[0],), -3, dtype=torch.float32), ALL),
    "ones_and_zeros": Sample(lambda x: torch.ones(x.shape[0], 2) + torch.zeros(2) + hidden(torch.empty(1, 2)), ALL),
    "copy": Sample(lambda x: torch.ops.aten.copy.default(x, x[:, :1].half()), NUMBERS),
    "copy_of_the_same_shape": Sample(lambda x: torch.ops.aten.copy.default(x > 1, x), ALL),
    "copy_into_new": Sample(lambda x: torch.ops.aten.copy.default(x.new_zeros(2, x.shape[0], 6), x), ALL),
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
    config = EdgeCompileConfig(_core_aten_ops_exception_list=NOT_CORE)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)
    return edge.to_executorch().buffer, partitioner


@pytest.mark.parametrize(("dtype", "outline", "dynamic"), FORMS)
def test_lowering_rows_through_executorch_equal_eager_torch(dtype: torch.dtype, outline: bool, dynamic: bool) -> None:
    # One program of all of them, which is far cheaper than a program for each.
    is_asked = {True: dynamic or (outline and dtype in EDGE_DTYPES), False: not dynamic}
    names = [name for name, row in SAMPLES.items() if dtype in row.dtypes and is_asked[row.dynamic]]
    module = Module(*[SAMPLES[name].function for name in names])
    buffer, partitioner = lowered(module, (values(4, 6, dtype=dtype),), dynamic=dynamic, outline=outline)
    assert partitioner.not_delegated == []
    assert bool(partitioner._outlined) == outline
    method = load_program(buffer).load_method("forward")
    wrong = {}
    for size in (4, 7, 1) if dynamic else (4,):
        feed = (values(size, 6, dtype=dtype, seed=size),)
        for name, result, wanted in zip(names, method.execute(feed), module(*feed), strict=True):
            is_wide = {dtype, wanted.dtype} & {torch.float16, torch.bfloat16}
            tolerance = 2e-2 if is_wide else 1e-5
            try:
                torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                wrong[name, size] = str(error)
    assert not wrong


NOT_DELEGATED = {
    "number_of_no_form": (lambda x: x.to(torch.uint8) < 300, "its number 300 has no form in torch.uint8"),
    "any_of_no_axes": (lambda x: (x > 1).any([]), "its list of axes is empty"),
    "selected_scalar": (lambda x: x[0, 0].index_select(0, torch.tensor([0])), "no axes"),
    "no_row": (lambda x: x.fmod(0.5), "no lowering for this operator"),
    "add_alpha": (lambda x: torch.add(x, x, alpha=2), "alpha is 2"),
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
    "huge_padding": (lambda x: F.pad(x.to(torch.int64), (1, 1), value=2**24 + 1), "not exact"),
    "variance_with_a_fraction": (lambda x: x.var(0, correction=0.5), "correction is 0.5"),
    "transposed_convolution": (lambda x: F.conv_transpose1d(x[None, :2], KERNELS[:2, :, 0]), "transposed"),
    "order_of_a_scalar": (lambda x: x[0, 0].topk(1)[0], "no axes"),
    "flat_argmin": (lambda x: x.argmin(), "flattens"),
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
