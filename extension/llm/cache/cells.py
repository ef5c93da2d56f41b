"""The cells of a shared pool: which are free, and which belong to a sequence."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field


class FreeCells:
    """The free cells of a pool, as sorted intervals ``[start, stop)`` that do not touch.

    ::

        cells      0 1 2 3 4 5 6 7 ...        5, 6 owned
        intervals  [0, 5) [7, capacity)
    """

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self.intervals = list(intervals)

    def copy(self) -> FreeCells:
        """Return an independent copy."""
        return FreeCells(self.intervals)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.intervals)

    def take(self, num_cells: int, after: int | None) -> list[int]:
        """Remove and return cells: consecutive ones if there are such, the lowest otherwise.

        Args:
            num_cells: at most as many as are free.
            after: a sequence's last cell; those that follow it are preferred.
        """
        if after is not None:
            index = bisect_left(self.intervals, (after + 1, 0))
            if index < len(self.intervals):
                start, stop = self.intervals[index]
                if start == after + 1 and stop - start >= num_cells:
                    return self._take_from(index, num_cells)
        for index, (start, stop) in enumerate(self.intervals):
            if stop - start >= num_cells:
                return self._take_from(index, num_cells)
        taken: list[int] = []
        while len(taken) < num_cells:
            start, stop = self.intervals[0]
            taken += self._take_from(0, min(stop - start, num_cells - len(taken)))
        return taken

    def give(self, cells: Iterable[int]) -> None:
        """Add cells that are not free."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.intervals, *((cell, cell + 1) for cell in cells)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.intervals = merged

    def _take_from(self, index: int, num_cells: int) -> list[int]:
        start, stop = self.intervals[index]
        if start + num_cells == stop:
            del self.intervals[index]
        else:
            self.intervals[index] = (start + num_cells, stop)
        return list(range(start, start + num_cells))


@dataclass
class CellSequence:
    """One sequence's tokens: their positions, strictly increasing, and their cells.

    Attributes:
        position: the position that the next token takes at the least.
        positions: each token's position.
        cells: each token's cell.
        starts: the indices at which a run of consecutive cells begins.
        unwritten: per layer that a step left out, the first index that it does not hold.
    """

    position: int = 0
    positions: array[int] = field(default_factory=lambda: array("q"))
    cells: array[int] = field(default_factory=lambda: array("q"))
    starts: list[int] = field(default_factory=list)
    unwritten: dict[int, int] = field(default_factory=dict)

    def append(self, positions: Iterable[int], cells: Iterable[int]) -> None:
        """Add tokens; ``position`` stays."""
        self.positions.extend(positions)
        for cell in cells:
            if not self.cells or cell != self.cells[-1] + 1:
                self.starts.append(len(self.cells))
            self.cells.append(cell)

    def cut(self, length: int) -> list[int]:
        """Drop all but the first ``length`` tokens and return their cells; ``position`` stays."""
        dropped = self.cells[length:].tolist()
        del self.positions[length:], self.cells[length:]
        del self.starts[bisect_left(self.starts, length) :]
        self.unwritten = {layer: first for layer, first in self.unwritten.items() if first < length}
        return dropped

    def prefix(self, position: int) -> CellSequence:
        """Return a sequence of the tokens below ``position``, in the same cells."""
        length = bisect_left(self.positions, position)
        return CellSequence(
            position,
            self.positions[:length],
            self.cells[:length],
            self.starts[: bisect_left(self.starts, length)],
            {layer: first for layer, first in self.unwritten.items() if first < length},
        )
