"""Where one sequence's positions lie in a layer's pool: a policy per kind of layer."""

from __future__ import annotations

from ..config import CacheConfig, LayerConfig
from .base import LayerPolicy
from .flat import FlatPolicy
from .ring import RingPolicy

__all__ = ["FlatPolicy", "LayerPolicy", "RingPolicy", "policy_for"]


def policy_for(layer: LayerConfig, config: CacheConfig) -> LayerPolicy:
    """Return the policy that serves a layer: a ring where it has a window, else full history."""
    if layer.window is None:
        return FlatPolicy(config.capacity)
    return RingPolicy(config.capacity, layer.window, config.max_write or layer.window)
