"""A sliding window: position p lies in slot p modulo the ring's size.

A step of up to m tokens reads the w - 1 positions before its first token besides its own, so a ring of w + m - 1 slots
never overwrites what the same step reads.

::

    w = 4, m = 2: five slots; after position 6
    slot      0   1   2   3   4
    position  5   6   2   3   4          a query at 6 sees 3..6: slots 3, 4, 0, 1 (two runs)
"""

from __future__ import annotations

from ..plan import Run
from .base import LayerPolicy


class RingPolicy(LayerPolicy):
    """Keeps the newest ``window + max_write - 1`` positions, or all of them where the capacity is less."""

    def __init__(self, capacity: int, window: int, max_write: int) -> None:
        self.slots = min(window + max_write - 1, capacity)
        self.window: int = window
        self.max_write: int = max_write

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """Return one run, or two where the positions pass the ring's end."""
        slot, length = start % self.slots, stop - start
        before_wrap = min(length, self.slots - slot)
        if before_wrap == length:
            return (Run(slot, length),)
        return (Run(slot, before_wrap), Run(0, length - before_wrap))

    def first_visible(self, position: int) -> int:
        """Return ``position - window + 1``, or 0 before the window is full."""
        return max(0, position - self.window + 1)

    def retains(self, position: int, high: int) -> bool:
        """Whether the window before ``position`` has not been overwritten; a window of 1 needs no history."""
        if position == 0 or self.window == 1:
            return True
        oldest_kept = max(0, high - (self.window + self.max_write - 1))
        return self.first_visible(position) >= oldest_kept
