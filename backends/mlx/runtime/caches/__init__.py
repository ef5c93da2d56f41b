"""The caches' byte layers on MLX, and their registration under both backend ids."""

from executorch_mlx.extension.llm.cache.registry import register_builder

from ...identity import BACKEND_IDS
from .base import MLXCache
from .batch_cell import MLXBatchCellCache
from .batch_sequence import MLXBatchSequenceCache
from .sequence import MLXSequenceCache

__all__ = ["KINDS", "MLXBatchCellCache", "MLXBatchSequenceCache", "MLXCache", "MLXSequenceCache"]

KINDS = {
    "sequence": MLXSequenceCache,
    "batched-cell": MLXBatchCellCache,
    "batched-sequence": MLXBatchSequenceCache,
    "batched": MLXBatchSequenceCache,
}

for _backend_id in BACKEND_IDS:
    for _kind, _builder in KINDS.items():
        register_builder(_backend_id, _kind, _builder)
