"""Turns torchao's quantized weights into MLX's.

Before, with constant operands::

    linear(x, dequantize_affine(numbers, [1, g], scales, zero_points, ...))

After::

    linear(x, dequantize(packed, scales, biases, group size, bits))

A weight that MLX's form cannot hold becomes a constant of floats, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph import arguments, lift_constant, remove_dead_code, replace, target_of
from ..quantized import Affine, affine, dequantize
from .evaluate import constants_of, evaluate

logger = logging.getLogger("executorch_mlx")


def fuse_quantized(program: ExportedProgram) -> None:
    """Replace each dequantization of constants, in place."""
    constants = constants_of(program)
    for node in list(program.graph.nodes):
        if not _is_dequantization(node) or any(operand.name not in constants for operand in node.all_input_nodes):
            continue
        try:
            weight = _affine_of(node, constants)
        except ValueError as error:
            logger.warning("the weight of %s is kept in floats: %s", node.args[0].name, error)
            dense = lift_constant(program, f"{node.name}_floats", evaluate(node, constants))
            node.replace_all_uses_with(dense)
            program.graph_signature.replace_all_uses(node.name, dense.name)
            continue
        replace(program, node, dequantize._opoverload, lifted(program, node.name, weight))
    remove_dead_code(program.graph_module)


def lifted(program: ExportedProgram, name: str, weight: Affine) -> tuple[Any, ...]:
    """Add a weight to a program's constants, and return the arguments of ``dequantize`` that stand for it."""
    parts = {"packed": weight.weight, "scales": weight.scales, "biases": weight.biases}
    nodes = [lift_constant(program, f"{name}_{part}", tensor) for part, tensor in parts.items()]
    return (*nodes, weight.group_size, weight.bits)


def _is_dequantization(node: Node) -> bool:
    # By its name: torchao need not be there.
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == "torchao::dequantize_affine"


def _affine_of(node: Node, constants: Mapping[str, Any]) -> Affine:
    given = arguments(node)
    numbers, scales = (constants[given[name].name] for name in ("input", "scale"))
    zero_points = None if given["zero_point"] is None else constants[given["zero_point"].name]
    lowest, highest = given["quant_min"], given["quant_max"]
    if numbers.dtype not in (torch.int8, torch.uint8) or numbers.ndim != 2 or given["block_size"][0] != 1:
        raise ValueError(
            f"its numbers are {numbers.dtype} {list(numbers.shape)} in blocks of {list(given['block_size'])}, expected"
            " rows of int8 or uint8"
        )
    info = torch.iinfo(numbers.dtype)
    blocks = (numbers.shape[0], numbers.shape[1] // given["block_size"][1])
    return affine(
        numbers,
        scales.reshape(blocks).to(node.meta["val"].dtype),
        None if zero_points is None else zero_points.reshape(blocks),
        info.min if lowest is None else int(lowest),
        info.max if highest is None else int(highest),
    )
