"""Kernels whose source comes with the program."""

from __future__ import annotations

from typing import Any

from ...program import Node
from ..device import mx
from .base import At, Env, Row, Step, dtype_of, get_ints

# How a template's argument is meant, by the format's number.
_TEMPLATE_KINDS: dict[int, Any] = {0: int, 1: bool, 2: dtype_of}


def _metal_kernel(node: Node, at: At) -> Step:
    inputs, outputs = [at(slot) for slot in node.inputs], [at(slot) for slot in node.outputs]
    grid, threadgroup = get_ints(node.grid, at), get_ints(node.threadgroup, at)
    sizes, lengths = get_ints(node.output_shapes_flat or [], at), node.output_shape_lengths or []
    kinds = node.template_arg_kinds or []
    if not set(kinds) <= _TEMPLATE_KINDS.keys():
        raise ValueError(f"MetalKernelNode: template_arg_kinds are {kinds}, expected {sorted(_TEMPLATE_KINDS)}")
    values = [_TEMPLATE_KINDS[kind](value) for kind, value in zip(kinds, node.template_arg_values or [], strict=True)]
    template = list(zip(node.template_arg_names or [], values, strict=True))
    options = {
        **({"template": template} if template else {}),
        **({} if node.init_value is None else {"init_value": node.init_value}),
        "output_dtypes": [dtype_of(code) for code in node.output_dtypes or []],
    }
    kernel: Any = mx.fast.metal_kernel(
        name=node.name,
        input_names=node.input_names or [],
        output_names=node.output_names or [],
        source=node.source,
        header=node.header or "",
        ensure_row_contiguous=node.ensure_row_contiguous,
        atomic_outputs=node.atomic_outputs,
    )

    def step(env: Env) -> None:
        flat = iter(sizes(env))
        shapes = [tuple(next(flat) for _ in range(length)) for length in lengths]
        results = kernel(
            inputs=[env[slot] for slot in inputs],
            grid=grid(env),
            threadgroup=threadgroup(env),
            output_shapes=shapes,
            **options,
        )
        for slot, result in zip(outputs, results, strict=True):
            env[slot] = result

    return step


KERNELS: dict[str, Row] = {"MetalKernelNode": _metal_kernel}
