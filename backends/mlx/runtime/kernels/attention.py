"""What transformers are made of: norms, rotations, attention."""

from __future__ import annotations

import math

from ...program import Node
from ..device import is_cpu, mx
from .base import HALVES, At, Env, Row, Step, dtype_of, get
from .state import StepState


def _layer_norm(node: Node, at: At) -> Step:
    x, out, eps = at(node.x), at(node.out), node.eps
    weight, bias = get(node.weight, at), get(node.bias, at)

    def step(env: Env) -> None:
        env[out] = mx.fast.layer_norm(env[x], weight(env), bias(env), eps)

    return step


def _rms_norm(node: Node, at: At) -> Step:
    x, out, eps = at(node.x), at(node.out), node.eps
    weight = get(node.weight, at)

    def step(env: Env) -> None:
        env[out] = mx.fast.rms_norm(env[x], weight(env), eps)

    return step


def _rope(node: Node, at: At) -> Step:
    x, out, offset = at(node.x), at(node.out), get(node.offset, at)
    freqs = None if node.freqs is None else at(node.freqs)
    dims, traditional, base, scale = node.dims, node.traditional, node.base, node.scale

    def fused(env: Env) -> None:
        env[out] = mx.fast.rope(
            env[x],
            dims,
            traditional=traditional,
            base=base if freqs is None else None,
            scale=scale,
            offset=offset(env),
            freqs=None if freqs is None else env[freqs],
        )

    def composed(env: Env) -> None:
        if env[x].ndim != 4:
            fused(env)
            return
        state: StepState = env[-1]
        array, table = env[x], None if freqs is None else env[freqs]
        env[out] = state.rotation(dims, base, scale, array.shape[2], offset(env), table).apply(array)

    # On the CPU MLX has no fused kernel: its own composition computes each angle anew in every layer.
    is_composed = is_cpu() and not traditional
    return composed if is_composed else fused


def _sdpa(node: Node, at: At) -> Step:
    q, k, v, out, scale = at(node.q), at(node.k), at(node.v), at(node.out), node.scale
    mask = get(node.mask, at)
    is_causal = bool(node.causal)
    is_on_cpu = is_cpu()

    def attended(env: Env, mask: mx.array | str | None) -> mx.array:
        operands = env[q], env[k], env[v]
        if 0 in env[k].shape[1:2]:  # MLX divides by it
            raise ValueError(f"SdpaNode: keys of shape {list(env[k].shape)}, without heads")
        dtype = mx.result_type(*operands)
        if is_on_cpu and dtype in HALVES:
            # MLX's fallback multiplies halves in halves: scores overflow, and it takes several times as long.
            operands = tuple(operand.astype(mx.float32) for operand in operands)
        return mx.fast.scaled_dot_product_attention(*operands, scale=scale, mask=mask).astype(dtype)

    def unmasked(env: Env) -> None:
        env[out] = attended(env, "causal" if is_causal else None)

    def masked(env: Env) -> None:
        given = mask(env)
        if is_causal:
            length, keys = env[q].shape[2], env[k].shape[2]
            lower = mx.tri(length, keys, keys - length, dtype=mx.bool_)
            given = given & lower if given.dtype == mx.bool_ else mx.where(lower, given, -math.inf)
        if given.dtype != mx.bool_:
            # torch takes a mask of another precision, MLX none that is wider.
            given = given.astype(mx.result_type(env[q], env[k], env[v]))
        is_seen = given if given.dtype == mx.bool_ else given > -math.inf
        # torch gives zeros to a row that sees no key, MLX the mean of the values or NaN.
        env[out] = mx.where(is_seen.any(axis=-1, keepdims=True), attended(env, given), 0)

    return unmasked if node.mask is None else masked


def _update_and_attend(node: Node, at: At) -> Step:
    if node.layer_id is None or node.scale is None:
        raise ValueError("UpdateAndAttendNode: layer_id and scale are required")
    q, k, v, position, out = at(node.q), at(node.k), at(node.v), at(node.position), at(node.out)
    layer, scale, slot = node.layer_id, node.scale, node.position
    dtype = None if node.out_dtype is None else dtype_of(node.out_dtype)

    def step(env: Env) -> None:
        state: StepState = env[-1]
        result = state.cache.attend(layer, state.positions(slot, env[position]), env[q], env[k], env[v], scale)
        env[out] = result if dtype is None else result.astype(dtype)

    return step


KERNELS: dict[str, Row] = {
    "LayerNormNode": _layer_norm,
    "RMSNormNode": _rms_norm,
    "RopeNode": _rope,
    "SdpaNode": _sdpa,
    "UpdateAndAttendNode": _update_and_attend,
}
