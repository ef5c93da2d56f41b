"""The caches' byte layers on MLX, and their registration under both backend ids."""

from executorch_mlx.extension.llm.cache.registry import register_builder

from ...identity import BACKEND_IDS
from .base import MLXCache
from .sequence import MLXSequenceCache

__all__ = ["MLXCache", "MLXSequenceCache"]

for _backend_id in BACKEND_IDS:
    register_builder(_backend_id, "sequence", MLXSequenceCache)
