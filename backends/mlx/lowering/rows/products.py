"""Products of matrices, and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from ...graph import arguments
from ..builder import GraphBuilder
from .base import Row, dtype_of, rank_of
from .quantized import is_quantized, multiply


def _check_floats(node: Node) -> str | None:
    return None if dtype_of(node).is_floating_point else "MLX multiplies matrices of floats only"


def _linear(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    bias = given["bias"]
    if is_quantized(given["weight"]):
        out = builder.write(node)
        product = out if bias is None else builder.temp()
        multiply(builder, builder.read(given["input"]), given["weight"], product)
        if bias is not None:
            builder.emit("AddNode", a=product, b=builder.read(bias), out=out)
        return
    weight = builder.temp()
    builder.emit("TransposeNode", x=builder.read(given["weight"]), out=weight, perm=[1, 0])
    builder.emit(
        "AddmmNode",
        mat1=builder.read(given["input"]),
        mat2=weight,
        bias=builder.read(bias),
        out=builder.write(node),
    )


def _matmul(builder: GraphBuilder, node: Node) -> None:
    a, b = node.args[:2]
    builder.emit("AddmmNode", mat1=builder.read(a), mat2=builder.read(b), out=builder.write(node))


def _addmm(builder: GraphBuilder, node: Node) -> None:
    bias, mat1, mat2 = node.args[:3]
    given = arguments(node)
    builder.emit(
        "AddmmNode",
        # Times zero, torch does not look at it: it may be NaN.
        bias=builder.read(bias) if given["beta"] else None,
        mat1=builder.read(mat1),
        mat2=builder.read(mat2),
        alpha=float(given["alpha"]),
        beta=float(given["beta"]),
        out=builder.write(node),
    )


def _expert_linear(builder: GraphBuilder, node: Node) -> None:
    given = arguments(node)
    rows = builder.compute("ExpandDimsNode", x=builder.read(given["x"]), axis=1)
    weight = builder.compute("TransposeNode", x=builder.read(given["weight"]), perm=[0, 2, 1])
    product = builder.compute("GatherMmNode", a=rows, b=weight, rhs_indices=builder.read(given["ids"]))
    builder.emit("SqueezeNode", x=product, out=builder.write(node), dims=[1])


# The dimensions of MLX's convolutions, by how many they are; their fields end in these letters, but for the first's.
_LETTERS = {1: ("",), 2: ("_h", "_w"), 3: ("_d", "_h", "_w")}


def _convolution(builder: GraphBuilder, node: Node) -> None:
    """Torch has channels second, MLX last."""
    given = arguments(node)
    count, bias = rank_of(node) - 2, given["bias"]
    to_last, to_second = [0, *range(2, count + 2), 1], [0, count + 1, *range(1, count + 1)]
    ways = {
        f"{field}{letter}": size
        for field, sizes in (
            ("stride", given["stride"]),
            ("padding", _padding(given)),
            ("dilation", given["dilation"]),
        )
        for letter, size in zip(_LETTERS[count], _per_axis(sizes, count), strict=True)
    }
    result = builder.compute(
        f"Conv{count}DNode",
        x=builder.compute("TransposeNode", x=builder.read(given["input"]), perm=to_last),
        w=builder.compute("TransposeNode", x=builder.read(given["weight"]), perm=to_last),
        groups=given["groups"],
        **ways,
    )
    if bias is not None:
        result = builder.compute("AddNode", a=result, b=builder.read(bias))
    builder.emit("TransposeNode", x=result, out=builder.write(node), perm=to_second)


def _per_axis(sizes: Sequence[int], count: int) -> Sequence[int]:
    """Return a size for each axis; one stands for all."""
    return list(sizes) * count if len(sizes) == 1 else sizes


def _padding(given: dict[str, Any]) -> Sequence[int]:
    """Return a convolution's padding; by name it is none, or what keeps the size."""
    padding: Any = given["padding"]
    if not isinstance(padding, str):
        return cast("Sequence[int]", padding)
    kernel = given["weight"].meta["val"].shape[2:]
    if padding == "valid":
        return [0] * len(kernel)
    dilation = _per_axis(given["dilation"], len(kernel))
    return [step * (size - 1) // 2 for step, size in zip(dilation, kernel, strict=True)]


def _check_convolution(node: Node) -> str | None:
    given = arguments(node)
    if given.get("transposed"):
        return "it is transposed"
    if rank_of(given["input"]) != rank_of(given["weight"]):
        return "its input is not a batch"
    if rank_of(node) - 2 not in _LETTERS:
        return f"it has {rank_of(node) - 2} dimensions"
    by_name = isinstance(given["padding"], str)
    fields = ("stride", "dilation") if by_name else ("stride", "padding", "dilation")
    numbers = [given["groups"], *(size for field in fields for size in given[field])]
    if not all(isinstance(number, int) for number in numbers):
        return "its strides, paddings, dilations or groups are not constants"
    kernel = given["weight"].meta["val"].shape[2:]
    dilation = _per_axis(given["dilation"], len(kernel))
    if given["padding"] == "same" and any(step * (size - 1) % 2 for step, size in zip(dilation, kernel, strict=True)):
        return "its padding differs between an axis's ends"
    return _check_floats(node)


ROWS: dict[str, Row] = {
    "executorch_mlx.expert_linear.default": Row(_expert_linear),
    "aten.linear.default": Row(_linear, _check_floats),
    "aten.matmul.default": Row(_matmul, _check_floats),
    "aten.mm.default": Row(_matmul, _check_floats),
    "aten.bmm.default": Row(_matmul, _check_floats),
    **{f"aten.{name}.default": Row(_addmm, _check_floats) for name in ("addmm", "baddbmm")},
    **{
        f"aten.{name}": Row(_convolution, _check_convolution)
        for name in ("convolution.default", *(f"conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")))
    },
}
