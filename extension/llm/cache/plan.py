"""Plans: which slots a layer's step writes and reads, in integers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Consecutive physical slots ``[slot, slot + length)`` of a pool."""

    slot: int
    length: int


class Mask(enum.Enum):
    """Which of the keys read a step's queries may see."""

    NONE = "none"  # every query sees every key read
    CAUSAL = "causal"  # lower-right aligned: the last query sees all, each earlier one a key less
    BAND = "band"  # causal, and narrower than the span read: a window moves with the query


@dataclass(frozen=True)
class LayerPlan:
    """One sequence's step on one layer.

    ::

        positions   first_key          start          stop
                        |----history-----|----step-----|        half-open, logical
        read            [==============================)        as runs of slots, in logical order
        write                            [=============)        as runs of slots; empty for a layer asked again

    Attributes:
        layer: the layer's id.
        start: position of the step's first token.
        stop: one past the position of the step's last token.
        write: slots that receive the step's keys and values, in token order; empty when they are there already.
        read: slots that hold positions ``[first_key, stop)``, in order (a ring wraps into at most two runs).
        first_key: logical position of the first key read.
        pool_slots: the slots that the layer's pool must have before the write.
        mask: how visibility follows from the positions.
        window: the layer's window, for a band.
    """

    layer: int
    start: int
    stop: int
    write: tuple[Run, ...]
    read: tuple[Run, ...]
    first_key: int
    pool_slots: int
    mask: Mask
    window: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.stop - self.start
