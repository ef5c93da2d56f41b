"""Where nodes differ from torch: both sides of each row of docs/differences.md, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
import torch.nn.functional as F

from executorch_mlx.backends.mlx.program import Tid, make_node
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.device import DTYPES
from oracles.hand_built import hand_built

pytestmark = pytest.mark.usefixtures("on_cpu")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "differences.md"
INF = math.inf
REFUSED = "refused"

Tensor = torch.Tensor


@dataclass(frozen=True)
class Difference:
    """One row.

    Attributes:
        what: how the page names it.
        theirs: what torch gives, as ``shown`` writes it, or REFUSED.
        ours: what the node gives.
        kind: the node's kind.
        expected: torch's function of the tensors.
        inputs: the tensors.
        reads: the fields that name the tensors.
        fields: the node's other fields.
    """

    what: str
    theirs: str
    ours: str
    kind: str
    expected: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    reads: tuple[str, ...] = ("x",)
    fields: dict[str, Any] = field(default_factory=dict)


def numbers(name: str) -> Callable[..., Tensor]:
    """Return the maker of a dtype's tensors."""
    return lambda *values: torch.tensor(values, dtype=getattr(torch, name))


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=1.0)


f32, f16, bf16, i32, u8 = (numbers(name) for name in ("float32", "float16", "bfloat16", "int32", "uint8"))
bools = numbers("bool")

PAIR, CLIPPED, ATTENTION = ("a", "b"), ("x", "a_min", "a_max"), ("q", "k", "v", "mask")
FIRST, LAST = {"axes": [0]}, {"axes": [-1]}
# Codes, scales and biases of a weight of ones, [1, 4096].
QUANTIZED_ONES = torch.full((1, 512), 0x11111111).to(torch.uint32), torch.ones(1, 64).half(), torch.zeros(1, 64).half()
AFFINE = {"group_size": 64, "bits": 4, "mode": "affine", "transpose": True}

DIFFERENCES = [
    # Integers.
    Difference(
        "`x // 0` of integers", REFUSED, "int32 0", "FloorDivideNode", torch.floor_divide, (i32(5), i32(0)), PAIR
    ),
    Difference("`x % 0` of integers", REFUSED, "int32 5", "RemainderNode", torch.remainder, (i32(5), i32(0)), PAIR),
    Difference(
        "matrix product of integers",
        "int32 5",
        REFUSED,
        "AddmmNode",
        torch.matmul,
        (i32([2, 3]), i32([1], [1])),
        ("mat1", "mat2"),
    ),
    # Dtypes of results.
    Difference("`square` of bools", "int64 1", "bool True", "SquareNode", torch.square, (bools(True),)),
    Difference(
        "`all`, `any` of uint8", "uint8 1", "bool True", "AllNode", lambda x: x.all(0), (u8(2, 1),), fields=FIRST
    ),
    Difference(
        "operand without axes, of a wider dtype",
        "float16 3.5",
        "float32 3.5",
        "AddNode",
        torch.add,
        (f16(1.5), torch.tensor(2.0)),
        PAIR,
    ),
    Difference(
        "norm of halves with float32 weights",
        "float16 1, 2",
        "float32 1, 2",
        "RMSNormNode",
        lambda x, w: F.rms_norm(x, (2,), w, 0.0),
        (f16([3, 3]), f32(1, 2)),
        ("x", "weight"),
        {"eps": 0.0},
    ),
    # What torch refuses.
    Difference(
        "`-` of bools",
        REFUSED,
        "bool False, True",
        "SubtractNode",
        torch.sub,
        (bools(True, True), bools(True, False)),
        PAIR,
    ),
    Difference(
        "`//` of bools",
        REFUSED,
        "bool True, False",
        "FloorDivideNode",
        torch.floor_divide,
        (bools(True, False), bools(True, True)),
        PAIR,
    ),
    Difference(
        "`**` of bools",
        REFUSED,
        "bool False, True",
        "PowerNode",
        torch.pow,
        (bools(False, False), bools(True, False)),
        PAIR,
    ),
    Difference(
        "`clip` of bools",
        REFUSED,
        "bool True, True",
        "ClipNode",
        torch.clip,
        (bools(True, False), bools(True), bools(True)),
        CLIPPED,
    ),
    Difference(
        "`mean` of integers", REFUSED, "float32 1.5", "MeanNode", lambda x: x.mean(0), (i32(1, 2),), fields=FIRST
    ),
    Difference(
        "`var`, `std` of integers",
        REFUSED,
        "float32 0.25",
        "VarNode",
        lambda x: x.var(0, correction=0),
        (i32(1, 2),),
        fields=FIRST,
    ),
    Difference("`silu`, `gelu` of integers", REFUSED, "float32 0, 0.7311", "SiluNode", F.silu, (i32(0, 1),)),
    Difference(
        "`logaddexp` of integers", REFUSED, "float32 1.313", "LogAddExpNode", torch.logaddexp, (i32(0), i32(1)), PAIR
    ),
    Difference(
        "`round` of integers to decimals",
        REFUSED,
        "int32 20",
        "RoundNode",
        lambda x: x.round(decimals=-1),
        (i32(17),),
        fields={"decimals": -1},
    ),
    Difference(
        "`argmax`, `argmin` of bools",
        REFUSED,
        "int64 1",
        "ArgmaxNode",
        lambda x: x.argmax(0),
        (bools(False, True),),
        fields={"axis": 0},
    ),
    # Precision and range.
    Difference(
        "`exp`, `logaddexp` that give a subnormal number",
        "float32 8.194e-40",
        "float32 0",
        "ExpNode",
        torch.exp,
        (f32(-90),),
    ),
    Difference("`erf` next to 0", "float32 1.128e-07", "float32 0", "ErfNode", torch.erf, (f32(1e-7),)),
    Difference(
        "`sigmoid`, `silu` of halves", "float16 4.768e-06", "float16 0", "SigmoidNode", torch.sigmoid, (f16(-12.25),)
    ),
    Difference(
        "`erf`, `logaddexp` of halves",
        "bfloat16 -0.006073",
        "bfloat16 -0.007812",
        "LogAddExpNode",
        torch.logaddexp,
        (bf16(-0.7), bf16(-0.7)),
        PAIR,
    ),
    Difference(
        "`prod` of many halves: 1.0078 to the 200th",
        "bfloat16 4.438",
        "bfloat16 4.75",
        "ProdNode",
        lambda x: x.prod(0),
        (torch.full((200,), 1.0078125, dtype=torch.bfloat16),),
        fields=FIRST,
    ),
    Difference(
        "`std`, `var` whose squares pass float32's largest",
        "float32 2.449e+38",
        "float32 inf",
        "StdNode",
        lambda x: x.std(1, correction=0),
        (f32([3e38, -3e38, 0]),),
        fields=LAST,
    ),
    Difference(
        "layer norm whose squares do",
        "float32 nan, nan",
        "float32 0, -0",
        "LayerNormNode",
        lambda x: F.layer_norm(x, (2,), eps=0.0),
        (f32([1e30, 1]),),
        fields={"eps": 0.0},
    ),
    Difference(
        "`round(inf, decimals=-40)`",
        "float32 nan",
        "float32 inf",
        "RoundNode",
        lambda x: x.round(decimals=-40),
        (f32(INF),),
        fields={"decimals": -40},
    ),
    # Signs of zeros.
    Difference("`sin(-0.0)`", "float32 -0", "float32 0", "SinNode", torch.sin, (f32(-0.0),)),
    Difference("`erf(0.0)`", "float32 0", "float32 -0", "ErfNode", torch.erf, (f32(0.0),)),
    Difference(
        "`logaddexp(-inf, -0.0)`",
        "float32 0",
        "float32 -0",
        "LogAddExpNode",
        torch.logaddexp,
        (f32(-INF), f32(-0.0)),
        PAIR,
    ),
    Difference(
        "`cumsum` from -0.0",
        "float32 0, 1",
        "float32 -0, 1",
        "CumsumNode",
        lambda x: x.cumsum(0),
        (f32(-0.0, 1),),
        fields={"axis": 0},
    ),
    Difference(
        "`clip(-0.0, -0.0, 0.0)`",
        "float32 -0",
        "float32 0",
        "ClipNode",
        torch.clip,
        (f32(-0.0), f32(-0.0), f32(0.0)),
        CLIPPED,
    ),
    # Meanings of MLX's own.
    Difference(
        "median of an even count: 1, 2, 4, 8",
        "float32 2",
        "float32 3",
        "MedianNode",
        lambda x: x.median(0).values,
        (f32(1, 2, 4, 8),),
        fields=FIRST,
    ),
    Difference(
        "median of integers",
        "int32 2",
        "float32 2",
        "MedianNode",
        lambda x: x.median(0).values,
        (i32(1, 2, 4),),
        fields=FIRST,
    ),
    Difference(
        "causal attention, 2 queries over 3 keys",
        "float32 1, 5.5",
        "float32 5.5, 37",
        "SdpaNode",
        lambda *operands: attended(*operands, causal=True),
        (f32([[[0], [0]]]), f32([[[0], [0], [0]]]), f32([[[1], [10], [100]]])),
        ATTENTION[:3],
        {"scale": 1.0, "causal": True},
    ),
]


def to_mlx(tensor: Tensor) -> mx.array:
    dtype = DTYPES[SCALAR_TYPE_CODES[str(tensor.dtype).removeprefix("torch.")]]
    return mx.array(tensor.tolist(), dtype=dtype)


def shown(array: Any) -> str:
    """A dtype and its numbers to four digits, in their order, whatever the shape."""
    flat = array.reshape(-1).tolist()
    numbers = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in flat]
    return f"{str(array.dtype).rsplit('.', 1)[-1]} {', '.join(numbers)}"


def run(row: Difference) -> mx.array:
    inputs = [Tid(place) for place in range(len(row.inputs))]
    out = Tid(len(inputs))
    node = make_node(row.kind, **dict(zip(row.reads, inputs, strict=True)), **row.fields, out=out)
    (result,) = CompiledProgram(hand_built([[node]], inputs, [out]), {})([to_mlx(tensor) for tensor in row.inputs])
    return result


def outcome(call: Callable[[], Any], refusals: type[Exception] | tuple[type[Exception], ...]) -> str:
    try:
        return shown(call())
    except refusals:
        return REFUSED


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.what)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_node_differs_from_torch_as_the_page_says(row: Difference) -> None:
    assert outcome(lambda: row.expected(*row.inputs), (RuntimeError, NotImplementedError)) == row.theirs
    assert outcome(lambda: run(row), ValueError) == row.ours
    assert row.theirs != row.ours


def test_page_lists_these_differences_and_no_others() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in PAGE.read_text().splitlines() if "|" in line]
    listed = [row for row in cells if row[1:] != ["torch", "here"] and not row[0].startswith("---")]
    assert listed == [[row.what, row.theirs, row.ours] for row in DIFFERENCES]
