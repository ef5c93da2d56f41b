"""Naive oracles of many sequences, each fed in flat steps: private histories, and cells that forks share.

They are written from the specification alone and import nothing of the package they judge. Sequence ids are the
caller's choice: which free id a cache hands out is its own affair.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .naive_attention import Array, NaiveSequence, dense_attention, round_to


@dataclass
class Dims:
    """What an oracle is built from: see the package's configuration, whose terms these are."""

    capacity: int
    windows: Sequence[int | None]
    max_write: int | None = None
    kv_dtype: str = "float32"
    q_dtype: str = "float32"


class NaiveBatch(ABC):
    """Many sequences under one capacity.

    Attributes:
        lengths: the position that each live sequence's next token takes.
        declared: whose tokens the next step carries, or None.
    """

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.declared: list[int] | None = None

    @property
    @abstractmethod
    def lengths(self) -> dict[int, int]: ...

    @property
    @abstractmethod
    def used(self) -> int:
        """Tokens, or cells, that are held."""

    @property
    @abstractmethod
    def max_step(self) -> int | None:
        """The most tokens of one sequence in a step."""

    @property
    def free(self) -> int:
        return self.dims.capacity - self.used

    def admits(self, ids: Sequence[int]) -> bool:
        """Whether a step with one token per id is legal now."""
        counts = Counter(ids)
        known = all(seq_id in self.lengths for seq_id in counts)
        short = self.max_step is None or all(count <= self.max_step for count in counts.values())
        return known and short and len(ids) <= self.free

    def positions(self, ids: Sequence[int]) -> list[int]:
        """The positions that a step without gaps has."""
        due = dict(self.lengths)
        positions = []
        for seq_id in ids:
            positions.append(due[seq_id])
            due[seq_id] += 1
        return positions

    @abstractmethod
    def new(self, seq_id: int) -> None: ...

    @abstractmethod
    def can_clone(self, src: int, upto: int | None) -> bool: ...

    @abstractmethod
    def clone(self, src: int, dst: int, upto: int | None) -> None: ...

    @abstractmethod
    def rm(self, seq_id: int) -> None: ...

    @abstractmethod
    def can_rewind(self, seq_id: int, position: int) -> bool: ...

    @abstractmethod
    def rewind(self, seq_id: int, position: int) -> None: ...

    @abstractmethod
    def clear(self) -> None: ...

    @abstractmethod
    def attend(
        self, layer: int, ids: Sequence[int], positions: Sequence[int], q: Array, k: Array, v: Array, scale: float
    ) -> npt.NDArray[np.float64]:
        """Write a step's rows to a layer, then attend; a repeat in one step only attends. As the single oracle's."""

    @abstractmethod
    def commit(self, ids: Sequence[int], positions: Sequence[int]) -> None: ...

    @abstractmethod
    def abort(self, ids: Sequence[int]) -> None: ...


class NaivePrivate(NaiveBatch):
    """Private histories: a naive sequence for each."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self._sequences: dict[int, NaiveSequence] = {}
        self._empty = self._sequence()

    def _sequence(self) -> NaiveSequence:
        dims = self.dims
        return NaiveSequence(dims.capacity, dims.windows, dims.max_write, dims.kv_dtype, dims.q_dtype)

    @property
    def lengths(self) -> dict[int, int]:
        return {seq_id: sequence.length for seq_id, sequence in self._sequences.items()}

    @property
    def used(self) -> int:
        return sum(self.lengths.values())

    @property
    def max_step(self) -> int | None:
        return self._empty.max_step

    def new(self, seq_id: int) -> None:
        assert seq_id not in self._sequences
        self._sequences[seq_id] = self._sequence()

    def can_clone(self, src: int, upto: int | None) -> bool:
        if src not in self._sequences:
            return False
        length = self.lengths[src] if upto is None else upto
        return length <= self.free and self._sequences[src].can_rewind(length)

    def clone(self, src: int, dst: int, upto: int | None) -> None:
        assert dst not in self._sequences
        self._sequences[dst] = self._sequences[src].fork(self.lengths[src] if upto is None else upto)

    def rm(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    def can_rewind(self, seq_id: int, position: int) -> bool:
        return seq_id in self._sequences and self._sequences[seq_id].can_rewind(position)

    def rewind(self, seq_id: int, position: int) -> None:
        assert self._sequences[seq_id].rewind(position)

    def clear(self) -> None:
        self._sequences.clear()

    def attend(
        self, layer: int, ids: Sequence[int], positions: Sequence[int], q: Array, k: Array, v: Array, scale: float
    ) -> npt.NDArray[np.float64]:
        out = np.empty((*q.shape[:3], v.shape[3]))
        for seq_id in dict.fromkeys(ids):
            rows = [row for row, owner in enumerate(ids) if owner == seq_id]
            its = (part[:, :, rows] for part in (q, k, v))
            out[:, :, rows] = self._sequences[seq_id].attend(layer, *its, scale)
        return out

    def commit(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        for seq_id in set(ids):
            self._sequences[seq_id].commit()

    def abort(self, ids: Sequence[int]) -> None:
        for seq_id in set(ids):
            self._sequences[seq_id].abort()


@dataclass
class _Cell:
    """A token: its number, its position, and its key and value per layer."""

    number: int
    position: int
    rows: dict[int, tuple[Array, Array]] = field(default_factory=dict)


class NaiveCells(NaiveBatch):
    """Cells that forks share: each sequence is a list of them."""

    max_step = None

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self._cells: dict[int, list[_Cell]] = {}
        self._lengths: dict[int, int] = {}
        self._pending: list[_Cell] | None = None
        self._numbers = itertools.count()

    @property
    def lengths(self) -> dict[int, int]:
        return dict(self._lengths)

    @property
    def used(self) -> int:
        return len({cell.number for cells in self._cells.values() for cell in cells})

    def new(self, seq_id: int) -> None:
        assert seq_id not in self._cells
        self._cells[seq_id], self._lengths[seq_id] = [], 0

    def can_clone(self, src: int, upto: int | None) -> bool:
        return src in self._cells and (upto is None or upto <= self._lengths[src])

    def clone(self, src: int, dst: int, upto: int | None) -> None:
        assert dst not in self._cells
        length = self._lengths[src] if upto is None else upto
        self._cells[dst] = [cell for cell in self._cells[src] if cell.position < length]
        self._lengths[dst] = length

    def rm(self, seq_id: int) -> None:
        del self._cells[seq_id], self._lengths[seq_id]

    def can_rewind(self, seq_id: int, position: int) -> bool:
        return seq_id in self._cells and position <= self._lengths[seq_id]

    def rewind(self, seq_id: int, position: int) -> None:
        self._cells[seq_id] = [cell for cell in self._cells[seq_id] if cell.position < position]
        self._lengths[seq_id] = position

    def clear(self) -> None:
        self._cells.clear()
        self._lengths.clear()

    def attend(
        self, layer: int, ids: Sequence[int], positions: Sequence[int], q: Array, k: Array, v: Array, scale: float
    ) -> npt.NDArray[np.float64]:
        if self._pending is None:
            self._pending = [_Cell(next(self._numbers), position) for position in positions]
            for seq_id, cell in zip(ids, self._pending, strict=True):
                self._cells[seq_id].append(cell)
        for row, cell in enumerate(self._pending):
            cell.rows.setdefault(layer, (self._stored(k[0, :, row]), self._stored(v[0, :, row])))
        out = np.empty((*q.shape[:3], v.shape[3]))
        for row, (seq_id, position) in enumerate(zip(ids, positions, strict=True)):
            cells = self._cells[seq_id]
            keys, values = (np.stack([cell.rows[layer][part] for cell in cells], axis=1) for part in range(2))
            held = [cell.position for cell in cells]
            answer = dense_attention(
                q[0, :, row : row + 1], keys, values, [position], held, self.dims.windows[layer], scale
            )
            out[0, :, row] = answer[:, 0]
        return out

    def commit(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        self._pending = None
        for seq_id, position in zip(ids, positions, strict=True):
            self._lengths[seq_id] = position + 1

    def abort(self, ids: Sequence[int]) -> None:
        self._pending = None
        for seq_id, length in self._lengths.items():
            self.rewind(seq_id, length)

    def _stored(self, values: Array) -> Array:
        return round_to(self.dims.q_dtype, round_to(self.dims.kv_dtype, values))


ORACLES: dict[str, type[NaiveBatch]] = {
    "batched-cell": NaiveCells,
    "batched-sequence": NaivePrivate,
    "batched": NaivePrivate,
}
