"""Matrix products and convolutions, dense and quantized."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...program import Node, Tid
from ..device import is_cpu, mx
from ..expand import Factor
from ..fuse import Product
from .base import HALVES, At, Env, Row, Step, dtype_of, get, indices

# From so many rows on MLX's CPU is faster with a weight in floats, made for one product, than with a quantized one.
_MANY_ROWS = 16


def _addmm(node: Node, at: At) -> Step:
    mat1, mat2, out = at(node.mat1), at(node.mat2), at(node.out)
    if node.bias is None:
        alpha = node.alpha
        multiply = _by_constant() if at.is_constant(node.mat2) else mx.matmul

        def step(env: Env) -> None:
            product = multiply(env[mat1], env[mat2])
            env[out] = product if alpha == 1.0 else product * alpha

        return step
    bias, alpha, beta = at(node.bias), node.alpha, node.beta

    def step_with_bias(env: Env) -> None:
        env[out] = mx.addmm(env[bias], env[mat1], env[mat2], alpha=alpha, beta=beta)

    return step_with_bias


def _by_constant() -> Callable[[mx.array, mx.array], mx.array]:
    """Return a product with a matrix that stays the same.

    MLX flattens a batch before it multiplies it by a single matrix, two operations more: of one, which decoding has,
    the matrix is made one, too.
    """
    batch: list[mx.array] = []

    def multiply(array: mx.array, matrix: mx.array) -> mx.array:
        if array.ndim == 3 and array.shape[0] == 1 and matrix.ndim == 2:
            if not batch:
                batch.append(matrix[None])
            matrix = batch[0]
        return mx.matmul(array, matrix)

    return multiply


def _convolution(letters: str, *, is_transposed: bool = False) -> Row:
    """A convolution whose fields end in a letter per dimension; in one dimension, in none."""
    # In three dimensions MLX has none with several groups.
    convolve = _by_groups if len(letters) == 3 else mx.conv_general
    names = [f"_{letter}" for letter in letters] if len(letters) > 1 else [""]

    def row(node: Node, at: At) -> Step:
        x, w, out, groups = at(node.x), at(node.w), at(node.out), node.groups
        stride, padding, dilation = (
            tuple(getattr(node, f"{field}{name}") for name in names) for field in ("stride", "padding", "dilation")
        )
        more = tuple(getattr(node, f"output_padding{name}") for name in names) if is_transposed else ()

        def step(env: Env) -> None:
            array, kernel = env[x], env[w]
            if 0 in kernel.shape:  # MLX divides by these sizes
                raise ValueError(f"{node.kind}: a kernel of shape {list(kernel.shape)}, without elements")
            if is_transposed:
                if 0 in array.shape[1:-1]:
                    raise ValueError(f"{node.kind}: an input of shape {list(array.shape)}, without places")
                reach = [step * (size - 1) for step, size in zip(dilation, kernel.shape[1:-1], strict=True)]
                before = [most - width for most, width in zip(reach, padding, strict=True)]
                after = [low + extra for low, extra in zip(before, more, strict=True)]
                array = _padded(_spread(array, stride), before, after)
                env[out] = convolve(array, kernel, kernel_dilation=dilation, groups=groups, flip=True)
            else:
                env[out] = convolve(
                    array, kernel, stride=stride, padding=padding, kernel_dilation=dilation, groups=groups
                )

        return step

    return row


def _by_groups(x: mx.array, w: mx.array, *, groups: int, **options: Any) -> mx.array:
    """A convolution whose groups are computed one by one."""
    pairs = zip(mx.split(x, groups, axis=-1), mx.split(w, groups, axis=0), strict=True)
    return mx.concatenate([mx.conv_general(its_x, its_w, **options) for its_x, its_w in pairs], axis=-1)


# A transposed convolution is a plain one, of a kernel that is turned round, over an input with zeros in between: MLX's
# own computes wrongly where more is left out of the result than a kernel is wide, and with strides on CUDA.


def _spread(x: mx.array, strides: tuple[int, ...]) -> mx.array:
    """Put stride - 1 zeros between the places of [N, sizes, C]."""
    for axis, stride in enumerate(strides, 1):
        size = x.shape[axis]
        if stride > 1 and size > 1:
            widths = [(0, 0)] * (x.ndim + 1)
            widths[axis + 1] = (0, stride - 1)
            wide = mx.pad(mx.expand_dims(x, axis + 1), widths).flatten(axis, axis + 1)
            x = wide[tuple([slice(None)] * axis + [slice((size - 1) * stride + 1)])]
    return x


def _padded(x: mx.array, before: list[int], after: list[int]) -> mx.array:
    """Put zeros around the places of [N, sizes, C], or take some away where there are to be less than none."""
    kept, widths = [slice(None)], [(0, 0)]
    for low, high, size in zip(before, after, x.shape[1:-1], strict=True):
        kept.append(slice(max(-low, 0), size - max(-high, 0)))
        widths.append((max(low, 0), max(high, 0)))
    return mx.pad(x[tuple(kept)], [*widths, (0, 0)])


def _dequantize(node: Node, at: At) -> Step:
    w, scales, out = at(node.w), at(node.scales), at(node.out)
    biases, scale = get(node.biases, at), get(node.global_scale, at)
    options = {"group_size": node.group_size, "bits": node.bits, "mode": node.mode}
    options["dtype"] = None if node.dtype is None else dtype_of(node.dtype)

    def step(env: Env) -> None:
        env[out] = mx.dequantize(env[w], env[scales], biases(env), global_scale=scale(env), **options)

    return step


def _chosen(field: Tid | None, at: At) -> Callable[[Env, mx.array], mx.array | None]:
    """Return what gives the indices of a batch's matrices, None for all of them in order."""
    if field is None:
        return lambda env, batch: None
    where = indices(field, at)
    return lambda env, batch: where(env, 0, math.prod(batch.shape[:-2]) - 1)


def _gather_mm(node: Node, at: At) -> Step:
    a, b, out = at(node.a), at(node.b), at(node.out)
    left, right, is_sorted = _chosen(node.lhs_indices, at), _chosen(node.rhs_indices, at), _sorted_flag(node, at)
    # MLX's kernel for CPUs takes float32 only.
    is_widened = is_cpu()

    def step(env: Env) -> None:
        first, second = env[a], env[b]
        dtype = first.dtype
        if is_widened:
            first, second = first.astype(mx.float32), second.astype(mx.float32)
        chosen = left(env, first), right(env, second)
        product = mx.gather_mm(first, second, *chosen, sorted_indices=is_sorted(env))
        env[out] = product.astype(dtype)

    return step


def _gather_qmm(node: Node, at: At) -> Step:
    x, w, scales, out = at(node.x), at(node.w), at(node.scales), at(node.out)
    biases, left, right = get(node.biases, at), _chosen(node.lhs_indices, at), _chosen(node.rhs_indices, at)
    run, is_sorted = _in_float32_on_cpu(partial(mx.gather_qmm, **_quantization(node))), _sorted_flag(node, at)

    def step(env: Env) -> None:
        chosen = left(env, env[x]), right(env, env[w])
        env[out] = run(env[x], env[w], env[scales], biases(env), *chosen, sorted_indices=is_sorted(env))

    return step


def _quantization(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ("transpose", "group_size", "bits", "mode")}


def _in_float32_on_cpu(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A product with quantized weights; MLX's kernel for CPUs adds halves up in halves, which end at 256 or 2,048."""
    if not is_cpu():
        return function

    def run(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, *rest: Any, **how: Any) -> mx.array:
        if x.size == 0:
            raise ValueError(f"a product of shape {list(x.shape)} with quantized weights: MLX divides by its rows")
        if x.dtype not in HALVES:
            return function(x, w, scales, biases, *rest, **how)
        dtype = x.dtype
        if biases is not None:
            dtype = mx.result_type(x, scales, biases)
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return function(x.astype(mx.float32), w, scales, biases, *rest, **how).astype(dtype)

    return run


def _multiplied(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, *, is_on_cpu: bool, transpose: bool, **how: Any
) -> mx.array:
    is_faster = is_on_cpu and x.size >= _MANY_ROWS * x.shape[-1]
    # MLX 0.32.4's kernel for NVIDIA's Hopper gives other numbers where a row is one group.
    is_one_group = scales.shape[-1] == 1
    if biases is None or not (is_faster or is_one_group):
        return mx.quantized_matmul(x, w, scales, biases, transpose=transpose, **how)
    dtype = mx.result_type(x, scales, biases)
    weight = mx.dequantize(w, scales.astype(dtype), biases.astype(dtype), **how)
    return x @ (weight.swapaxes(-1, -2) if transpose else weight)


def expanded_product(node: Node, at: At, factor: Factor) -> Step:
    """Return the step of a quantized product whose weight is there in float32, and whose parameters had a dtype."""
    x, out, dtype = at(node.x), at(node.out), factor.dtype
    weight = factor.weight.swapaxes(-1, -2) if factor.is_transposed else factor.weight
    multiply = _by_constant()

    def step(env: Env) -> None:
        array = env[x]
        env[out] = multiply(array.astype(mx.float32), weight).astype(mx.result_type(array, dtype))

    return step


def fused_product(product: Product, at: At) -> Step:
    """Return the step of several products of one operand."""
    x, weight, bias, dtype = at(product.x), product.weight.swapaxes(0, 1), product.bias, product.dtype
    multiply = _by_constant()
    parts = [(at(part.out), part.start, part.stop) for part in product.parts]

    def step(env: Env) -> None:
        array = env[x]
        if dtype is not None:
            whole = multiply(array.astype(mx.float32), weight).astype(mx.result_type(array, dtype))
        else:
            whole = multiply(array, weight) if bias is None else mx.addmm(bias, array, weight)
        for out, start, stop in parts:
            env[out] = whole[..., start:stop]

    return step


def _sorted_flag(node: Node, at: At) -> Callable[[Env], bool]:
    """Return whether the indices ascend: a later version of the format says so by a value."""
    flag = get(node.sorted_indices if node.sorted_indices_flag is None else node.sorted_indices_flag, at)
    return lambda env: bool(flag(env))


def _quantized_matmul(node: Node, at: At) -> Step:
    x, w, scales, out = at(node.x), at(node.w), at(node.scales), at(node.out)
    biases, run = (
        get(node.biases, at),
        _in_float32_on_cpu(partial(_multiplied, is_on_cpu=is_cpu(), **_quantization(node))),
    )

    def step(env: Env) -> None:
        env[out] = run(env[x], env[w], env[scales], biases(env))

    return step


KERNELS: dict[str, Row] = {
    "AddmmNode": _addmm,
    "Conv1DNode": _convolution("w"),
    "Conv2DNode": _convolution("hw"),
    "Conv3DNode": _convolution("dhw"),
    "ConvTranspose1DNode": _convolution("w", is_transposed=True),
    "ConvTranspose2DNode": _convolution("hw", is_transposed=True),
    "ConvTranspose3DNode": _convolution("dhw", is_transposed=True),
    "DequantizeNode": _dequantize,
    "GatherMmNode": _gather_mm,
    "GatherQmmNode": _gather_qmm,
    "QuantizedMatmulNode": _quantized_matmul,
}
