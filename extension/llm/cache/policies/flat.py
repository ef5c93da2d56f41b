"""Full history: position p lies in slot p.

::

    slot      0   1   2   3   4   5  ...  capacity - 1
    position  0   1   2   3   4   5  ...
"""

from __future__ import annotations

from ..plan import Run
from .base import LayerPolicy


class FlatPolicy(LayerPolicy):
    """Keeps every position; nothing is ever overwritten."""

    window = None
    max_write = None

    def __init__(self, capacity: int) -> None:
        self.slots = capacity

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """Return one run, at the positions themselves."""
        return (Run(start, stop - start),)

    def first_visible(self, position: int) -> int:
        """Return 0: all history is visible."""
        return 0

    def retains(self, position: int, high: int) -> bool:
        """Return True: all history is kept."""
        return True
