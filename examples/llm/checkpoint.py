"""Reads a model and its tokenizer: a Hugging Face folder, a GGUF file, or SmolLM2 by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from executorch_mlx.backends.mlx.pages import release_pages

from . import smollm2
from .gguf_checkpoint import load_gguf
from .supported import UnsupportedModelError, refuse_config


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode, with SDPA attention, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any


def load_checkpoint(source: str, dtype: torch.dtype, *, keep_blocks: bool = False) -> Checkpoint:
    """Load a model.

    Args:
        source: "smollm2", a ``.gguf`` file, or a folder with a Hugging Face model.
        dtype: dtype of the weights.
        keep_blocks: leave a ``.gguf`` file's quantized blocks as they are, where that can be; else they are expanded.

    Raises:
        FileNotFoundError: there is no such file or folder.
        UnsupportedModelError: the model is of a kind that cannot be exported.
    """
    path = smollm2.fetch() if source == "smollm2" else Path(source)
    if path.is_file() and path.suffix == ".gguf":
        where: tuple[str, dict[str, Any]] = (str(path.parent), {"gguf_file": path.name})
    elif (path / "config.json").is_file():
        where = (str(path), {})
    elif path.exists():
        raise UnsupportedModelError(f"{source}: expected a .gguf file or a folder with a config.json")
    else:
        raise FileNotFoundError(f"{source}: no such model; expected 'smollm2', a .gguf file or a Hugging Face folder")
    folder, options = where
    options |= {"local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
        refuse_config(config)
        model = load_gguf(path, config, dtype) if keep_blocks and "gguf_file" in options else None
        if model is None:
            # As they are stored, weights lie in the mapped files until they are converted, one after the other.
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype="auto", attn_implementation="sdpa", trust_remote_code=False, **options
            )
            convert(model, dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except UnsupportedModelError:
        raise
    except (ValueError, OSError, KeyError, UnpicklingError) as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    return Checkpoint(model.eval().requires_grad_(False), tokenizer)


def convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights, but for those that it keeps in float32.

    ``model.to`` would also round what is computed and not stored, such as rotary frequencies.
    """
    names = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype is torch.float16 else [])]
    patterns = {pattern for name in names for pattern in getattr(model, name, None) or ()}
    kept = re.compile("|".join(rf"(^|\.){re.escape(pattern)}($|\.)" for pattern in patterns) or "(?!)")
    stored = model.state_dict(keep_vars=True)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        wanted = torch.float32 if kept.search(name) else dtype
        if name in stored and tensor.is_floating_point() and tensor.dtype != wanted:
            before = tensor.data
            tensor.data = before.to(wanted)
            release_pages(before)


def random_model(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of a configuration with random weights.

    Args:
        source: a Hugging Face config.json, the folder it lies in, or the name of a model on the hub.
        dtype: dtype of the weights.

    Raises:
        UnsupportedModelError: there is no such configuration, or the model is of a kind that cannot be exported.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        refuse_config(config)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except UnsupportedModelError:
        raise
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    return model.eval().requires_grad_(False)
