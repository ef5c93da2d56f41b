"""The caches' byte layers on MLX, and their registration under both backend ids."""

from executorch_mlx.extension.llm.cache.registry import register_builder

from ...identity import BACKEND_IDS
from ..device import mx
from .base import MLXCache
from .batch_cell import MLXBatchCellCache
from .batch_paged import MLXBatchPagedCache
from .batch_sequence import MLXBatchSequenceCache
from .sequence import MLXSequenceCache, mask_of

# docs/benchmarks.md: on CUDA a step of 4 to 64 sequences takes 0.2 to 0.9 times as long over cells as over private
# histories; on a CPU it takes longer.
_CELLS_ARE_FASTER = mx.default_device().type == mx.gpu and mx.cuda.is_available()

__all__ = [
    "KINDS",
    "MLXBatchCellCache",
    "MLXBatchPagedCache",
    "MLXBatchSequenceCache",
    "MLXCache",
    "MLXSequenceCache",
    "mask_of",
]

KINDS = {
    "sequence": MLXSequenceCache,
    "batched-cell": MLXBatchCellCache,
    "batched-paged": MLXBatchPagedCache,
    "batched-sequence": MLXBatchSequenceCache,
    "batched": MLXBatchCellCache if _CELLS_ARE_FASTER else MLXBatchSequenceCache,
}

for _backend_id in BACKEND_IDS:
    for _kind, _builder in KINDS.items():
        register_builder(_backend_id, _kind, _builder)
