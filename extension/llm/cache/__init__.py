"""KV caches that live outside the program: integer bookkeeping, control faces, and the registry of layouts.

This package is the tensor-free core. It imports the standard library only; ``op`` and ``reference`` (which need torch)
are imported by whoever exports or runs a model eagerly.
"""

from .config import CacheConfig, LayerConfig, layers_from_constants
from .errors import CacheError, CacheFullError, CacheLostError, StepError
from .faces import BatchControl, CacheControl, CacheLayout, SequenceControl
from .plan import LayerPlan, Mask, Run
from .registry import build, register_builder
from .sequence import SequenceCache
from .session import CacheSession, active_cache

__all__ = [
    "BatchControl",
    "CacheConfig",
    "CacheControl",
    "CacheError",
    "CacheFullError",
    "CacheLayout",
    "CacheLostError",
    "CacheSession",
    "LayerConfig",
    "LayerPlan",
    "Mask",
    "Run",
    "SequenceCache",
    "SequenceControl",
    "StepError",
    "active_cache",
    "build",
    "layers_from_constants",
    "register_builder",
]
