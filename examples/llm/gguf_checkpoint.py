"""Reads a GGUF file's model with its quantized blocks as they are.

The tensors' names are the ``gguf`` package's. What llama.cpp's converter changes in a weight is undone, in the table
below by architecture; a file of another architecture is left to transformers, which expands all blocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    ReaderTensor,
    TensorNameMap,
    dequantize,
    get_tensor_name_map,
)
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, PreTrainedModel

from executorch_mlx.backends.mlx.quantized import Affine
from executorch_mlx.backends.mlx.quantized import dequantize as expand

from .gguf_blocks import affine_of, is_affine, keeps_scales

logger = logging.getLogger("executorch_mlx")

# Factors of the rotary frequencies, of all layers: Llama 3's.
_FREQUENCY_FACTORS = "rope_freqs.weight"

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True)
class _Architecture:
    """How a model's weights lie in a GGUF file.

    Attributes:
        names: the file's names.
        has_turned_heads: the rows of each query and key head lie in the order in which ggml rotates them, by pairs.
        norm_offset: what was added to the weights of norms.
    """

    names: MODEL_ARCH
    has_turned_heads: bool = False
    norm_offset: float = 0.0


_ARCHITECTURES = {
    "llama": _Architecture(MODEL_ARCH.LLAMA, has_turned_heads=True),
    "qwen2": _Architecture(MODEL_ARCH.QWEN2),
    "qwen3": _Architecture(MODEL_ARCH.QWEN3),
    "gemma3": _Architecture(MODEL_ARCH.GEMMA3, norm_offset=1.0),
}


class _Expanded(nn.Module):
    """A module's weight as a parametrization: the module computes with numbers, and holds blocks."""

    def __init__(self, weight: Affine) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = expand(packed, scales, biases, self._weight.group_size, self._weight.bits)
        return weight

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._weight.weight, self._weight.scales, self._weight.biases


def load_gguf(path: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel | None:
    """Load a model; its linear layers and embeddings keep their blocks, and expand them where PyTorch runs them.

    Args:
        path: the file.
        config: its Hugging Face configuration.
        dtype: of what is not quantized, and of the blocks' scales.

    Returns:
        The model with SDPA attention, or None if the file is to be left to transformers.

    Raises:
        ValueError: the file's tensors are not those of the configuration's model.
    """
    reader = GGUFReader(path)
    name = reader.fields["general.architecture"].contents()
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        logger.warning(
            "%s: the blocks of architecture %r are expanded; kept are those of %s",
            path.name,
            name,
            ", ".join(_ARCHITECTURES),
        )
        return None
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.requires_grad_(False).tie_weights()
    names = get_tensor_name_map(architecture.names, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expanded: Counter[str] = Counter()
    for places in _parameters(model):
        tensor = _take(tensors, names, [name for name, _, _ in places], path)
        parameter = getattr(*places[0][1:])
        if list(parameter.shape) != tensor.shape.tolist()[::-1]:
            raise ValueError(
                f"{path.name}: {tensor.name} has shape {tensor.shape.tolist()[::-1]}, expected {list(parameter.shape)}"
            )
        data, kind = _undone(tensor, architecture, config), tensor.tensor_type
        if is_affine(kind) and all(isinstance(module, (nn.Linear, nn.Embedding)) for _, module, _ in places):
            _keep(places, affine_of(data, kind, dtype))
            continue
        if kind not in _FLOATS:
            expanded[kind.name] += 1
        # A copy: the file's own pages cannot be written.
        floats = torch.from_numpy(np.array(dequantize(data, kind)))
        if "norm" in tensor.name:
            floats = floats - architecture.norm_offset
        weight = nn.Parameter(floats.to(dtype), requires_grad=False)
        for _, module, field in places:
            setattr(module, field, weight)
    factors = tensors.pop(_FREQUENCY_FACTORS, None)
    if factors is not None:
        rotary = model.get_submodule("model.rotary_emb")
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(factors.data.astype(np.float32))
    if tensors:
        raise ValueError(f"{path.name}: the model has no place for {', '.join(sorted(tensors))}")
    if expanded:
        kinds = ", ".join(f"{number} of {kind}" for kind, number in expanded.items())
        logger.warning("%s: tensors expanded, as MLX's form cannot hold their blocks: %s", path.name, kinds)
    if not all(keeps_scales(tensor.tensor_type, dtype) for tensor in reader.tensors if is_affine(tensor.tensor_type)):
        logger.warning("%s: the scales of its blocks are rounded to %s", path.name, str(dtype).removeprefix("torch."))
    return model.eval()


_Place = tuple[str, nn.Module, str]


def _parameters(model: nn.Module) -> Iterator[list[_Place]]:
    """Yield each parameter's places: name, module and field; tied weights have several."""
    places: dict[int, list[_Place]] = {}
    for owner, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((f"{owner}.{field}", module, field))
    yield from places.values()


def _take(tensors: dict[str, ReaderTensor], names: TensorNameMap, targets: list[str], path: Path) -> ReaderTensor:
    """Remove the tensor of a parameter from those of the file, and return it."""
    for target in targets:
        tensor = tensors.pop(str(names.get_name(target, try_suffixes=(".weight", ".bias"))), None)
        if tensor is not None:
            return tensor
    raise ValueError(f"{path.name}: it has no tensor for {targets[0]}")


def _undone(tensor: ReaderTensor, architecture: _Architecture, config: Any) -> np.ndarray:
    """Return a tensor's data with its rows in the model's order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parts = tensor.name.split(".")
    data: np.ndarray = tensor.data
    if not architecture.has_turned_heads or parts[-2] not in heads:
        return data
    # Blocks lie in rows, so that rows of blocks move like rows of numbers.
    by_pairs = data.reshape(heads[parts[-2]], -1, 2, *data.shape[1:])
    return np.ascontiguousarray(by_pairs.swapaxes(1, 2)).reshape(data.shape)


def _keep(places: list[_Place], weight: Affine) -> None:
    """Give modules one quantized weight."""
    first: list[nn.Parameter] = []
    for _, module, field in places:
        parametrize.register_parametrization(module, field, _Expanded(weight), unsafe=True)
        originals = module.parametrizations[field]
        first = first or [originals.original0, originals.original1, originals.original2]
        originals.original0, originals.original1, originals.original2 = first
