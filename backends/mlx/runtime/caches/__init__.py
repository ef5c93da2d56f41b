"""The caches' byte layers on MLX, and their registration under both backend ids."""

from executorch_mlx.extension.llm.cache.registry import register_builder

from ...identity import BACKEND_IDS
from ..device import is_cpu, mx
from .base import MLXCache
from .batch_cell import MLXBatchCellCache
from .batch_paged import MLXBatchPagedCache
from .batch_sequence import MLXBatchSequenceCache
from .sequence import MLXSequenceCache, mask_of

# docs/benchmarks.md: pages are the fastest where there is a kernel for them; on Metal there is none.
_PAGES_ARE_FASTER = is_cpu() or mx.cuda.is_available()

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
    "batched": MLXBatchPagedCache if _PAGES_ARE_FASTER else MLXBatchSequenceCache,
}

for _backend_id in BACKEND_IDS:
    for _kind, _builder in KINDS.items():
        register_builder(_backend_id, _kind, _builder)
