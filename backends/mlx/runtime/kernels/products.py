"""Matrix products and convolutions, dense and quantized."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, dtype_of, get


def _addmm(node: Node, at: At) -> Step:
    mat1, mat2, out = at(node.mat1), at(node.mat2), at(node.out)
    if node.bias is None:
        alpha = node.alpha

        def step(env: Env) -> None:
            product = mx.matmul(env[mat1], env[mat2])
            env[out] = product if alpha == 1.0 else product * alpha

        return step
    bias, alpha, beta = at(node.bias), node.alpha, node.beta

    def step_with_bias(env: Env) -> None:
        env[out] = mx.addmm(env[bias], env[mat1], env[mat2], alpha=alpha, beta=beta)

    return step_with_bias


def _convolution(function: Callable[..., mx.array], letters: str, *fields: str) -> Row:
    """A convolution whose fields end in a letter per dimension; in one dimension, in none."""

    def row(node: Node, at: At) -> Step:
        x, w, out = at(node.x), at(node.w), at(node.out)
        names = [f"_{letter}" for letter in letters] if len(letters) > 1 else [""]
        options = {field: tuple(getattr(node, f"{field}{name}") for name in names) for field in fields}
        given = {field: values if len(letters) > 1 else values[0] for field, values in options.items()}
        run = partial(function, **given, groups=node.groups)

        def step(env: Env) -> None:
            env[out] = run(env[x], env[w])

        return step

    return row


def _by_groups(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A convolution whose groups are computed one by one: in three dimensions MLX has none with several."""

    def run(x: mx.array, w: mx.array, groups: int, **options: Any) -> mx.array:
        pairs = zip(mx.split(x, groups, axis=-1), mx.split(w, groups, axis=0), strict=True)
        return mx.concatenate([function(its_x, its_w, **options) for its_x, its_w in pairs], axis=-1)

    return run


_CONVOLUTION = ("stride", "padding", "dilation")
_TRANSPOSED = (*_CONVOLUTION, "output_padding")


def _dequantize(node: Node, at: At) -> Step:
    w, scales, out = at(node.w), at(node.scales), at(node.out)
    biases, scale = get(node.biases, at), get(node.global_scale, at)
    options = {"group_size": node.group_size, "bits": node.bits, "mode": node.mode}
    options["dtype"] = None if node.dtype is None else dtype_of(node.dtype)

    def step(env: Env) -> None:
        env[out] = mx.dequantize(env[w], env[scales], biases(env), global_scale=scale(env), **options)

    return step


def _gather_mm(node: Node, at: At) -> Step:
    a, b, out = at(node.a), at(node.b), at(node.out)
    left, right, is_sorted = get(node.lhs_indices, at), get(node.rhs_indices, at), _sorted_flag(node, at)
    # MLX's kernel for CPUs takes float32 only.
    is_widened = mx.default_device().type == mx.cpu

    def step(env: Env) -> None:
        first, second = env[a], env[b]
        dtype = first.dtype
        if is_widened:
            first, second = first.astype(mx.float32), second.astype(mx.float32)
        product = mx.gather_mm(first, second, left(env), right(env), sorted_indices=is_sorted(env))
        env[out] = product.astype(dtype)

    return step


def _gather_qmm(node: Node, at: At) -> Step:
    x, w, scales, out = at(node.x), at(node.w), at(node.scales), at(node.out)
    biases, left, right = get(node.biases, at), get(node.lhs_indices, at), get(node.rhs_indices, at)
    options, is_sorted = _quantization(node), _sorted_flag(node, at)

    def step(env: Env) -> None:
        env[out] = mx.gather_qmm(
            env[x],
            env[w],
            env[scales],
            biases(env),
            left(env),
            right(env),
            sorted_indices=is_sorted(env),
            **options,
        )

    return step


def _quantization(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ("transpose", "group_size", "bits", "mode")}


def _sorted_flag(node: Node, at: At) -> Callable[[Env], bool]:
    """Return whether the indices ascend: a later version of the format says so by a value."""
    flag = get(node.sorted_indices if node.sorted_indices_flag is None else node.sorted_indices_flag, at)
    return lambda env: bool(flag(env))


def _quantized_matmul(node: Node, at: At) -> Step:
    x, w, scales, out = at(node.x), at(node.w), at(node.scales), at(node.out)
    biases, options = get(node.biases, at), _quantization(node)

    def step(env: Env) -> None:
        env[out] = mx.quantized_matmul(env[x], env[w], env[scales], biases(env), **options)

    return step


KERNELS: dict[str, Row] = {
    "AddmmNode": _addmm,
    "Conv1DNode": _convolution(mx.conv1d, "w", *_CONVOLUTION),
    "Conv2DNode": _convolution(mx.conv2d, "hw", *_CONVOLUTION),
    "Conv3DNode": _convolution(_by_groups(mx.conv3d), "dhw", *_CONVOLUTION),
    "ConvTranspose1DNode": _convolution(mx.conv_transpose1d, "w", *_TRANSPOSED),
    "ConvTranspose2DNode": _convolution(mx.conv_transpose2d, "hw", *_TRANSPOSED),
    "ConvTranspose3DNode": _convolution(_by_groups(mx.conv_transpose3d), "dhw", *_TRANSPOSED),
    "DequantizeNode": _dequantize,
    "GatherMmNode": _gather_mm,
    "GatherQmmNode": _gather_qmm,
    "QuantizedMatmulNode": _quantized_matmul,
}
