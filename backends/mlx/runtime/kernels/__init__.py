"""What each instruction does: a table from node kinds to MLX functions, in parts by subject."""

from . import attention, control, elementwise, foreign, indexing, products, reductions, shapes, values
from .base import At, Row, Step, check_extent
from .state import Extent, StepState

KERNELS: dict[str, Row] = {
    kind: row
    for part in (values, elementwise, reductions, shapes, indexing, products, attention, control, foreign)
    for kind, row in part.KERNELS.items()
}

__all__ = ["KERNELS", "At", "Extent", "Step", "StepState", "check_extent"]
