"""What transformers are made of: norms, rotations, attention."""

from __future__ import annotations

import math

from ..schema import Tid
from ..types import FLOATS, INTEGERS, TensorType, exactly, promoted
from .base import Call, Result, Rule, require, require_broadcast, require_same


def _norm(*fields: str) -> Rule:
    def rule(call: Call) -> Result:
        x = call.tensor("x", FLOATS)
        require(x.shape != (), "x has no axes")
        given = [call.rank(field, 1) for field in fields if call.has(field)]
        for parameters in given:
            require(parameters.dtype is None or parameters.dtype in FLOATS, f"a parameter is of {parameters.dtype}")
            if x.shape is not None and parameters.shape is not None:
                require_same(parameters.shape[0], x.shape[-1], "sizes of a parameter and of the last axis")
        # A bias counts for the dtype only beside a weight.
        counted = [parameters.dtype for parameters in given] if call.has("weight") else []
        return TensorType(x.shape, promoted(x.dtype, *counted))

    return rule


def _rope(call: Call) -> Result:
    x, dims = call.tensor("x", FLOATS), call.node.dims
    call.rank("x", 3, math.inf)
    require(dims > 0 and dims % 2 == 0, f"dims is {dims}, expected a positive even number")
    if x.shape is not None:
        require(dims <= x.shape[-1].high, f"dims is {dims}, of an axis of {x.shape[-1]}")
    if isinstance(call.node.offset, Tid):
        call.tensor("offset", INTEGERS)
        shape = call.rank("offset", 0, 1).shape
        if shape and x.shape is not None:
            require(1 in shape[0] or shape[0].meets(x.shape[0]), f"{shape[0]} offsets for a batch of {x.shape[0]}")
    else:
        call.number("offset")
    if call.has("freqs"):
        freqs = call.rank("freqs", 1)
        if freqs.shape is not None:
            require_same(freqs.shape[0], exactly(dims // 2), "sizes of freqs and of half of dims")
    return x


def _sdpa(call: Call) -> Result:
    q, k, v = (call.rank(field, 4) for field in "qkv")
    dtype = promoted(q.dtype, k.dtype, v.dtype)
    require(dtype is None or dtype in FLOATS, f"computed in {dtype}, expected floats")
    mask = call.tensor("mask", FLOATS | {"bool"})
    if q.shape is None or k.shape is None or v.shape is None:
        return TensorType(None, dtype)
    batch = require_same(q.shape[0], k.shape[0], "batches of q and k")
    batch = require_same(batch, v.shape[0], "batches of k and v")
    require_same(k.shape[1], v.shape[1], "heads of k and v")
    require_same(k.shape[2], v.shape[2], "lengths of k and v")
    require_same(q.shape[3], k.shape[3], "sizes of the heads of q and k")
    heads, kv_heads = q.shape[1], k.shape[1]
    require(heads.high > 0 and kv_heads.high > 0, "there are no heads")
    if heads.is_exact and kv_heads.is_exact:
        require(heads.low % kv_heads.low == 0, f"{heads} heads of q share {kv_heads} of k and v")
    if mask.shape is not None:
        require(mask.shape != (), "mask has no axes")
        require_broadcast("mask", mask.shape, "what it masks", (batch, heads, q.shape[2], k.shape[2]))
    return TensorType((batch, heads, q.shape[2], v.shape[3]), dtype)


def _update_and_attend(call: Call) -> Result:
    require(call.has("layer_id") and call.has("scale"), "layer_id and scale are required")
    q, k, v = (call.rank(field, 4) for field in "qkv")
    call.tensor("position", INTEGERS)
    dtype = call.scalar_type("out_dtype") if call.has("out_dtype") else q.dtype
    if q.shape is None or k.shape is None or v.shape is None:
        return TensorType(None, dtype)
    require_same(k.shape[2], q.shape[2], "lengths of q and k")
    require_same(k.shape[2], v.shape[2], "lengths of k and v")
    require_same(k.shape[1], v.shape[1], "heads of k and v")
    require_same(q.shape[3], k.shape[3], "sizes of the heads of q and k")
    return TensorType((*q.shape[:3], v.shape[3]), dtype)


RULES: dict[str, Rule] = {
    "LayerNormNode": _norm("weight", "bias"),
    "RMSNormNode": _norm("weight"),
    "RopeNode": _rope,
    "SdpaNode": _sdpa,
    "UpdateAndAttendNode": _update_and_attend,
}
