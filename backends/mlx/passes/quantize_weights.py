"""Quantizes the weights of linear layers and embeddings.

Before::

    linear(x, weight)                   embedding(weight, index)

After::

    linear(x, dequantize(packed, ...))  embedding(dequantize(packed, ...), index)

A weight that several calls share stays one weight.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph import aten, copy_program, is_call
from ..pages import release_pages
from ..quantized import GROUP_SIZES, Affine, affine, dequantize
from .evaluate import constants_of
from .fuse_quantized import lifted

logger = logging.getLogger("executorch_mlx")

# Numbers that are quantized at a time: what torchao makes on the way takes many times their memory.
_PIECE = 1 << 22

# Modules that choose experts, of which each row is one; which are chosen hangs on each of their bits.
_ROUTERS = ("gate", "router")
_MOST_EXPERTS = 512


def quantize_weights(program: ExportedProgram, bits: int, group_size: int = 64) -> ExportedProgram:
    """Return a program whose linear layers and embeddings have quantized weights.

    The numbers are torchao's: round to nearest, ``IntxWeightOnlyConfig`` with ``PerGroup(group_size)``, asymmetric in 4
    bits and symmetric in 8, whose zero points half precision would round. Routers of experts, weights that are
    quantized already, and weights whose rows are no whole number of groups stay as they are; the latter with a warning.

    Args:
        program: it is not changed, and shares its other tensors with the result.
        bits: 4 or 8.
        group_size: 32, 64 or 128 numbers share a scale.

    Raises:
        ValueError: other bits or another group size.
    """
    if bits not in _DTYPES:
        raise ValueError(f"bits: expected 4 or 8, got {bits}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: expected one of {', '.join(map(str, sorted(GROUP_SIZES)))}, got {group_size}")
    program = copy_program(program)
    constants = constants_of(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    for node in [node for node in program.graph.nodes if node.op == "placeholder" and node.name in constants]:
        uses = [user for user in node.users if _is_weight(node, user)]
        weight = constants[node.name]
        if not uses or _is_router(targets[node.name], weight):
            continue
        if weight.shape[1] % group_size:
            logger.warning(
                "the weight %s is kept in floats: its rows of %d are no whole number of groups of %d",
                targets[node.name],
                weight.shape[1],
                group_size,
            )
            continue
        _replace(program, node, uses, _quantized(weight, bits, group_size))
    program.graph_module.recompile()
    return program


_DTYPES: Mapping[int, Any] = {4: torch.int4, 8: torch.int8}


def _is_router(target: str, weight: torch.Tensor) -> bool:
    _, _, module = target.removesuffix(".weight").rpartition(".")
    return module in _ROUTERS and weight.shape[0] <= _MOST_EXPERTS


def _is_weight(node: Node, user: Node) -> bool:
    value = node.meta["val"]
    if value.ndim != 2 or not value.is_floating_point():
        return False
    return (is_call(user, aten.linear.default) and user.args[1] is node) or (
        is_call(user, aten.embedding.default) and user.args[0] is node
    )


def _quantized(weight: torch.Tensor, bits: int, group_size: int) -> Affine:
    # Importing it takes a second, and nothing else here needs it.
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    mapping = MappingType.ASYMMETRIC if bits == 4 else MappingType.SYMMETRIC
    highest = (1 << bits - 1) - 1
    parts = []
    for rows in weight.detach().split(max(1, _PIECE // weight.shape[1])):
        made = IntxUnpackedToInt8Tensor.from_hp(rows, (1, group_size), _DTYPES[bits], mapping_type=mapping)
        parts.append(affine(made.qdata, made.scale.to(weight.dtype), made.zero_point, -highest - 1, highest))
    release_pages(weight)
    packed, scales, biases = (torch.cat([part[index] for part in parts]) for index in range(3))
    return Affine(packed, scales, biases, group_size, bits)


def _replace(program: ExportedProgram, node: Node, uses: list[Node], weight: Affine) -> None:
    arguments = lifted(program, node.name, weight)
    with program.graph.inserting_before(uses[0]):
        dense = program.graph.call_function(dequantize._opoverload, arguments)
    dense.meta = {"val": node.meta["val"]}
    for user in uses:
        user.replace_input_with(node, dense)
