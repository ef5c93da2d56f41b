"""The contract between a sequence's bookkeeping and the placement of its positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..plan import Run


class LayerPolicy(ABC):
    """Maps one sequence's logical positions to slots of one layer's pool.

    Attributes:
        slots: the most slots the pool ever has.
        window: the layer's window; None sees all history.
        max_write: the most tokens one step may write; None leaves it to the capacity.
    """

    slots: int
    window: int | None
    max_write: int | None

    @abstractmethod
    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """Return the slots of positions ``[start, stop)`` in logical order. At most ``slots`` positions."""

    @abstractmethod
    def first_visible(self, position: int) -> int:
        """Return the lowest position that a query at ``position`` may see."""

    @abstractmethod
    def retains(self, position: int, high: int) -> bool:
        """Whether all that a query at ``position`` may see is still there.

        Args:
            position: where the next token would be written.
            high: one past the last position ever written here since the sequence was last empty.
        """
