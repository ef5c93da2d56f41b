"""Plans: which slots a layer's step writes and reads, in integers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    OWNED = "owned"  # a query sees, of the cells read, those of its sequence within its window


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
        positions: each token's position, consecutive.
        write: slots that receive the step's keys and values, in token order; empty when they are there already.
        read: slots that hold positions ``[first_key, stop)``, in order (a ring wraps into at most two runs).
        first_key: logical position of the first key read.
        pool_slots: the slots that the layer's pool must have before the write.
        mask: how visibility follows from the positions.
        window: the layer's window, for a band.
    """

    layer: int
    positions: tuple[int, ...]
    write: tuple[Run, ...]
    read: tuple[Run, ...]
    first_key: int
    pool_slots: int
    mask: Mask
    window: int | None

    @property
    def start(self) -> int:
        """Position of the step's first token."""
        return self.positions[0]

    @property
    def stop(self) -> int:
        """One past the position of the step's last token."""
        return self.positions[-1] + 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.positions)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens ``[start, stop)`` of a step that belong to one sequence."""

    seq_id: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowGroup:
    """Consecutive tokens of a step that one attention call answers.

    Attributes:
        spans: whose tokens they are, in token order; one unless the mask is ``OWNED``.
        tokens: the first token of the sequence that is read, and how many, by index; None if the mask is ``OWNED``.
        read: the cells read. None if the tokens lie here and there: their cells are then to be gathered. Of ``OWNED``
            cells some may lie behind the pool's end: those are left out.
        mask: how visibility follows; ``BAND`` goes by positions, which need not be consecutive.
    """

    spans: tuple[Span, ...]
    tokens: tuple[int, int] | None
    read: Run | None
    mask: Mask


@dataclass(frozen=True)
class CellPlan:
    """A step of many sequences on one layer of a pool that they share.

    Attributes:
        layer: the layer's id.
        positions: each token's position.
        cells: each token's cell.
        write: the same as runs, in token order; empty when the layer has been written in this step.
        zero: cells to be zeroed before the write: they were freed, and may hold what must not reach an output. Those
            behind the pool's end are left out.
        groups: what is read, by which tokens.
        pool_cells: the cells that the layer's pool must have before the write.
        window: the layer's window.
    """

    layer: int
    positions: tuple[int, ...]
    cells: tuple[int, ...]
    write: tuple[Run, ...]
    zero: tuple[Run, ...]
    groups: tuple[RowGroup, ...]
    pool_cells: int
    window: int | None


class PagedRead(NamedTuple):
    """What one span of a step reads in the layers of a window.

    Attributes:
        span: whose tokens they are.
        pages: the sequence's pages, in order, with those that the step adds.
        first: the first key read, in slots from the beginning of the first page.
        length: how many keys are read, the span's own included.
        mask: how visibility follows from the positions.
    """

    span: Span
    pages: Sequence[int]
    first: int
    length: int
    mask: Mask


@dataclass(frozen=True)
class PagedStep:
    """A step of many sequences in the layers of a window.

    Attributes:
        window: the window.
        write: the slot that receives each token.
        reads: what is read, span by span.
        num_pages: the pages that the pools must have before the write.
        copies: whether pages that are shared are copied before the write.
    """

    window: int | None
    write: tuple[int, ...]
    reads: tuple[PagedRead, ...]
    num_pages: int
    copies: bool


@dataclass(frozen=True)
class PagedPlan:
    """A step of many sequences on one layer.

    Attributes:
        layer: the layer's id.
        positions: each token's position.
        step: what the layers of the same window do; the same object for each of them.
        is_written: whether the layer has been written in this step, so that it only reads.
    """

    layer: int
    positions: tuple[int, ...]
    step: PagedStep
    is_written: bool


def runs_of(slots: Sequence[int]) -> tuple[Run, ...]:
    """Return slots, in order, as runs."""
    starts = [index for index in range(len(slots)) if index == 0 or slots[index] != slots[index - 1] + 1]
    stops = [*starts[1:], len(slots)]
    return tuple(Run(slots[start], stop - start) for start, stop in zip(starts, stops, strict=False))
