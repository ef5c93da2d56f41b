"""What each node kind computes: rows of fields and inputs with the eager torch function that says the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from executorch_mlx.backends.mlx.program import Node, Tid, Vid, make_node
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES

Tensor = torch.Tensor
# An input: a function of the generator, the dtype that the sample runs in, and the size that stands for N in shapes.
Maker = Callable[[torch.Generator, torch.dtype, int], Tensor]

# Without a sample of their own:
WITHOUT_SAMPLE = {
    "MetalKernelNode": "Metal source of the program's own, which is refused",
    "NoopNode": "computes nothing",
    "UpdateAndAttendNode": "attends over a KV cache, which the tests of caches and sessions run",
}

# A dimension that differs between runs of one program.
N = -1
SIZES = (3, 6)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I8, I32, I64, U8, BOOL = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool
FLOATS = (F32, F16, BF16)
INTS = (I32, I64)
NUMBERS = (*FLOATS, *INTS)
EVERY = (*NUMBERS, BOOL)
# What a kind takes and torch does not, or not in a sample's terms: docs/differences.md lists it; for control flow it is
# what the instructions in its chains do not take.
WITHOUT_DTYPE = {
    **dict.fromkeys(("AbsNode", "CeilNode", "ClipNode", "FloorDivideNode", "FloorNode", "PowerNode"), (BOOL,)),
    **dict.fromkeys(("RemainderNode", "RoundNode", "SquareNode", "SubtractNode", "TruncNode"), (BOOL,)),
    **dict.fromkeys(("ArgPartitionNode", "ArgmaxNode", "ArgminNode", "PartitionNode"), (BOOL,)),
    **dict.fromkeys(("GeluNode", "LogAddExpNode", "MeanNode", "MedianNode", "SiluNode", "StdNode"), (*INTS, BOOL)),
    "VarNode": (*INTS, BOOL),
    "IfNode": (BOOL,),
    "ScanNode": (I32, BOOL),
}
# How far a result may be from torch's, in parts of the larger of it and 1.
TOLERANCE = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


@dataclass(frozen=True)
class Sample:
    """One node with its operands.

    Attributes:
        kind: the node's kind.
        expected: the eager function of the tensors and, after them, the values; a tensor or number, or a list of them.
        inputs: the tensors, which lie in the slots Tid(0), Tid(1), and so on.
        reads: the fields that name those tensors, in order; fields that take lists are given in ``fields``.
        fields: the node's other fields.
        values: numbers handed in, which lie in the slots Vid(0), Vid(1), and so on.
        dtypes: what it runs in.
        tolerance: a multiple of the dtype's tolerance.
        chains: chains of instructions for the node to run; the node's own is chain 0.
        results: the slots compared; by default what ``out`` or ``outs`` names, which the test chooses.
        num_outs: how many tensors ``outs`` names.
        seen: what is compared of a result, a function of the result and the tensors; by default all of it.
        label: tells it from other samples of its kind.
    """

    kind: str
    expected: Callable[..., Any]
    inputs: tuple[Maker, ...] = ()
    reads: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (F32,)
    tolerance: float = 1.0
    chains: tuple[list[Node], ...] = ()
    results: tuple[Tid | Vid, ...] = ()
    num_outs: int = 0
    seen: Callable[..., Tensor] | None = None
    label: str = ""

    def make_inputs(self, dtype: torch.dtype, size: int) -> list[Tensor]:
        """Draw the tensors, the same ones for the same arguments."""
        rng = torch.Generator().manual_seed(size)
        return [make(rng, dtype, size) for make in self.inputs]


# -- inputs -----------------------------------------------------------------


def draw(*shape: int, low: float = -3, high: float = 3, dtype: torch.dtype | None = None) -> Maker:
    """Numbers from low up to high, of the sample's dtype if no other is given."""

    def make(rng: torch.Generator, given: torch.dtype, size: int) -> Tensor:
        sizes, kind = [size if dim == N else dim for dim in shape], dtype or given
        if kind == BOOL:
            return torch.randint(0, 2, sizes, generator=rng).bool()
        if not kind.is_floating_point:
            return torch.randint(math.floor(low), math.ceil(high), sizes, generator=rng).to(kind)
        return (torch.rand(sizes, generator=rng) * (high - low) + low).to(kind)

    return make


def given(values: Any, dtype: torch.dtype | None = None) -> Maker:
    """Return these numbers."""
    return lambda rng, kind, size: torch.tensor(values, dtype=dtype or kind)


def corners(rng: torch.Generator, dtype: torch.dtype, size: int) -> Tensor:
    """Where functions go wrong: NaN, infinities, both zeros, halves, the ends of the dtype's range."""
    if dtype == BOOL:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        signed = [-1, -2, -3, -7, low + 1] if low else []
        return torch.tensor([0, 1, 2, 3, 7, low, high, high - 1, *signed], dtype=dtype)
    ends = torch.finfo(dtype)
    halves = [0.5, -0.5, 1.5, -1.5, 2.5, -2.5]
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1, -1, *halves, 7, 12.25, -12.25, 1e4, ends.max, ends.min]
    return torch.tensor([*values, ends.tiny, ends.tiny / 2], dtype=dtype)


def across(make: Maker) -> Maker:
    """Return the numbers as a column, to meet each of a row."""
    return lambda *how: make(*how)[:, None]


def least(rng: torch.Generator, dtype: torch.dtype, size: int) -> Tensor:
    return torch.full((size,), torch.iinfo(dtype).min, dtype=dtype)


def divided(place: int) -> Maker:
    """Each corner by each, but by 0, and the least by -1; place 0 has the dividends, 1 the divisors."""

    def make(rng: torch.Generator, dtype: torch.dtype, size: int) -> Tensor:
        low = torch.iinfo(dtype).min
        values = corners(rng, dtype, size).tolist()
        pairs = [(a, b) for a in values for b in values if b and (a, b) != (low, -1)]
        return torch.tensor([pair[place] for pair in pairs], dtype=dtype)

    return make


def stacked(make: Maker) -> Maker:
    """Return what a maker makes as a batch of one."""
    return lambda rng, kind, size: make(rng, kind, size)[None]


def packed(*shape: int, bits: int) -> Maker:
    """Random codes of so many bits, packed along the last axis into 32-bit words, the first in the lowest bits."""

    def make(rng: torch.Generator, dtype: torch.dtype, size: int) -> Tensor:
        codes = torch.randint(0, 1 << bits, shape, generator=rng).reshape(*shape[:-1], -1, 32 // bits)
        words: Tensor = sum(codes[..., place] << (bits * place) for place in range(32 // bits))
        return words.to(torch.uint32)

    return make


def dequantized(w: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int) -> Tensor:
    """Scale * code + bias, for each group of codes along the last axis, in float32."""
    shifts = torch.arange(0, 32, bits)
    codes = (w.long()[..., None] >> shifts) & ((1 << bits) - 1)
    grouped = codes.reshape(*scales.shape, group).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)


def code(dtype: torch.dtype) -> int:
    """ExecuTorch's number for a dtype."""
    return SCALAR_TYPE_CODES[str(dtype).removeprefix("torch.")]


# -- rows of one form ---------------------------------------------------------


def unary(kind: str, expected: Callable[..., Any], *inputs: Maker, **how: Any) -> Sample:
    how.setdefault("dtypes", FLOATS)
    return Sample(kind, expected, inputs or (draw(2, N),), ("x",), **how)


def binary(kind: str, expected: Callable[..., Any], *inputs: Maker, **how: Any) -> Sample:
    how.setdefault("dtypes", NUMBERS)
    return Sample(kind, expected, inputs or (draw(2, N), draw(2, N)), ("a", "b"), **how)


def reductions(kind: str, expected: Callable[[Tensor, tuple[int, ...], bool], Tensor], **how: Any) -> Iterable[Sample]:
    """Over all axes, one, a negative one, and several, with and without keeping them."""
    how.setdefault("dtypes", FLOATS)
    more = how.pop("fields", {})
    for axes, keepdims in (([], False), ([], True), ([0], False), ([-1], True), ([0, -1], False), ([1, 2], True)):
        dims = tuple(axes) or (0, 1, 2)
        yield Sample(
            kind,
            lambda x, dims=dims, keepdims=keepdims: expected(x, dims, keepdims),
            (draw(2, N, 4),),
            ("x",),
            {"axes": axes, "keepdims": keepdims, **more},
            label=f"axes={axes}{'_kept' if keepdims else ''}",
            **how,
        )


def folded(function: Callable[..., Any]) -> Callable[[Tensor, tuple[int, ...], bool], Tensor]:
    """Return a function of one axis as one of several, each of which it takes in turn."""

    def fold(x: Tensor, dims: tuple[int, ...], keepdims: bool) -> Tensor:
        for dim in sorted((dim % x.ndim for dim in dims), reverse=True):
            x = function(x, dim, keepdim=keepdims)
        return x

    return fold


def middle(x: Tensor, dims: tuple[int, ...], keepdims: bool) -> Tensor:
    """Median that is the mean of the two middle values of an even count."""
    dims = tuple(dim % x.ndim for dim in dims)
    rest = [dim for dim in range(x.ndim) if dim not in dims]
    flat = x.permute(*rest, *dims).flatten(len(rest)).sort(-1).values
    count = flat.shape[-1]
    result = (flat[..., (count - 1) // 2] + flat[..., count // 2]) / 2
    return result.reshape([1 if dim in dims else size for dim, size in enumerate(x.shape)]) if keepdims else result


def last_to_second(x: Tensor) -> Tensor:
    """Channels-last to torch's order."""
    return x.movedim(-1, 1)


def convolution(function: Callable[..., Tensor], is_transposed: bool = False) -> Callable[..., Tensor]:
    """Return torch's convolution of operands whose channels come last; weights are [out, spatial, in]."""

    def run(x: Tensor, w: Tensor, **how: Any) -> Tensor:
        weight = w.movedim(-1, 1)
        if is_transposed:
            # torch wants [in, out / groups, spatial]: the groups are on the first axis of the one and the other.
            groups = how.get("groups", 1)
            parts = weight.unflatten(0, (groups, -1)).transpose(1, 2)
            weight = parts.flatten(0, 1)
        return function(last_to_second(x), weight, **how).movedim(1, -1)

    return run


def convolutions() -> Iterable[Sample]:
    letters = {1: [""], 2: ["_h", "_w"], 3: ["_d", "_h", "_w"]}
    for rank in (1, 2, 3):
        plain = getattr(F, f"conv{rank}d")
        transposed = getattr(F, f"conv_transpose{rank}d")
        spatial = [N, 6, 7][:rank]
        for label, how in (
            ("plain", {}),
            ("stride", {"stride": [2, 1, 2], "padding": [1, 2, 0]}),
            ("dilation", {"dilation": [2, 1, 2], "padding": [2, 1, 1]}),
            ("groups", {"groups": 2, "padding": [1, 1, 1]}),
            ("output_padding", {"stride": [2, 3, 2], "output_padding": [1, 2, 1], "padding": [1, 0, 1]}),
        ):
            groups = how.get("groups", 1)
            options = {name: tuple(value[:rank]) for name, value in how.items() if name != "groups"}
            fields: dict[str, Any] = {
                f"{name}{letter}": value
                for name, values in options.items()
                for letter, value in zip(letters[rank], values, strict=True)
            }
            options |= {"groups": groups}
            fields |= {"groups": groups}
            x = draw(2, *spatial, 4, low=-1, high=1)
            weight = draw(6, *[3, 2, 3][:rank], 4 // groups, low=-1, high=1)
            for is_transposed, name, function in (
                (False, f"Conv{rank}DNode", plain),
                (True, f"ConvTranspose{rank}DNode", transposed),
            ):
                if label == "output_padding" and not is_transposed:
                    continue
                run = convolution(function, is_transposed)
                yield Sample(
                    name,
                    lambda x, w, run=run, options=options: run(x, w, **options),
                    (x, weight),
                    ("x", "w"),
                    fields,
                    tolerance=20,
                    dtypes=FLOATS if label == "stride" else (F32,),
                    label=label,
                )


def quantized() -> Iterable[Sample]:
    """Affine weights of 2, 4 and 8 bits, in groups of 32, 64 and 128."""
    for bits, group in ((2, 32), (4, 32), (4, 64), (4, 128), (8, 64), (8, 128)):
        how = {"bits": bits, "group_size": group, "mode": "affine"}

        def whole(w: Tensor, s: Tensor, b: Tensor, bits: int = bits, group: int = group) -> Tensor:
            return dequantized(w, s, b, bits, group)

        label = f"{bits}_bits_by_{group}"
        # [8, 256], and four of them.
        w, side = packed(8, 256, bits=bits), draw(8, 256 // group, low=-2 / 2**bits, high=2 / 2**bits)
        experts, sides = packed(4, 8, 256, bits=bits), draw(4, 8, 256 // group, low=-2 / 2**bits, high=2 / 2**bits)
        yield Sample(
            "DequantizeNode",
            lambda w, s, b, whole=whole: whole(w, s, b).to(s.dtype),
            (w, side, side),
            ("w", "scales", "biases"),
            how,
            dtypes=FLOATS,
            label=label,
        )
        for is_transposed in (True, False):
            x = draw(2, N, 256 if is_transposed else 8, low=-1, high=1)
            yield Sample(
                "QuantizedMatmulNode",
                lambda x, w, s, b, whole=whole, t=is_transposed: (
                    x.float() @ (whole(w, s, b).T if t else whole(w, s, b))
                ).to(x.dtype),
                (x, w, side, side),
                ("x", "w", "scales", "biases"),
                {**how, "transpose": is_transposed},
                dtypes=FLOATS,
                tolerance=20,
                label=f"{label}{'_transposed' if is_transposed else ''}",
            )
            x = draw(N, 1, 256 if is_transposed else 8, low=-1, high=1)
            yield Sample(
                "GatherQmmNode",
                lambda x, w, s, b, i, whole=whole, t=is_transposed: (
                    x.float() @ (whole(w, s, b).mT if t else whole(w, s, b))[i]
                ).to(x.dtype),
                (x, experts, sides, sides, draw(N, low=0, high=4, dtype=I32)),
                ("x", "w", "scales", "biases", "rhs_indices"),
                {**how, "transpose": is_transposed},
                dtypes=(F32, F16) if bits == 4 else (F32,),
                tolerance=20,
                label=f"{label}{'_transposed' if is_transposed else ''}",
            )
    how = {"bits": 4, "group_size": 32, "mode": "affine"}
    # Ones, of which halves add up no more than 256 or 2,048.
    ones = given([[0x11111111] * 512], torch.uint32), given([[1.0] * 128]), given([[0.0] * 128])
    for kind, expert in (("QuantizedMatmulNode", ()), ("GatherQmmNode", (given([0], I32),))):
        yield Sample(
            kind,
            lambda x, w, s, b, *_: (x.float() @ dequantized(w, s, b, 4, 32).mT).to(x.dtype),
            (given([[[1.0] * 4096]]), *[of_ones if not expert else stacked(of_ones) for of_ones in ones], *expert),
            ("x", "w", "scales", "biases", "rhs_indices")[: 4 + len(expert)],
            how,
            dtypes=FLOATS,
            label="many_ones",
        )
    yield Sample(
        "DequantizeNode",
        lambda w, s, b: dequantized(w, s, b, 4, 32).to(F16),
        (packed(3, 64, bits=4), draw(3, 2), draw(3, 2)),
        ("w", "scales", "biases"),
        {**how, "dtype": code(F16)},
        label="to_another_dtype",
    )
    for flag in (1, Vid(0)):
        yield Sample(
            "GatherQmmNode",
            lambda x, w, s, b, left, right, *_: x[left] @ dequantized(w, s, b, 4, 32).mT[right],
            (
                draw(2, 3, 64, low=-1, high=1),
                packed(4, 8, 64, bits=4),
                draw(4, 8, 2, low=-0.1, high=0.1),
                draw(4, 8, 2, low=-0.1, high=0.1),
                given([0, 1, 1, 0], I32),
                given([0, 1, 1, 3], I32),
            ),
            ("x", "w", "scales", "biases", "lhs_indices", "rhs_indices"),
            {**how, "sorted_indices_flag": flag},
            values=(0,),
            tolerance=20,
            label=f"both_sides_flag_{'value' if flag != 1 else 'literal'}",
        )


# -- oracles by hand ----------------------------------------------------------


def rotated(x: Tensor, offset: Any, dims: int, base: float, scale: float = 1.0, traditional: bool = False) -> Tensor:
    """Rotary positions of [B, H, L, D], of pairs (i, i + dims / 2), or of neighbours."""
    half = dims // 2
    positions = (torch.arange(x.shape[2]) + torch.as_tensor(offset).reshape(-1, 1, 1)) * scale
    angles = positions[..., None] * base ** (-torch.arange(half) / half)
    cosines, sines = angles.cos(), angles.sin()
    part = x[..., :dims].float()
    low, high = (part[..., ::2], part[..., 1::2]) if traditional else (part[..., :half], part[..., half:])
    pairs = low * cosines - high * sines, low * sines + high * cosines
    turned = torch.stack(pairs, -1).flatten(-2) if traditional else torch.cat(pairs, -1)
    return torch.cat([turned.to(x.dtype), x[..., dims:]], -1)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.3, enable_gqa=True)


def shifted_sums(x: Tensor, axis: int, reverse: bool, inclusive: bool) -> Tensor:
    """Running sums, from either end, with or without the element itself."""
    given = x.flip(axis) if reverse else x
    sums = given.cumsum(axis)
    sums = sums if inclusive else sums - given
    return sums.flip(axis) if reverse else sums


def edge_padded(x: Tensor, widths: list[tuple[int, int]]) -> Tensor:
    for axis, (before, after) in enumerate(widths):
        places = torch.arange(-before, x.shape[axis] + after).clamp(0, x.shape[axis] - 1)
        x = x.index_select(axis, places)
    return x


def updated(x: Tensor, new: Tensor, *index: slice) -> Tensor:
    result = x.clone()
    result[index] = new.to(x.dtype)
    return result


def smallest(count: int, axis: int) -> Callable[..., Tensor]:
    """Return what a partition promises: the first ones in any order, and the one after them in its place."""
    return lambda out, *_: torch.cat(
        [
            out.narrow(axis, 0, count).sort(axis).values,
            out.narrow(axis, count, 1),
            out.narrow(axis, count, out.shape[axis] - count).sort(axis).values,
        ],
        axis,
    )


def smallest_indices(count: int, axis: int) -> Callable[..., Tensor]:
    return lambda out, x: smallest(count, axis)(x.gather(axis, out))


# -- the table ---------------------------------------------------------------

NAN, INF = math.nan, math.inf
HALVES = given([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, -0.4, 1e4, INF])
SIGNS = given([7, -7, 7, -7, 6, -6, 0, -1]), given([2, 2, -2, -2, 3, 3, -5, 5])

DIVIDED = [NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 2.5, -2.5, 1, -1, 7, -7]

# With the range that they are sampled in, and the tolerance.
SMOOTH = (
    ("ArccosNode", torch.acos, -1, 1, 2),
    ("ArccoshNode", torch.acosh, 1, 5, 4),
    ("ArcsinNode", torch.asin, -1, 1, 1),
    ("ArcsinhNode", torch.asinh, -5, 5, 1),
    ("ArctanNode", torch.atan, -5, 5, 1),
    ("ArctanhNode", torch.atanh, -0.9, 0.9, 1),
    ("CosNode", torch.cos, -9, 9, 1),
    ("CoshNode", torch.cosh, -3, 3, 1),
    ("ErfNode", torch.erf, -3, 3, 1),
    ("ExpNode", torch.exp, -3, 3, 1),
    ("Expm1Node", torch.expm1, -3, 3, 1),
    ("Log10Node", torch.log10, 0.01, 9, 1),
    ("Log1pNode", torch.log1p, -0.9, 9, 1),
    ("Log2Node", torch.log2, 0.01, 9, 1),
    ("LogNode", torch.log, 0.01, 9, 1),
    ("ReciprocalNode", torch.reciprocal, 0.5, 9, 1),
    ("RsqrtNode", torch.rsqrt, 0.1, 9, 1),
    ("SigmoidNode", torch.sigmoid, -9, 9, 1),
    ("SiluNode", F.silu, -9, 9, 1),
    ("SinNode", torch.sin, -9, 9, 1),
    ("SinhNode", torch.sinh, -3, 3, 1),
    ("SqrtNode", torch.sqrt, 0, 9, 1),
    ("TanNode", torch.tan, -1, 1, 1),
    ("TanhNode", torch.tanh, -3, 3, 1),
)
ARITHMETIC = (
    ("AddNode", torch.add),
    ("MaximumNode", torch.maximum),
    ("MinimumNode", torch.minimum),
    ("MultiplyNode", torch.mul),
)
COMPARED = (
    ("EqualNode", torch.eq),
    ("GreaterEqualNode", torch.ge),
    ("GreaterNode", torch.gt),
    ("LessEqualNode", torch.le),
    ("LessNode", torch.lt),
    ("LogicalAndNode", torch.logical_and),
    ("LogicalOrNode", torch.logical_or),
    ("NotEqualNode", torch.ne),
)
BITWISE = (
    ("BitwiseAndNode", torch.bitwise_and),
    ("BitwiseOrNode", torch.bitwise_or),
    ("BitwiseXorNode", torch.bitwise_xor),
)
STEPS = (
    ("AbsNode", torch.abs),
    ("CeilNode", torch.ceil),
    ("FloorNode", torch.floor),
    ("IdCopyNode", torch.clone),
    ("NegNode", torch.neg),
    ("SignNode", torch.sign),
    ("SquareNode", torch.square),
    ("TruncNode", torch.trunc),
)

ELEMENTWISE = [
    *(
        unary(kind, function, draw(2, N, low=low, high=high), tolerance=tolerance)
        for kind, function, low, high, tolerance in SMOOTH
    ),
    *(
        unary(kind, function, draw(2, N, low=1, high=1.9), dtypes=(*INTS, BOOL), label="of_integers")
        for kind, function, *_ in SMOOTH
        if kind != "SiluNode"
    ),
    *(
        unary(kind, function, dtypes=EVERY if kind in ("IdCopyNode", "SignNode") else NUMBERS)
        for kind, function in STEPS
    ),
    unary("TruncNode", torch.trunc, given([-2.5, -0.5, 0.5, 2.5, NAN, INF, -INF]), label="special"),
    unary("AbsNode", torch.abs, given([-0.0, NAN, -INF]), label="special"),
    unary("SignNode", torch.sign, given([-0.0, 0.0, -INF, INF]), label="special"),
    unary("RoundNode", torch.round, HALVES, label="half_to_even"),
    unary("RoundNode", torch.round, dtypes=INTS, label="of_integers"),
    unary(
        "RoundNode",
        lambda x: torch.round(x, decimals=2),
        draw(2, N),
        fields={"decimals": 2},
        dtypes=(F32,),
        label="decimals",
    ),
    unary(
        "RoundNode",
        lambda x: torch.round(x, decimals=-1),
        draw(2, N, low=-90, high=90),
        fields={"decimals": -1},
        dtypes=(F32,),
        label="tens",
    ),
    unary("GeluNode", F.gelu, fields={"approximate": "none"}, tolerance=2),
    unary(
        "GeluNode", lambda x: F.gelu(x, approximate="tanh"), fields={"approximate": "tanh"}, tolerance=2, label="tanh"
    ),
    unary("LogicalNotNode", torch.logical_not, draw(2, N, low=-1, high=2), dtypes=EVERY),
    unary("BitwiseInvertNode", torch.bitwise_not, dtypes=(*INTS, U8, BOOL)),
    *(
        unary(
            "AsTypeNode",
            lambda x, to=to: x.to(to),
            dtypes=(F32, I64, BOOL),
            fields={"scalar_type": code(to)},
            label=f"to_{str(to)[6:]}",
        )
        for to in (F32, F16, BF16, I32, I64, BOOL)
    ),
    *(
        unary(
            kind,
            function,
            corners,
            dtypes=FLOATS if kind == "SiluNode" else (*NUMBERS, I8, U8),
            label="corners",
        )
        for kind, function, *_ in (*SMOOTH, *STEPS, ("RoundNode", torch.round))
    ),
    *(
        unary(
            "GeluNode",
            lambda x, how=how: F.gelu(x, approximate=how),
            given(values),
            fields={"approximate": how},
            label=f"{how}_{label}",
        )
        for how in ("none", "tanh")
        for label, values in (
            ("corners", [NAN, -INF, 0.0, -0.0, 6e4, -6e4, 12.25, -12.25, -3, -2, -0.5]),
            ("inf", [INF]),
        )
    ),
    # Half precision is computed in float32: where it is close to 0, too.
    unary(
        "GeluNode",
        F.gelu,
        given([-3, -2.5, -2]),
        fields={"approximate": "none"},
        dtypes=(F16, BF16),
        seen=lambda out, x: 100 * out,
        label="tail",
    ),
    unary(
        "RoundNode",
        lambda x: torch.round(x, decimals=2),
        given([1e4, -3e4, 0.125, 2.345, NAN, INF]),
        fields={"decimals": 2},
        label="decimals_of_large",
    ),
    *(
        unary(
            "AsTypeNode",
            lambda x, to=to: x.to(to),
            corners,
            dtypes=dtypes,
            fields={"scalar_type": code(to)},
            label=f"corners_to_{str(to)[6:]}",
        )
        for to, dtypes in (
            *((to, (*NUMBERS, I8, U8, BOOL)) for to in (*FLOATS, BOOL)),
            *((to, (*INTS, I8, U8, BOOL)) for to in (*INTS, I8, U8)),
        )
    ),
    # Two operands.
    *(
        binary(kind, function, across(corners), corners, dtypes=dtypes, label="corners")
        for dtypes, rows in (
            (
                (*NUMBERS, I8, U8, BOOL),
                (*ARITHMETIC, *COMPARED, ("Atan2Node", torch.atan2), ("DivideNode", torch.div)),
            ),
            ((*NUMBERS, I8, U8), (("PowerNode", torch.pow), ("SubtractNode", torch.sub))),
            (FLOATS, (("FloorDivideNode", torch.floor_divide), ("LogAddExpNode", torch.logaddexp))),
            ((*INTS, I8, U8, BOOL), BITWISE),
        )
        for kind, function in rows
    ),
    *(
        binary(kind, function, divided(0), divided(1), dtypes=(*INTS, I8, U8), label="corners")
        for kind, function in (("FloorDivideNode", torch.floor_divide), ("RemainderNode", torch.remainder))
    ),
    # There is no such number, and torch may end the process: it wraps around, and nothing remains.
    *(
        binary(kind, function, least, given(-1), dtypes=(*INTS, I8), label="least_by_minus_one")
        for kind, function in (
            ("FloorDivideNode", lambda a, b: a * b),
            ("RemainderNode", lambda a, b: torch.zeros_like(a)),
        )
    ),
    binary("RemainderNode", torch.remainder, given([3e38]), given([0.7]), dtypes=(F32,), label="of_very_large"),
    binary("RemainderNode", torch.remainder, across(given(DIVIDED)), given(DIVIDED), dtypes=FLOATS, label="corners"),
    *(
        binary(kind, function, draw(N, 50, low=-90, high=90), draw(N, 50), dtypes=FLOATS, label="of_floats")
        for kind, function in (("FloorDivideNode", torch.floor_divide), ("RemainderNode", torch.remainder))
    ),
    binary(
        "FloorDivideNode", torch.floor_divide, given([1.0, 2.5, -7, 0.5]), given([0.1]), dtypes=FLOATS, label="tenths"
    ),
    *(binary(kind, function, draw(2, N), draw(N)) for kind, function in (*ARITHMETIC, ("SubtractNode", torch.sub))),
    *(
        binary(kind, function, draw(2, N, low=-1, high=2), draw(2, N, low=-1, high=2), dtypes=EVERY)
        for kind, function in COMPARED
    ),
    *(
        binary(kind, function, given([NAN, 1, NAN, INF]), given([1, NAN, NAN, -INF]), dtypes=FLOATS, label="nan")
        for kind, function in (
            ("EqualNode", torch.eq),
            ("GreaterEqualNode", torch.ge),
            ("LessNode", torch.lt),
            ("MaximumNode", torch.maximum),
            ("MinimumNode", torch.minimum),
            ("NotEqualNode", torch.ne),
        )
    ),
    *(
        binary(kind, function, draw(2, N, low=-9, high=9), draw(2, N, low=-9, high=9), dtypes=(*INTS, BOOL))
        for kind, function in BITWISE
    ),
    *(
        binary(kind, function, draw(2, N), draw(2, N, dtype=I64), dtypes=(*FLOATS, I32, BOOL), label="with_int64")
        for kind, function in (("AddNode", torch.add), ("MultiplyNode", torch.mul))
    ),
    binary("Atan2Node", torch.atan2, dtypes=FLOATS),
    binary("Atan2Node", torch.atan2, given([0.0, -0.0, 1, -1]), given([-1, -1, 0, 0]), dtypes=(F32,), label="axes"),
    binary("LogAddExpNode", torch.logaddexp, dtypes=FLOATS),
    binary("LogAddExpNode", torch.logaddexp, given([-INF, -INF, INF]), given([-INF, 1, 1]), dtypes=(F32,), label="inf"),
    binary("DivideNode", torch.div, draw(2, N), draw(2, N, low=1, high=4)),
    binary("DivideNode", torch.div, given([1, -1, 0]), given([0, 0, 0]), dtypes=(*FLOATS, I32), label="by_zero"),
    binary("FloorDivideNode", torch.floor_divide, *SIGNS, dtypes=NUMBERS, label="signs"),
    binary("RemainderNode", torch.remainder, *SIGNS, dtypes=NUMBERS, label="signs"),
    binary("FloorDivideNode", torch.floor_divide, draw(2, N, low=0, high=9), given([[2], [3]]), dtypes=(U8, F32)),
    binary("RemainderNode", torch.remainder, draw(2, N, low=0, high=9), given([[2], [3]]), dtypes=(U8, F32)),
    binary(
        "FloorDivideNode", torch.floor_divide, given([5.5, -5.5, 5.5]), given([2, 2, INF]), dtypes=(F32,), label="f"
    ),
    binary("RemainderNode", torch.remainder, given([5.5, -5.5, 5.5]), given([2, 2, -2]), dtypes=(F32,), label="f"),
    binary("FloorDivideNode", torch.floor_divide, given([(1 << 40) + 1]), given([-3]), dtypes=(I64,), label="large"),
    binary("RemainderNode", torch.remainder, given([(1 << 40) + 1]), given([-3]), dtypes=(I64,), label="large"),
    binary("PowerNode", torch.pow, draw(2, N, low=0.5, high=3), draw(2, N), dtypes=FLOATS, tolerance=4),
    binary("PowerNode", torch.pow, draw(2, N), draw(2, N, low=0, high=4), dtypes=INTS, label="of_integers"),
    binary("PowerNode", torch.pow, given([-2, 0, 0, NAN]), given([3, 0, 2, 0]), dtypes=(F32,), label="special"),
    # Three.
    Sample(
        "ClipNode", torch.clip, (draw(2, N), given(-1), given(1)), ("x", "a_min", "a_max"), dtypes=NUMBERS, label="both"
    ),
    Sample(
        "ClipNode", lambda x, low: x.clip(min=low), (draw(2, N), draw(N)), ("x", "a_min"), dtypes=NUMBERS, label="low"
    ),
    Sample(
        "ClipNode",
        lambda x, high: x.clip(max=high),
        (draw(2, N), given(1)),
        ("x", "a_max"),
        dtypes=NUMBERS,
        label="high",
    ),
    Sample(
        "ClipNode",
        torch.clip,
        (given([NAN, -INF, INF, 0]), given(1), given(-1)),
        ("x", "a_min", "a_max"),
        dtypes=FLOATS,
        label="crossed_and_nan",
    ),
    *(
        Sample(
            "ClipNode",
            torch.clip,
            (corners, given(low), given(high)),
            ("x", "a_min", "a_max"),
            dtypes=dtypes,
            label=f"corners_{low}_{high}",
        )
        for low, high, dtypes in (
            (1, 3, (*NUMBERS, I8, U8)),
            (NAN, 1, FLOATS),
            (0, NAN, FLOATS),
            (-INF, INF, FLOATS),
            (-0.0, 0.0, FLOATS),
        )
    ),
    Sample(
        "WhereNode",
        torch.where,
        (draw(2, N, dtype=BOOL), draw(2, N), draw(1, N)),
        ("condition", "x", "y"),
        dtypes=EVERY,
    ),
]


def extreme(name: str) -> Callable[[Tensor, tuple[int, ...], bool], Tensor]:
    return lambda x, dims, keepdims: getattr(torch, name)(x, dims, keepdim=keepdims)


def over(name: str, **how: Any) -> Callable[[Tensor, tuple[int, ...], bool], Tensor]:
    return lambda x, dims, keepdims: getattr(torch, name)(x, dim=dims, keepdim=keepdims, **how)


EMPTY = draw(2, 0)
# Of a number without axes.
OF_A_NUMBER = [
    unary(kind, function, given(3), fields=fields, dtypes=(F32,), label="of_a_number")
    for kind, function, fields in (
        ("ArgmaxNode", lambda x: x.argmax(0), {"axis": 0}),
        ("CumsumNode", lambda x: x.cumsum(0), {"axis": 0}),
        ("SoftmaxNode", lambda x: x.softmax(-1), {"axis": -1}),
        ("SortNode", lambda x: x.sort(0).values, {"axis": 0}),
        ("SumNode", lambda x: x.sum(-1), {"axes": [-1]}),
        ("SumNode", lambda x: x.sum(), {"axes": []}),
    )
]

# Over an axis of no elements.
OF_NOTHING = [
    *(
        unary(kind, function, EMPTY, fields={"axes": [1]}, dtypes=dtypes, label="of_nothing")
        for kind, function, dtypes in (
            ("AllNode", lambda x: x.all(1), (BOOL,)),
            ("AnyNode", lambda x: x.any(1), (BOOL,)),
            ("LogSumExpNode", lambda x: x.logsumexp(1), (*NUMBERS, BOOL)),
            ("MeanNode", lambda x: x.mean(1), FLOATS),
            ("StdNode", lambda x: x.std(1, correction=0), FLOATS),
            ("VarNode", lambda x: x.var(1, correction=0), FLOATS),
            ("ProdNode", lambda x: x.prod(1), (F32, I64)),
            ("SumNode", lambda x: x.sum(1), (F32, I64)),
        )
    ),
]

# Along an axis of three, next to one of none.
NEXT_TO_NOTHING = [
    *(
        unary(kind, function, draw(3, 0), fields=fields, dtypes=(F32, I64), label="next_to_nothing")
        for kind, function, fields in (
            ("ArgmaxNode", lambda x: x.argmax(0), {"axis": 0}),
            ("ArgminNode", lambda x: x.argmin(0, keepdim=True), {"axis": 0, "keepdims": True}),
            ("MaxNode", lambda x: x.amax(0), {"axes": [0]}),
            ("MinNode", lambda x: x.amin(0), {"axes": [0]}),
            ("SumNode", lambda x: x.sum(0), {"axes": [0]}),
            ("SortNode", lambda x: x.sort(0).values, {"axis": 0}),
            ("CumsumNode", lambda x: x.cumsum(0), {"axis": 0}),
        )
    ),
]

# Rows of three, each with something special.
ROWS = [
    [1, NAN, 3],
    [NAN, NAN, NAN],
    [INF, 1, 2],
    [-INF, 1, 2],
    [INF, -INF, 1],
    [-INF, -INF, -INF],
    [INF, INF, INF],
    [NAN, INF, 2],
    [-INF, 1, NAN],
    [0.0, -0.0, 0.0],
    [-0.0, -0.0, -0.0],
    [3, 1, 3],
    [300, 300, 300],
    [6e4, 6e4, 1],
]

SPECIAL_ROWS = [
    *(
        unary(kind, function, given(ROWS), fields=fields, label=f"rows{label}")
        for kind, function, fields, label in (
            ("AllNode", lambda x: x.all(1), {"axes": [1]}, ""),
            ("AnyNode", lambda x: x.any(1), {"axes": [1]}, ""),
            ("ArgmaxNode", lambda x: x.argmax(1), {"axis": 1}, ""),
            ("ArgminNode", lambda x: x.argmin(1), {"axis": 1}, ""),
            ("CumsumNode", lambda x: x.cumsum(1), {"axis": 1}, ""),
            ("LogSumExpNode", lambda x: x.logsumexp(1), {"axes": [1]}, ""),
            ("MaxNode", lambda x: x.amax(1), {"axes": [1]}, ""),
            ("MeanNode", lambda x: x.mean(1), {"axes": [1]}, ""),
            ("MedianNode", lambda x: x.median(1).values, {"axes": [1]}, ""),
            ("MinNode", lambda x: x.amin(1), {"axes": [1]}, ""),
            ("ProdNode", lambda x: x.prod(1), {"axes": [1]}, ""),
            ("SoftmaxNode", lambda x: x.softmax(1), {"axis": 1, "precise": False}, ""),
            ("SoftmaxNode", lambda x: x.softmax(1), {"axis": 1, "precise": True}, "_precise"),
            ("SortNode", lambda x: x.sort(1).values, {"axis": 1}, ""),
            ("ArgsortNode", lambda x: x.argsort(dim=1, stable=True), {"axis": 1}, ""),
            ("SumNode", lambda x: x.sum(1), {"axes": [1]}, ""),
            *(
                (kind, lambda x, name=name, n=n: getattr(x, name)(1, correction=n), {"axes": [1], "ddof": n}, f"_{n}")
                for kind, name in (("StdNode", "std"), ("VarNode", "var"))
                for n in (0, 1, 3, 5)
            ),
        )
    ),
    *(
        unary(kind, function, corners, fields=fields, dtypes=(*INTS, I8, U8), label="corners")
        for kind, function, fields in (
            ("AllNode", lambda x: x.bool().all(0), {"axes": [0]}),
            ("ArgmaxNode", lambda x: x.argmax(0), {"axis": 0}),
            ("ArgminNode", lambda x: x.argmin(0), {"axis": 0}),
            ("ArgsortNode", lambda x: x.argsort(dim=0, stable=True), {"axis": 0}),
            ("CumsumNode", lambda x: x.cumsum(0), {"axis": 0}),
            ("MaxNode", lambda x: x.amax(0), {"axes": [0]}),
            ("MinNode", lambda x: x.amin(0), {"axes": [0]}),
            ("ProdNode", lambda x: x[1:].prod(0) * x[0], {"axes": [0]}),
            ("SortNode", lambda x: x.sort(0).values, {"axis": 0}),
            ("SumNode", lambda x: x.sum(0), {"axes": [0]}),
        )
    ),
    *(
        unary(kind, function, corners, fields={"axis": 0}, label="corners")
        for kind, function in (
            ("ArgsortNode", lambda x: x.argsort(dim=0, stable=True)),
            ("SortNode", lambda x: x.sort(0).values),
        )
    ),
    *(
        unary(
            kind,
            lambda x, *_, select=select: select(x.sort(0)),
            given([NAN, 3, -INF, NAN, 1, INF, -2]),
            fields={"axis": 0, "kth": kth},
            seen=seen(kth, 0),
            label=f"nan_kth={kth}",
        )
        for kth in (0, 2, 5)
        for kind, seen, select in (
            ("PartitionNode", smallest, lambda ordered: ordered.values),
            ("ArgPartitionNode", smallest_indices, lambda ordered: ordered.indices),
        )
    ),
    # Half precision sums in float32: its own sum of ones ends at 256 or 2,048, and overflows.
    *(
        unary(
            kind,
            lambda x, function=function: function(x),
            draw(5000, low=low, high=high),
            fields=fields,
            seen=lambda out, x, scale=scale: scale * out,
            tolerance=2,
            label="of_many",
        )
        for kind, function, low, high, fields, scale in (
            ("CumsumNode", lambda x: x.cumsum(0), 1, 1, {"axis": 0}, 1),
            ("LogSumExpNode", lambda x: x.logsumexp(0), 0, 1, {"axes": [0]}, 1),
            ("MeanNode", lambda x: x.mean(0), 29, 31, {"axes": [0]}, 1),
            ("SoftmaxNode", lambda x: x.softmax(0), 0, 1, {"axis": 0, "precise": False}, 1000),
            ("StdNode", lambda x: x.std(0, correction=1), 29, 31, {"axes": [0], "ddof": 1}, 1),
            ("SumNode", lambda x: x.sum(0), 0, 1, {"axes": [0]}, 1),
            ("VarNode", lambda x: x.var(0, correction=1), 29, 31, {"axes": [0], "ddof": 1}, 1),
        )
    ),
]

REDUCTIONS = [
    *reductions("AllNode", folded(torch.all), dtypes=EVERY),
    *reductions("AnyNode", folded(torch.any), dtypes=EVERY),
    *reductions("LogSumExpNode", over("logsumexp"), tolerance=2),
    *reductions("MaxNode", extreme("amax"), dtypes=EVERY),
    *reductions("MeanNode", over("mean"), tolerance=2),
    *reductions("MedianNode", middle),
    *reductions("MinNode", extreme("amin"), dtypes=EVERY),
    *reductions("ProdNode", folded(torch.prod), dtypes=(F32, *INTS, BOOL), tolerance=8),
    *reductions("SumNode", over("sum"), dtypes=EVERY, tolerance=8),
    *reductions("StdNode", over("std", correction=0), tolerance=4),
    *reductions("VarNode", over("var", correction=0), tolerance=4),
    *reductions("StdNode", over("std", correction=1), fields={"ddof": 1}, dtypes=(F32,), tolerance=2),
    *reductions("VarNode", over("var", correction=1), fields={"ddof": 1}, dtypes=(F32,), tolerance=2),
    *(
        unary(kind, function, draw(N, 1), fields={"axes": [1], "ddof": 1}, label="of_one", dtypes=(F32,))
        for kind, function in (("StdNode", lambda x: x.std(1)), ("VarNode", lambda x: x.var(1)))
    ),
    *(
        unary(kind, function, given([[1, NAN, 3], [3, 2, 1]]), fields={"axes": [1]}, label="nan")
        for kind, function in (
            ("LogSumExpNode", lambda x: x.logsumexp(1)),
            ("MaxNode", lambda x: x.amax(1)),
            ("MinNode", lambda x: x.amin(1)),
            ("SumNode", lambda x: x.sum(1)),
        )
    ),
    unary("LogSumExpNode", lambda x: x.logsumexp(0), given([-INF, -INF]), fields={"axes": [0]}, label="inf"),
    *(
        unary(
            kind,
            lambda x, function=function, axis=axis, kept=kept: function(x, axis, keepdim=kept),
            draw(2, N, 4, low=-90, high=90),
            fields={"axis": axis, "keepdims": kept},
            dtypes=(F32, I64),
            label=f"axis={axis}{'_kept' if kept else ''}",
        )
        for kind, function in (("ArgmaxNode", torch.argmax), ("ArgminNode", torch.argmin))
        for axis, kept in ((0, False), (1, True), (-1, False))
    ),
    *(
        unary(
            kind,
            lambda x, function=function: function(x, 1),
            given([[1, 3, NAN], [5, 5, 1]]),
            fields={"axis": 1},
            label="nan_and_ties",
            dtypes=(F32,),
        )
        for kind, function in (("ArgmaxNode", torch.argmax), ("ArgminNode", torch.argmin))
    ),
    *(
        unary(
            "CumsumNode",
            lambda x, how=how: shifted_sums(x, **how),
            draw(2, N, 4),
            fields=how,
            dtypes=(F32, *INTS, BOOL) if how["inclusive"] else (F32, *INTS),
            label="_".join(f"{name}={value}" for name, value in how.items()),
            tolerance=2,
        )
        for how in (
            {"axis": 0, "reverse": False, "inclusive": True},
            {"axis": -1, "reverse": True, "inclusive": True},
            {"axis": 1, "reverse": False, "inclusive": False},
            {"axis": 1, "reverse": True, "inclusive": False},
        )
    ),
    *(
        unary(
            "SoftmaxNode",
            lambda x, axis=axis: x.softmax(axis),
            draw(2, N, 4),
            fields={"axis": axis, "precise": p},
            label=f"axis={axis}{'_precise' if p else ''}",
        )
        for axis, p in ((-1, False), (0, True), (1, False))
    ),
    unary("SoftmaxNode", lambda x: x.softmax(-1), given([[1e4, 1, -INF]]), fields={"axis": -1}, label="large"),
    *(
        unary(
            "SortNode",
            lambda x, axis=axis: x.sort(axis).values,
            draw(2, N, 4, low=-9, high=9),
            fields={"axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}",
        )
        for axis in (0, 1, -1)
    ),
    unary("SortNode", lambda x: x.sort(0).values, given([3, NAN, -INF, 1, INF]), fields={"axis": 0}, label="nan"),
    *(
        unary(
            "ArgsortNode",
            lambda x, axis=axis: x.argsort(dim=axis, stable=True),
            draw(2, N, 4, low=-99, high=99),
            fields={"axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}",
        )
        for axis in (0, 1, -1)
    ),
    unary(
        "ArgsortNode",
        lambda x: x.argsort(dim=0, stable=True),
        given([3, 1, 3, 1, 1, 3]),
        fields={"axis": 0},
        dtypes=(F32, I64),
        label="ties",
    ),
    *(
        unary(
            kind,
            lambda x, *_, select=select, axis=axis: select(x.sort(axis)),
            draw(3, 7, N),
            fields={"axis": axis, "kth": kth},
            values=(2,),
            dtypes=NUMBERS,
            seen=seen(2, axis),
            label=f"axis={axis}_kth={kth}",
        )
        for kind, seen, select in (
            ("PartitionNode", smallest, lambda ordered: ordered.values),
            ("ArgPartitionNode", smallest_indices, lambda ordered: ordered.indices),
        )
        for axis, kth in ((1, 2), (-2, Vid(0)), (-1, 2))
    ),
]


def shape_row(kind: str, expected: Callable[..., Any], *inputs: Maker, **fields: Any) -> Sample:
    values = fields.pop("values", ())
    label = "_".join(f"{name}={value}" for name, value in fields.items()).replace(" ", "")
    return Sample(kind, expected, inputs, ("x",), fields, values, dtypes=EVERY, label=label)


SHAPES = [
    shape_row(
        "AsStridedNode", lambda x: x.as_strided((3, 2), (1, 5), 2), draw(4, 5), shape=[3, 2], strides=[1, 5], offset=2
    ),
    shape_row(
        "AsStridedNode",
        lambda x, n: x.as_strided((n, 2), (2, 1), 0),
        draw(20),
        shape=[Vid(0), 2],
        strides=[2, 1],
        values=(4,),
    ),
    shape_row(
        "AsStridedNode", lambda x: x.as_strided((2, 3), (0, 3), 1), draw(20), shape=[2, 3], strides=[0, 3], offset=1
    ),
    shape_row("BroadcastToNode", lambda x: x.broadcast_to((4, 2, 3)), draw(2, 1), shape=[4, 2, 3]),
    shape_row("BroadcastToNode", lambda x: x.expand(4, -1, 3), draw(2, 1), shape=[4, -1, 3]),
    shape_row("BroadcastToNode", lambda x, n: x.broadcast_to((n, 2, 3)), draw(1, 3), shape=[Vid(0), 2, 3], values=(5,)),
    shape_row("ContiguousNode", lambda x: x.contiguous(), draw(2, N)),
    *(
        shape_row("ExpandDimsNode", lambda x, axis=axis: x.unsqueeze(axis), draw(2, N), axis=axis)
        for axis in (0, 1, 2, -1, -3)
    ),
    *(
        shape_row("FlipNode", lambda x, axes=axes: x.flip(axes), draw(2, N, 4), axes=axes)
        for axes in ([0], [-1], [0, 2], [-2, 0])
    ),
    shape_row("RepeatNode", lambda x: x.repeat_interleave(3, 1), draw(2, N), axis=1, repeats=3),
    shape_row(
        "RepeatNode", lambda x, n: x.repeat_interleave(n, -2), draw(2, N, 2), axis=-2, repeats=Vid(0), values=(2,)
    ),
    shape_row("ReshapeNode", lambda x: x.reshape(4, -1), draw(2, N, 2), shape=[4, -1]),
    shape_row("ReshapeNode", lambda x, n: x.reshape(n, 2), draw(4, 5), shape=[Vid(0), 2], values=(10,)),
    shape_row("ReshapeNode", lambda x: x.reshape(()), draw(1, 1), shape=[]),
    shape_row("RollNode", lambda x: x.roll(2, 1), draw(2, N), shift=[2], axes=[1]),
    shape_row(
        "RollNode", lambda x, n: x.roll((-1, n), (0, -1)), draw(3, 2, N), shift=[-1, Vid(0)], axes=[0, -1], values=(7,)
    ),
    *(
        shape_row(
            "SqueezeNode", lambda x, dims=dims: x.squeeze(dims) if dims else x.squeeze(), draw(1, N, 1, 2), dims=dims
        )
        for dims in ([], [0], [-2], [0, 2], [1], [0, 1])
    ),
    shape_row("TileNode", lambda x: x.tile((2, 1, 3)), draw(2, N), reps=[2, 1, 3]),
    shape_row("TileNode", lambda x, n: x.tile((n, 2)), draw(2, N), reps=[Vid(0), 2], values=(3,)),
    shape_row("TileNode", lambda x: x.tile((2,)), draw(2, N), reps=[2]),
    shape_row("TransposeNode", lambda x: x.permute(2, 0, 1), draw(2, N, 4), perm=[2, 0, 1]),
    shape_row("TransposeNode", lambda x: x.permute(0, -1, -2), draw(2, N, 4), perm=[0, -1, -2]),
    *(
        shape_row(kind, lambda x, name=name, k=k: getattr(x, name)(k), draw(2, 4, N), k=k)
        for kind, name in (("TrilNode", "tril"), ("TriuNode", "triu"))
        for k in (0, 1, -2)
    ),
    shape_row(
        "PadNode",
        lambda x: F.pad(x.float(), (1, 0, 0, 2), value=1.0).to(x.dtype),
        draw(2, N),
        pad_width=[0, 2, 1, 0],
        mode="constant",
        constant_value=1.0,
    ),
    shape_row(
        "PadNode", lambda x, n: F.pad(x, (n, 2)), draw(2, N), pad_width=[0, 0, Vid(0), 2], mode="constant", values=(3,)
    ),
    shape_row("PadNode", lambda x: edge_padded(x, [(1, 0), (2, 3)]), draw(2, N), pad_width=[1, 0, 2, 3], mode="edge"),
    unary(
        "PadNode",
        lambda x: F.pad(x, (1, 1), value=-INF),
        fields={"pad_width": [0, 0, 1, 1], "mode": "constant", "constant_value": -INF},
        label="inf",
    ),
    # Several tensors.
    *(
        Sample(
            "ConcatenateNode",
            lambda x, y, axis=axis: torch.cat([x, y], axis),
            (draw(*left), draw(*right)),
            fields={"tensors": [Tid(0), Tid(1)], "axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}",
        )
        for axis, left, right in ((0, (2, N), (3, N)), (-1, (2, N), (2, 1)), (1, (2, N, 2), (2, 0, 2)))
    ),
    Sample(
        "ConcatenateNode",
        lambda x, y: torch.cat([x, y]),
        (draw(2, dtype=I64), draw(N)),
        fields={"tensors": [Tid(0), Tid(1)], "axis": 0},
        dtypes=FLOATS,
        label="mixed",
    ),
    *(
        Sample(
            "StackNode",
            lambda x, y, axis=axis: torch.stack([x, y, x], axis),
            (draw(2, N), draw(2, N)),
            fields={"tensors": [Tid(0), Tid(1), Tid(0)], "axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}",
        )
        for axis in (0, 1, -1, -2)
    ),
    Sample(
        "SplitNode",
        lambda x: list(x.split([1, 3, 2], 0)),
        (draw(6, N),),
        ("x",),
        {"sizes": [1, 3, 2], "axis": 0},
        num_outs=3,
        dtypes=EVERY,
        label="sizes",
    ),
    Sample(
        "SplitNode",
        lambda x, n: list(x.split([n, 4 - n], -2)),
        (draw(2, 4, N),),
        ("x",),
        {"sizes": [Vid(0), 1], "axis": -2},
        values=(3,),
        num_outs=2,
        label="value",
    ),
    Sample(
        "SplitNode",
        lambda x: list(x.split(3, 1)),
        (draw(2, 8),),
        ("x",),
        {"sizes": [3], "axis": 1},
        num_outs=3,
        label="chunks",
    ),
    Sample(
        "SplitNode",
        lambda x: list(x.split(8, 1)),
        (draw(2, 8),),
        ("x",),
        {"sizes": [8], "axis": 1},
        num_outs=1,
        label="whole",
    ),
    # New ones.
    Sample("ARangeNode", lambda: torch.arange(2, 11, 3), fields={"start": 2, "stop": 11, "step": 3}, label="int64"),
    *(
        Sample(
            "ARangeNode",
            lambda n, to=to: torch.arange(0, n, dtype=to),
            fields={"start": 0, "stop": Vid(0), "step": 1, "scalar_type": code(to)},
            values=(7,),
            label=str(to)[6:],
        )
        for to in (F32, F16, I32)
    ),
    Sample("ARangeNode", lambda: torch.arange(9, 1, -2), fields={"start": 9, "stop": 1, "step": -2}, label="down"),
    Sample("ARangeNode", lambda: torch.arange(4, 4), fields={"start": 4, "stop": 4, "step": 1}, label="empty"),
    Sample(
        "ARangeNode",
        lambda: torch.arange(1 << 40, (1 << 40) + 3),
        fields={"start": 1 << 40, "stop": (1 << 40) + 3, "step": 1},
        label="large",
    ),
    *(
        Sample(
            "FullNode",
            lambda n, v, to=to: torch.full((n, 2), v).to(to),
            fields={"shape": [Vid(0), 2], "v": Vid(1), "scalar_type": code(to)},
            values=(3, 2.5),
            label=str(to)[6:],
        )
        for to in (*FLOATS, *INTS, BOOL)
    ),
    *(
        Sample(
            "FullNode",
            lambda v=v, to=to: torch.full((2,), v, dtype=to),
            fields={"shape": [2], "v": v, "scalar_type": code(to)},
            label=f"{v}_{str(to)[6:]}",
        )
        for v, to in ((-INF, F32), (16777217.0, I64), (float(1 << 40), I64), (2147483647.0, I32), (-1.5, F16))
    ),
    Sample(
        "FullNode",
        lambda v: torch.full((2,), v),
        fields={"shape": [2], "v": Vid(0), "scalar_type": code(I64)},
        values=(1 << 40,),
        label="large_value",
    ),
    unary("FullLikeNode", lambda x: torch.full_like(x, 2), fields={"v": 2.0}, dtypes=EVERY),
    unary(
        "FullLikeNode",
        lambda x, v: torch.full_like(x, v, dtype=I32),
        fields={"v": Vid(0), "scalar_type": code(I32)},
        values=(3,),
        dtypes=(F32, I64),
        label="int32",
    ),
    *(
        Sample(
            "TriNode",
            lambda *_, k=k, to=to: torch.ones(3, 5).tril(k).to(to),
            fields={"n": 3, "m": Vid(0), "k": k, "scalar_type": code(to)},
            values=(5,),
            label=f"k={k}_{str(to)[6:]}",
        )
        for k, to in ((0, F32), (1, BF16), (-1, I32), (0, BOOL))
    ),
    *(
        Sample(
            "RandomBitsNode",
            lambda n, *_, to=to: torch.zeros(n, 3).to(to),
            fields={"shape": [Vid(0), 3], "width": width, **({"seed": Vid(1)} if width == 4 else {})},
            values=(5, 11),
            seen=lambda out: torch.zeros_like(out),
            label=f"{width}_bytes",
        )
        for width, to in ((1, U8), (2, torch.uint16), (4, torch.uint32))
    ),
]


def gathered(x: Tensor, *indices: Tensor, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A slice of x for each place of the indices, which say where it starts."""
    spread = torch.broadcast_tensors(*indices)
    parts = []
    for starts in zip(*[index.flatten().tolist() for index in spread], strict=True):
        part = x
        for axis, size in enumerate(sizes):
            part = part.narrow(axis, starts[axes.index(axis)] if axis in axes else 0, size)
        parts.append(part)
    return torch.stack(parts).reshape(*spread[0].shape, *sizes)


INDEXING = [
    Sample(
        "SliceNode",
        lambda x: x[:, 1:7].flip(1)[:, ::2],
        (draw(3, 9),),
        ("x",),
        {"axis": 1, "start": 6, "stop": 0, "step": -2},
        dtypes=EVERY,
        label="backwards",
    ),
    Sample(
        "SliceNode",
        lambda x: x.flip(1),
        (draw(3, N),),
        ("x",),
        {"axis": -1, "start": -1, "stop": -99, "step": -1},
        dtypes=EVERY,
        label="all_backwards",
    ),
    *(
        Sample(
            "GatherNode",
            lambda x, *i, axes=axes, sizes=sizes: gathered(x, *i, axes=axes, sizes=sizes),
            (draw(4, 5, 6), *indices),
            ("x",),
            {
                "indices": [Tid(place + 1) for place in range(len(indices))],
                "axes": list(axes),
                "slice_sizes": list(sizes),
            },
            dtypes=EVERY,
            label=f"axes={axes}",
        )
        for axes, sizes, indices in (
            ((0,), (1, 5, 6), (draw(N, low=0, high=4, dtype=I64),)),
            ((0, 1), (1, 1, 6), (draw(2, N, low=0, high=4, dtype=I64), draw(N, low=0, high=5, dtype=I64))),
            ((2, 0), (1, 2, 1), (draw(N, low=0, high=6, dtype=I32), draw(N, low=0, high=4, dtype=I32))),
            ((1,), (2, 3, 1), (draw(N, low=0, high=3, dtype=I64),)),
            ((0, 1, 2), (1, 1, 1), tuple(draw(N, low=0, high=4, dtype=I64) for _ in range(3))),
        )
    ),
    *(
        Sample(
            "IndexCopyNode",
            lambda x, new, i, axis=axis: x.index_copy(axis, i.long() % x.shape[axis], new),
            (draw(4, 5, N), draw(*shape), given(where, kind)),
            ("dst", "update", "indices"),
            {"axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}",
        )
        for axis, shape, where, kind in (
            (0, (2, 5, N), [3, 1], I64),
            (1, (4, 3, N), [0, 1, 2], I32),
            (-2, (4, 2, N), [-1, 2], I64),
        )
    ),
    *(
        Sample(
            "ScatterAddNode",
            lambda x, i, new, axis=axis: x.scatter_add(axis, i, new),
            (draw(5, 6), draw(*where, low=0, high=5, dtype=I64), draw(*new)),
            ("x", "indices", "updates"),
            {"axis": axis},
            dtypes=EVERY,
            tolerance=4,
            label=f"axis={axis}_{label}",
        )
        for axis, where, new, label in (
            (0, (9, 6), (9, 6), "repeated"),
            (-1, (5, 8), (5, 8), "repeated"),
            (0, (3, 4), (3, 4), "part"),
            (1, (2, 3), (4, 5), "larger_updates"),
            (0, (N, 6), (N, 6), "sizes"),
        )
    ),
    *(
        Sample(
            "SliceNode",
            lambda x, *_, index=index: x[index],
            (draw(5, 9),),
            ("x",),
            fields,
            (1, 2, -3),
            dtypes=EVERY,
            label=label,
        )
        for label, fields, index in (
            ("plain", {"axis": 0, "start": 1, "stop": 4}, slice(1, 4)),
            ("values", {"axis": Vid(0), "start": Vid(1), "stop": Vid(2)}, (slice(None), slice(2, -3))),
            ("negative", {"axis": -1, "start": -4, "stop": -1, "step": 2}, (slice(None), slice(-4, -1, 2))),
            ("past_the_end", {"axis": 1, "start": 3, "stop": (1 << 63) - 1}, (slice(None), slice(3, None))),
            ("empty", {"axis": 0, "start": 3, "stop": 3}, slice(3, 3)),
        )
    ),
    *(
        Sample(
            "SliceUpdateNode",
            lambda x, new, *_, index=index: updated(x, new, *index),
            (draw(5, 9), draw(*shape)),
            ("dst", "update"),
            fields,
            (1, 2, -3),
            dtypes=EVERY,
            label=label,
        )
        for label, fields, shape, index in (
            ("plain", {"axis": 0, "start": 1, "stop": 4}, (3, 9), (slice(1, 4),)),
            ("values", {"axis": Vid(0), "start": Vid(1), "stop": Vid(2)}, (5, 4), (slice(None), slice(2, -3))),
            ("negative", {"axis": -1, "start": -4, "stop": -1, "step": 2}, (5, 2), (slice(None), slice(-4, -1, 2))),
            ("past_the_end", {"axis": 1, "start": 3, "stop": (1 << 63) - 1}, (5, 6), (slice(None), slice(3, None))),
            ("broadcast", {"axis": 0, "start": 0, "stop": 2}, (1, 9), (slice(0, 2),)),
        )
    ),
    Sample(
        "SliceUpdateNode",
        lambda x, new: updated(x, new, slice(0, 2)),
        (draw(5, N, dtype=F16), draw(2, N)),
        ("dst", "update"),
        {"axis": 0, "start": 0, "stop": 2},
        dtypes=(F32, I64),
        label="keeps_its_dtype",
    ),
    *(
        Sample(
            "TakeNode",
            lambda x, *_, axis=axis, place=place: x.select(axis, place),
            (draw(4, 5, N),),
            ("x",),
            {"axis": axis, "index": index},
            (2,),
            dtypes=EVERY,
            label=f"axis={axis}_{label}",
        )
        for axis, index, place, label in ((0, 1, 1, "literal"), (1, -1, -1, "negative"), (-2, Vid(0), 2, "value"))
    ),
    *(
        Sample(
            "TakeNode",
            lambda x, i, axis=axis: torch.stack([x.select(axis, int(j)) for j in i.flatten()], axis).unflatten(
                axis, i.shape
            ),
            (draw(4, 5, 6), draw(2, N, low=-4, high=4, dtype=kind)),
            ("x", "index"),
            {"axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}_{str(kind)[6:]}",
        )
        for axis, kind in ((0, I64), (1, I32), (2, I64))
    ),
    Sample(
        "TakeNode",
        lambda x, i: x.select(0, int(i)),
        (draw(4, N), given(2, I64)),
        ("x", "index"),
        {"axis": 0},
        label="index_without_axes",
    ),
    *(
        Sample(
            "TakeAlongAxisNode",
            lambda x, i, axis=axis: x.gather(axis, i.long()),
            (draw(4, 5), draw(*shape, low=0, high=4, dtype=kind)),
            ("x", "indices"),
            {"axis": axis},
            dtypes=EVERY,
            label=f"axis={axis}_{str(kind)[6:]}",
        )
        for axis, shape, kind in ((0, (N, 5), I64), (1, (4, N), I32), (-1, (4, N), I64))
    ),
]

# Columns of a batch of four rows; the lower triangle is what is attended to.
LOWER = torch.ones(3, 3, dtype=BOOL).tril().tolist()
HIDDEN = [[1, 1, 0], [0, 0, 0], [1, 0, 1]]
NORMED = [[1, 2, NAN, 4], [INF, 1, 2, 3], [0, 0, 0, 0], [3, 3, 3, 3], [6e4, 6e4, -6e4, 1]]
HEADS = draw(2, 4, 3, 8), draw(2, 2, 3, 8), draw(2, 2, 3, 8)
PRODUCTS = [
    *(
        Sample(
            "AddmmNode",
            lambda a, b, *c, alpha=alpha, beta=beta: alpha * (a @ b) + (beta * c[0] if c else 0),
            (draw(N, 4), draw(4, 5), *more),
            ("mat1", "mat2", "bias")[: 2 + len(more)],
            {"alpha": alpha, "beta": beta},
            dtypes=FLOATS,
            tolerance=8,
            label=label,
        )
        for label, alpha, beta, more in (
            ("plain", 1.0, 1.0, ()),
            ("alpha", 0.5, 1.0, ()),
            ("bias", 1.0, 1.0, (draw(5),)),
            ("alpha_beta", -2.0, 0.5, (draw(N, 5),)),
        )
    ),
    Sample(
        "AddmmNode", torch.matmul, (draw(2, 1, N, 4), draw(3, 4, 5)), ("mat1", "mat2"), label="batches", tolerance=8
    ),
    *convolutions(),
    *quantized(),
    Sample(
        "GatherMmNode",
        lambda a, b, i: a @ b[i],
        (draw(N, 1, 4), draw(5, 4, 6), draw(N, low=0, high=5, dtype=I32)),
        ("a", "b", "rhs_indices"),
        dtypes=FLOATS,
        tolerance=8,
        label="right",
    ),
    Sample(
        "GatherMmNode",
        lambda a, b, i: a[i] @ b,
        (draw(4, 2, 4), draw(2, 4, 6), given([3, 0], I32)),
        ("a", "b", "lhs_indices"),
        tolerance=8,
        label="left",
    ),
    *(
        Sample(
            "GatherMmNode",
            lambda a, b, i, j, *_: a[i] @ b[j],
            (draw(3, 1, 4), draw(5, 4, 6), given([0, 2, 1], I32), given([1, 1, 4], I32)),
            ("a", "b", "lhs_indices", "rhs_indices"),
            fields,
            (1,),
            tolerance=8,
            label=f"both_{label}",
        )
        for label, fields in (
            ("sorted", {"sorted_indices": True}),
            ("flag", {"sorted_indices_flag": Vid(0)}),
            ("literal_flag", {"sorted_indices": True, "sorted_indices_flag": 0}),
        )
    ),
    # Norms, rotations, attention.
    *(
        Sample(
            "LayerNormNode",
            lambda x, *p, slots=slots: F.layer_norm(
                x, (8,), p[0] if "weight" in slots else None, p[-1] if "bias" in slots else None, 1e-5
            ),
            (draw(2, N, 8), *[draw(8) for _ in slots]),
            ("x", *slots),
            {"eps": 1e-5},
            dtypes=FLOATS,
            tolerance=4,
            label="_".join(slots) or "plain",
        )
        for slots in ((), ("weight",), ("bias",), ("weight", "bias"))
    ),
    *(
        Sample(
            "RMSNormNode",
            lambda x, *w: F.rms_norm(x, (8,), w[0] if w else None, 1e-5),
            (draw(2, N, 8), *[draw(8) for _ in slots]),
            ("x", *slots),
            {"eps": 1e-5},
            dtypes=FLOATS,
            tolerance=4,
            label="_".join(slots) or "plain",
        )
        for slots in ((), ("weight",))
    ),
    *(
        Sample(
            "RopeNode",
            lambda x, *_, how=how: rotated(x, 5, **how),
            (draw(2, 3, N, 8),),
            ("x",),
            {"offset": Vid(0), **how},
            (5,),
            dtypes=FLOATS,
            tolerance=20,
            label="_".join(map(str, how.values())),
        )
        for how in (
            {"dims": 8, "base": 100.0},
            {"dims": 4, "base": 100.0, "scale": 0.5},
            {"dims": 8, "base": 100.0, "traditional": True},
        )
    ),
    Sample(
        "RopeNode",
        lambda x, o: rotated(x, o, 8, 100.0),
        (draw(2, 3, N, 8), given([4, 9], I32)),
        ("x", "offset"),
        {"dims": 8, "base": 100.0},
        tolerance=20,
        label="offsets",
    ),
    Sample("SdpaNode", attended, HEADS, ("q", "k", "v"), {"scale": 0.3}, dtypes=FLOATS, tolerance=4, label="plain"),
    Sample(
        "SdpaNode",
        lambda q, k, v: attended(q, k, v, causal=True),
        HEADS,
        ("q", "k", "v"),
        {"scale": 0.3, "causal": True},
        dtypes=FLOATS,
        tolerance=4,
        label="causal",
    ),
    Sample(
        "SdpaNode",
        attended,
        (*HEADS, given(LOWER, BOOL)),
        ("q", "k", "v", "mask"),
        {"scale": 0.3},
        dtypes=FLOATS,
        tolerance=4,
        label="mask",
    ),
    # Rows that see no key.
    *(
        Sample(
            "SdpaNode",
            lambda *operands, causal=causal: attended(*operands, causal=causal),
            (*HEADS, given(mask, dtype)),
            ("q", "k", "v", "mask"),
            {"scale": 0.3, "causal": causal},
            dtypes=FLOATS,
            tolerance=4,
            label=f"hidden_row_{label}{'_causal' if causal else ''}",
        )
        for causal in (False, True)
        for label, mask, dtype in (
            ("bool", HIDDEN, BOOL),
            ("added", [[0.0 if seen else -INF for seen in row] for row in HIDDEN], None),
        )
    ),
    *(
        Sample(
            "SdpaNode",
            attended,
            tuple(given([[[[number] for number in numbers]]]) for numbers in (q, k, [1, 2])) + more,
            ("q", "k", "v", "mask")[: 3 + len(more)],
            {"scale": 0.3},
            dtypes=(F16,),
            label=label,
        )
        for label, q, k, more in (
            ("large_scores", [600], [600, 590], ()),
            ("hidden_by_the_least", [2], [0, 2], (given([[-65504.0, -65504.0]]),)),
        )
    ),
    Sample(
        "SdpaNode",
        attended,
        (draw(2, 4, 3, 8), draw(2, 4, 0, 8), draw(2, 4, 0, 8)),
        ("q", "k", "v"),
        {"scale": 0.3},
        dtypes=FLOATS,
        label="no_keys",
    ),
    *(
        Sample(
            kind, function, (given(NORMED),), ("x",), {"eps": eps}, dtypes=FLOATS, tolerance=4, label=f"special_{eps}"
        )
        for eps in (1e-5, 0.0)
        for kind, function in (
            ("LayerNormNode", lambda x, eps=eps: F.layer_norm(x, (4,), eps=eps)),
            ("RMSNormNode", lambda x, eps=eps: F.rms_norm(x, (4,), eps=eps)),
        )
    ),
    Sample(
        "SdpaNode",
        attended,
        (*HEADS, draw(2, 1, 3, 3)),
        ("q", "k", "v", "mask"),
        {"scale": 0.3},
        dtypes=FLOATS,
        tolerance=4,
        label="added_mask",
    ),
    Sample(
        "SdpaNode",
        lambda q, k, v, mask: attended(q, k, v, mask.to(q.dtype)),
        (*HEADS, draw(2, 1, 3, 3, dtype=F32)),
        ("q", "k", "v", "mask"),
        {"scale": 0.3},
        dtypes=(F16, BF16),
        tolerance=4,
        label="added_mask_in_float32",
    ),
]


def running(x: Tensor, start: Tensor) -> list[Tensor]:
    """Sums so far plus a start, for each step, and the last of them."""
    sums = start.unsqueeze(1) + x.cumsum(1)
    return [sums, sums[:, -1]]


# A chain that adds 1 slot to another, or takes it away.
ADD, SUBTRACT = ([make_node(kind, a=Tid(0), b=Tid(1), out=Tid(2))] for kind in ("AddNode", "SubtractNode"))
CONTROL = [
    *(
        Sample(
            "IfNode",
            lambda x, y, *_, function=function: function(x, y),
            (draw(2, N), draw(N)),
            fields={"cond": cond, "then_chain_idx": 1, "else_chain_idx": 2},
            values=(value,),
            chains=(ADD, SUBTRACT),
            results=(Tid(2),),
            dtypes=NUMBERS,
            label=label,
        )
        for label, cond, value, function in (
            ("then", Vid(0), 1, torch.add),
            ("else", Vid(0), 0, torch.sub),
            ("negative", Vid(0), -2, torch.add),
            ("literal", 0, 1, torch.sub),
        )
    ),
    *(
        Sample(
            "IfNode",
            lambda x, y, *_, function=function: function(x, y),
            (draw(2, N), draw(N)),
            fields={"cond": Vid(0), "then_chain_idx": 1, "else_chain_idx": 2},
            values=values,
            chains=([make_node("IfNode", cond=Vid(1), then_chain_idx=2, else_chain_idx=3)], SUBTRACT, ADD),
            results=(Tid(2),),
            label=f"nested_{values}",
        )
        for values, function in (((1, 1), torch.sub), ((1, 0), torch.add), ((0, 0), torch.sub))
    ),
    # Slots: 0 what it goes over, 1 the start, then the slice, the carry, the output.
    Sample(
        "ScanNode",
        running,
        (draw(2, N, 4), draw(2, 4)),
        fields={"originals": [Tid(0)], "sliced": [Tid(2)], "carry": [Tid(1)], "outputs": [Tid(3)], "body_chain_idx": 1},
        chains=([make_node("AddNode", a=Tid(1), b=Tid(2), out=Tid(1)), make_node("IdCopyNode", x=Tid(1), out=Tid(3))],),
        results=(Tid(3), Tid(1)),
        dtypes=(*FLOATS, I64),
        tolerance=4,
        label="carry",
    ),
    *(
        Sample(
            "ScanNode",
            lambda x, y: [x * y, x + y],
            (draw(2, N, 3), draw(2, N, 3)),
            fields={
                "originals": [Tid(0), Tid(1)],
                "sliced": [Tid(2), Tid(3)],
                "carry": [],
                "outputs": [Tid(4), Tid(5)],
                "body_chain_idx": 1,
                "scan_axis": axis,
            },
            chains=(
                [
                    make_node("MultiplyNode", a=Tid(2), b=Tid(3), out=Tid(4)),
                    make_node("AddNode", a=Tid(2), b=Tid(3), out=Tid(5)),
                ],
            ),
            results=(Tid(4), Tid(5)),
            label=f"axis={axis}",
        )
        for axis in (0, 1, 2, -1)
    ),
]

VALUES = [
    *(
        Sample(kind, function, fields={"a": Vid(0), "b": Vid(1)}, values=values, label=f"{values}")
        for kind, function in (
            ("AddIntNode", lambda a, b: a + b),
            ("FloorDivideIntNode", lambda a, b: a // b),
            ("ModIntNode", lambda a, b: a % b),
            ("MultiplyIntNode", lambda a, b: a * b),
            ("SubtractIntNode", lambda a, b: a - b),
        )
        for values in ((7, 2), (-7, 2), (7, -2))
    ),
    Sample("SubtractIntNode", lambda b: 9 - b, fields={"a": 9, "b": Vid(0)}, values=(4,), label="literal"),
    Sample("ItemIntNode", lambda x: int(x), (given(-4),), ("x",), dtypes=EVERY),
    Sample("ItemIntNode", lambda x: int(x), (given([[(1 << 40) + 1]]),), ("x",), dtypes=(I64,), label="large"),
    *(
        Sample(
            "SymSizeNode",
            lambda a, dim=dim: a.shape[dim],
            (draw(2, N),),
            ("a",),
            {"dim": dim},
            dtypes=EVERY,
            label=f"{dim}",
        )
        for dim in (0, 1, -1)
    ),
]

SAMPLES: list[Sample] = [
    *ELEMENTWISE,
    *REDUCTIONS,
    *SPECIAL_ROWS,
    *OF_NOTHING,
    *NEXT_TO_NOTHING,
    *OF_A_NUMBER,
    *SHAPES,
    *INDEXING,
    *PRODUCTS,
    *CONTROL,
    *VALUES,
]
