"""Many sequences over one pool of cells: each cell has a position and a set of owners.

::

    cell       0  1  2  3  4  5  6  7
    position   0  1  2  3  4  3  4  .      . is free
    owner      AB AB AB A  A  B  B         B was cloned from A below position 3: no key is copied

A query sees the cells that its sequence owns, at positions up to its own and within the layer's window. All layers keep
all history: a window hides, it evicts nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .batch import BatchCache
from .cells import CellSequence, FreeCells
from .config import CacheConfig
from .errors import StepError
from .layout import OpenStep
from .plan import CellPlan, Mask, RowGroup, Run, Span, runs_of

EXTENT = 256
"""Cells that the end of a masked read is rounded up to, so that its shape, and what is compiled for it, is reused."""

MAX_POSITION = 2**62
"""Positions are kept as 64-bit integers; byte layers use larger ones as marks."""


@dataclass(frozen=True)
class _Placement:
    """Where a step's tokens go, and what is read: the same for all layers of a window."""

    cells: tuple[int, ...]
    write: tuple[Run, ...]
    free_before: FreeCells
    free_after: FreeCells
    groups: Mapping[int | None, tuple[RowGroup, ...]]


@dataclass
class _Tail:
    """A sequence with this step's tokens so far, before they are its own."""

    entry: CellSequence
    count: int = field(init=False)
    start: int = field(init=False)
    last: int | None = field(init=False)
    positions: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.count = len(self.entry.cells)
        self.start = self.entry.starts[-1] if self.entry.starts else 0
        self.last = self.entry.cells[-1] if self.entry.cells else None

    def append(self, position: int, cell: int) -> None:
        if self.last is None or cell != self.last + 1:
            self.start = self.count
        self.last = cell
        self.count += 1
        self.positions.append(position)

    def first_visible(self, position: int, window: int | None) -> int:
        """Return the index of the first token that a query at ``position`` sees."""
        if window is None:
            return 0
        index = bisect_left(self.entry.positions, position - window + 1)
        held = len(self.entry.positions)
        return index if index < held else held + bisect_left(self.positions, position - window + 1)


class BatchCellCache(BatchCache[CellPlan, CellSequence]):
    """Control and planner of sequences that share one pool of cells; a byte layer owns the pools.

    Attributes:
        gathers: what is done for a sequence whose cells do not lie side by side: gather them for it alone, or read all
            cells in use behind a mask, for several sequences at once.
    """

    gathers: ClassVar[bool] = False

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._free_cells = FreeCells([(0, config.capacity)])
        self._owners: dict[int, int] = {}  # how many sequences own a cell; none is not listed
        # Per layer, the cells that were freed since it was last written. The sets are shared, never changed.
        self._stale: list[frozenset[int]] = [frozenset()] * len(config.layers)
        self._windows = {layer.window for layer in config.layers}
        # Of the open step: what plan() has found for its positions, and what the first layer has committed.
        self._draft: tuple[tuple[int, ...], _Placement] | None = None
        self._placement: _Placement | None = None
        self._zero: dict[frozenset[int], tuple[Run, ...]] = {}

    @property
    def max_step(self) -> None:
        """None: only the free cells bound a step."""
        return None

    @property
    def free(self) -> int:
        """Cells that no sequence owns."""
        return len(self._free_cells)

    def tokens(self, seq_id: int) -> CellSequence:
        """Return a live sequence's tokens, those of the open step included once its first layer is written."""
        return self._live[seq_id]

    def clear(self) -> None:
        """End all sequences and forget their bytes."""
        super().clear()
        self._free_cells, self._owners = FreeCells([(0, self.capacity)]), {}
        self._stale = [frozenset()] * len(self.config.layers)

    def _invariants(self) -> dict[str, bool]:
        free = {cell for start, stop in self._free_cells.intervals for cell in range(start, stop)}
        owners: Counter[int] = Counter()
        position_of: dict[int, int] = {}
        one_position_per_cell = in_order = runs_are_exact = True
        for entry in self._live.values():
            for cell, position in zip(entry.cells, entry.positions, strict=True):
                owners[cell] += 1
                one_position_per_cell &= position_of.setdefault(cell, position) == position
            held = [*entry.positions, *([] if self.in_step else [entry.position])]
            in_order &= held == sorted(set(held))
            starts = [
                index
                for index in range(len(entry.cells))
                if index == 0 or entry.cells[index] != entry.cells[index - 1] + 1
            ]
            runs_are_exact &= entry.starts == starts
        touching = zip(self._free_cells.intervals, self._free_cells.intervals[1:], strict=False)
        return super()._invariants() | {
            "each cell counts its owners": owners == self._owners,
            "a cell is free or owned": free == set(range(self.capacity)) - owners.keys(),
            "free intervals are sorted and do not touch": all(first[1] < second[0] for first, second in touching),
            "the owners of a cell agree on its position": one_position_per_cell,
            "a sequence's positions increase, up to the next": in_order,
            "runs of consecutive cells are exact": runs_are_exact,
            "only cells without a token's bytes are stale": self.in_step
            or all(stale <= free | self._unwritten(layer) for layer, stale in enumerate(self._stale)),
        }

    def _unwritten(self, layer: int) -> set[int]:
        """Return the owned cells that a layer does not hold, as earlier steps left it out."""
        entries = [entry for entry in self._live.values() if layer in entry.unwritten]
        return {cell for entry in entries for cell in entry.cells[entry.unwritten[layer] :]}

    # -- sequences ---------------------------------------------------------

    def _new(self) -> CellSequence:
        return CellSequence()

    def _fork(self, source: CellSequence, upto: int) -> CellSequence | None:
        fork = source.prefix(upto)
        if fork.unwritten:
            return None
        for cell in fork.cells:
            self._owners[cell] += 1
        return fork

    def _truncate(self, entry: CellSequence, position: int) -> bool:
        length = bisect_left(entry.positions, position)
        if any(first < length for first in entry.unwritten.values()):
            return False
        self._free_tokens(entry, length)
        entry.position = position
        return True

    def _drop(self, entry: CellSequence) -> None:
        self._free_tokens(entry, 0)

    def _free_tokens(self, entry: CellSequence, length: int) -> None:
        """Keep a sequence's first ``length`` tokens; free the other cells that it alone owns."""
        freed = []
        for cell in entry.cut(length):
            self._owners[cell] -= 1
            if self._owners[cell] == 0:
                del self._owners[cell]
                freed.append(cell)
        if freed:
            self._free_cells.give(freed)
            self._mark_stale(freed)

    def _mark_stale(self, cells: Sequence[int]) -> None:
        merged = {stale: stale.union(cells) for stale in set(self._stale)}
        self._stale = [merged[stale] for stale in self._stale]

    # -- steps -------------------------------------------------------------

    def _leave(self) -> None:
        super()._leave()
        self._draft = self._placement = None
        self._zero.clear()

    def _check_step(self, positions: tuple[int, ...]) -> None:
        super()._check_step(positions)
        least: dict[int, int] = {}
        for span in self._spans:
            for position in positions[span.start : span.stop]:
                due = least.setdefault(span.seq_id, self._live[span.seq_id].position)
                if not due <= position <= MAX_POSITION:
                    raise ValueError(
                        f"sequence {span.seq_id}: position {position} where {due} or a later one (at most"
                        f" {MAX_POSITION}) was due: positions increase strictly, from the sequence's own on"
                    )
                least[span.seq_id] = position + 1

    def _plan(self, layer: int, positions: tuple[int, ...]) -> CellPlan:
        assert self._step is not None
        for span in self._spans:
            entry = self._live[span.seq_id]
            if layer in entry.unwritten:
                held = entry.unwritten[layer]
                raise StepError(
                    f"layer {layer} holds {held} of sequence {span.seq_id}'s {len(entry.cells)} tokens: an earlier step"
                    " left this layer out"
                )
        placement = self._placement or self._drafted(positions)
        new = layer not in self._step.written
        window = self.config.layers[layer].window
        return CellPlan(
            layer=layer,
            positions=positions,
            cells=placement.cells,
            write=placement.write if new else (),
            zero=self._zeroed(self._stale[layer], placement) if new else (),
            groups=placement.groups[window],
            pool_cells=_high_water(placement.free_after, self.capacity),
            window=window,
        )

    def _zeroed(self, stale: frozenset[int], placement: _Placement) -> tuple[Run, ...]:
        """Return the stale cells that the step does not write; the same for most layers."""
        if stale not in self._zero:
            self._zero[stale] = runs_of(sorted(stale.difference(placement.cells)))
        return self._zero[stale]

    def _commit(self, plan: CellPlan) -> None:
        if self._placement is not None:
            return
        self._placement = placement = self._drafted(plan.positions)
        self._free_cells = placement.free_after
        for cell in placement.cells:
            self._owners[cell] = 1
        for span in self._spans:
            rows = slice(span.start, span.stop)
            self._live[span.seq_id].append(plan.positions[rows], placement.cells[rows])

    def _advance(self, step: OpenStep) -> None:
        if step.positions is None:
            return
        left_out = set(range(len(self.config.layers))) - step.written
        for span in self._spans:
            entry = self._live[span.seq_id]
            for layer in left_out:
                entry.unwritten.setdefault(layer, bisect_left(entry.positions, entry.position))
            entry.position = step.positions[span.stop - 1] + 1
        for layer in step.written:
            self._stale[layer] = frozenset()

    def _roll_back(self, step: OpenStep) -> None:
        if self._placement is None:
            return
        for span in self._spans:
            entry = self._live[span.seq_id]
            entry.cut(bisect_left(entry.positions, entry.position))
        self._free_cells = self._placement.free_before
        for cell in self._placement.cells:
            self._owners.pop(cell, None)
        self._mark_stale(self._placement.cells)

    # -- placement ---------------------------------------------------------

    def _drafted(self, positions: tuple[int, ...]) -> _Placement:
        if self._draft is None or self._draft[0] != positions:
            self._draft = (positions, self._placed(positions))
        return self._draft[1]

    def _placed(self, positions: tuple[int, ...]) -> _Placement:
        """Choose cells for a step's tokens, which were admitted, and say what each reads. Pure."""
        free = self._free_cells.copy()
        cells: list[int] = []
        last: dict[int, int | None] = {}
        for span in self._spans:
            entry = self._live[span.seq_id]
            after = last.get(span.seq_id, entry.cells[-1] if entry.cells else None)
            cells += free.take(span.stop - span.start, after)
            last[span.seq_id] = cells[-1]
        extent = -(-_high_water(free, self.capacity) // EXTENT) * EXTENT
        groups = {window: self._groups(positions, cells, window, extent) for window in self._windows}
        return _Placement(tuple(cells), runs_of(cells), self._free_cells, free, groups)

    def _groups(
        self, positions: tuple[int, ...], cells: Sequence[int], window: int | None, extent: int
    ) -> tuple[RowGroup, ...]:
        """Say what a layer of a window reads: cells that lie side by side in a sequence's order as they are."""
        groups: list[RowGroup] = []
        shared: list[Span] = []
        tails: dict[int, _Tail] = {}
        own = []
        for span in self._spans:
            tail = tails.setdefault(span.seq_id, _Tail(self._live[span.seq_id]))
            for row in range(span.start, span.stop):
                tail.append(positions[row], cells[row])
            first = tail.first_visible(positions[span.start], window)
            consecutive = tail.start <= first
            if span.stop - span.start == 1:
                mask = Mask.NONE
            elif tail.first_visible(positions[span.stop - 1], window) == first:
                mask = Mask.CAUSAL
            else:
                mask = Mask.BAND
            length = tail.count - first
            assert tail.last is not None
            read = Run(tail.last + 1 - length, length) if consecutive else None
            own.append(RowGroup((span,), (first, length), read, mask))
        # Where others are read behind a mask, a single row more costs nothing, and a call of its own does.
        sharing = not self.gathers and any(group.read is None for group in own)
        for group in own:
            if sharing and (group.read is None or group.mask is Mask.NONE):
                shared.extend(group.spans)
                continue
            if shared:
                groups.append(RowGroup(tuple(shared), None, Run(0, extent), Mask.OWNED))
                shared.clear()
            groups.append(group)
        if shared:
            groups.append(RowGroup(tuple(shared), None, Run(0, extent), Mask.OWNED))
        return tuple(groups)


def _high_water(free: FreeCells, capacity: int) -> int:
    """Return one past the highest owned cell."""
    if free.intervals and free.intervals[-1][1] == capacity:
        return free.intervals[-1][0]
    return capacity
