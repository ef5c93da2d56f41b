"""Which models SDPA and a cache outside the program would change, without a trace in the exported graph."""

from __future__ import annotations

from typing import Any

from torch import nn

_SOFTCAP = "its attention scores are soft-capped, which SDPA does not do"
_SINKS = "its attention has sinks, which SDPA drops"
_LONGEST = "it chooses its frequencies by the longest position of a step, whose sequences then disturb each other"
_LONGEST_ROPE = {"dynamic", "longrope"}


class UnsupportedModelError(ValueError):
    """A model that cannot be exported; the message says why."""


def refuse_config(config: Any) -> None:
    """Raise UnsupportedModelError for the configuration of a model that cannot be exported.

    Args:
        config: a Hugging Face configuration.
    """
    reasons = []
    if getattr(config, "attn_logit_softcapping", None) is not None:
        reasons.append(_SOFTCAP)
    if config.model_type == "gpt_oss":
        reasons.append(_SINKS)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters, or one per kind of layer.
    kinds = [parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, dict)]
    if any(kind in _LONGEST_ROPE for kind in kinds):
        reasons.append(_LONGEST)
    if reasons:
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be exported: {'; '.join(reasons)}")


def refuse_modules(model: nn.Module) -> None:
    """Raise UnsupportedModelError naming a module of a Hugging Face model that cannot be exported."""
    for name, module in model.named_modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            reason = _SOFTCAP
        elif isinstance(getattr(module, "sinks", None), nn.Parameter):
            reason = _SINKS
        elif _LONGEST_ROPE & _rope_types(module):
            reason = _LONGEST
        else:
            continue
        raise UnsupportedModelError(f"{name or type(model).__name__} cannot be exported: {reason}")


def _rope_types(module: nn.Module) -> set[str]:
    """Return the kinds of rotary embedding of a module: one, or one for each kind of layer."""
    kinds = getattr(module, "rope_type", None) or ()
    return {kinds} if isinstance(kinds, str) else set(kinds.values() if isinstance(kinds, dict) else kinds)
