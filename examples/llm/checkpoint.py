"""Reads a model and its tokenizer: a Hugging Face folder, a GGUF file, or SmolLM2 by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from . import smollm2

# What attention through SDPA would drop, or compute for the whole step at once, without a trace in the exported graph.
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("attn_logit_softcapping", None, "its attention scores are soft-capped, which SDPA does not do"),
)
_REFUSED_MODELS = {"gpt_oss": "its attention sinks are dropped by SDPA"}
_REFUSED_ROPE = {
    "dynamic": "it scales its frequencies by the longest position of a step, whose sequences then disturb each other",
    "longrope": "it chooses its frequencies by the longest position of a step, whose sequences then disturb each other",
}


class UnsupportedModelError(ValueError):
    """A model that cannot be exported; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode, with SDPA attention, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any


def load_checkpoint(source: str, dtype: torch.dtype) -> Checkpoint:
    """Load a model.

    Args:
        source: "smollm2", a ``.gguf`` file, or a folder with a Hugging Face model.
        dtype: dtype of the weights.

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
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except (ValueError, OSError, KeyError, UnpicklingError) as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    refuse_unsupported(model.config)
    return Checkpoint(model.eval().requires_grad_(False), tokenizer)


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
        refuse_unsupported(config)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, KeyError) as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    return model.eval().requires_grad_(False)


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModelError for a model whose attention changes silently when it is exported with SDPA."""
    model_type = config.model_type
    reasons = [reason for name, harmless, reason in _REFUSED if getattr(config, name, harmless) != harmless]
    if model_type in _REFUSED_MODELS:
        reasons.append(_REFUSED_MODELS[model_type])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters, or one per kind of layer.
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in _REFUSED_ROPE:
            reasons.append(_REFUSED_ROPE[parameters["rope_type"]])
    if reasons:
        raise UnsupportedModelError(f"model type {model_type!r} cannot be exported: {'; '.join(reasons)}")
