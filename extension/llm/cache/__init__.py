"""KV caches that live outside the program: integer bookkeeping, control faces, and the registry of layouts.

This package is the tensor-free core. It imports the standard library only; ``op`` and ``reference`` (which need torch)
are imported by whoever exports or runs a model eagerly.
"""

from .batch import BatchCache
from .batch_cell import BatchCellCache
from .batch_paged import BatchPagedCache
from .batch_sequence import BatchSequenceCache, SequencesPlan
from .config import CacheConfig, LayerConfig, layers_from_constants
from .errors import CacheError, CacheFullError, CacheLostError, StepError
from .faces import BatchControl, CacheControl, SequenceControl
from .layout import CacheLayout
from .plan import CellPlan, LayerPlan, Mask, PagedPlan, PagedRead, PagedStep, RowGroup, Run, Span
from .registry import build, register_builder
from .sequence import SequenceCache
from .session import CacheSession, active_cache

__all__ = [
    "BatchCache",
    "BatchCellCache",
    "BatchControl",
    "BatchPagedCache",
    "BatchSequenceCache",
    "CacheConfig",
    "CacheControl",
    "CacheError",
    "CacheFullError",
    "CacheLayout",
    "CacheLostError",
    "CacheSession",
    "CellPlan",
    "LayerConfig",
    "LayerPlan",
    "Mask",
    "PagedPlan",
    "PagedRead",
    "PagedStep",
    "RowGroup",
    "Run",
    "SequenceCache",
    "SequenceControl",
    "SequencesPlan",
    "Span",
    "StepError",
    "active_cache",
    "build",
    "layers_from_constants",
    "register_builder",
]
