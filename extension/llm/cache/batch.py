"""Many sequences in one cache: ids, verbs and declarations, whatever holds their bytes."""

from __future__ import annotations

import heapq
import operator
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from .arguments import require_position
from .config import CacheConfig
from .errors import StepError
from .faces import BatchControl
from .layout import CacheLayout, PlanT
from .plan import Span

LEAST_MAX_SEQS = 1024
"""Sequences that may live at once where the configuration does not say, if the capacity is no larger."""


class Positioned(Protocol):
    """One sequence of a batch."""

    @property
    def position(self) -> int:
        """The position that its next token takes."""


EntryT = TypeVar("EntryT", bound=Positioned)


class BatchCache(CacheLayout[PlanT], BatchControl, Generic[PlanT, EntryT]):
    """Control of many sequences; a layout says what a sequence is.

    Besides ``CacheLayout``'s hooks a layout overrides ``free``, ``_new``, ``_fork``, ``_truncate`` and ``_drop``.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._max_seqs = config.max_seqs or max(config.capacity, LEAST_MAX_SEQS)
        self._live: dict[int, EntryT] = {}
        self._free_ids: list[int] = []  # a heap; ids that were used and ended
        self._next_id = 0  # the lowest id that was never used
        # Whose tokens the next step carries, and the open one.
        self._declared: tuple[Span, ...] = ()
        self._spans: tuple[Span, ...] = ()

    # -- control -----------------------------------------------------------

    @property
    def max_seqs(self) -> int:
        """The most sequences that live at once."""
        return self._max_seqs

    def seq_new(self) -> int | None:
        """Begin an empty sequence; see ``BatchControl.seq_new``."""
        self._check_outside_step("seq_new")
        return self._admit(self._new()) if len(self._live) < self._max_seqs else None

    def seq_clone(self, src: int, upto: int | None = None) -> int | None:
        """Copy a sequence; see ``BatchControl.seq_clone``."""
        self._check_outside_step("seq_clone")
        source = self._entry(src)
        if source is None:
            return None
        self._check_not_lost()
        length = source.position if upto is None else require_position("seq_clone", upto)
        if length > source.position or len(self._live) >= self._max_seqs:
            return None
        fork = self._fork(source, length)
        if fork is None:
            return None
        self._declared = ()
        return self._admit(fork)

    def seq_rm(self, seq_id: int) -> bool:
        """End a sequence; see ``BatchControl.seq_rm``."""
        self._check_outside_step("seq_rm")
        entry = self._entry(seq_id)
        if entry is None:
            return False
        self._drop(entry)
        del self._live[_plain(seq_id)]
        heapq.heappush(self._free_ids, _plain(seq_id))
        self._declared = ()
        return True

    def rewind(self, seq_id: int, position: int) -> bool:
        """Forget a sequence's positions from ``position`` on; see ``BatchControl.rewind``."""
        self._check_outside_step("rewind")
        entry = self._entry(seq_id)
        if entry is None:
            return False
        position = require_position("rewind", position)
        if position >= entry.position:
            return position == entry.position
        if not self._truncate(entry, position):
            return False
        self._declared = ()
        return True

    def pos(self, seq_id: int) -> int | None:
        """Return the position that the sequence's next token takes; None for an id that does not live."""
        entry = self._entry(seq_id)
        return None if entry is None else entry.position

    def clear(self) -> None:
        """End all sequences and forget their bytes."""
        self._check_outside_step("clear")
        self._live.clear()
        self._free_ids, self._next_id = [], 0
        self._declared = ()
        self._lost = None
        self._forget()

    def can_step(self, seq_ids: Sequence[int]) -> bool:
        """Whether such a step would be accepted; see ``BatchControl.can_step``."""
        return self._takes([_plain(seq_id) for seq_id in seq_ids])

    def declare_step(self, seq_ids: Sequence[int]) -> bool:
        """Announce whose tokens the next step carries; see ``BatchControl.declare_step``."""
        self._check_outside_step("declare_step")
        ids = [_plain(seq_id) for seq_id in seq_ids]
        if not self._takes(ids):
            return False
        bounds = [index for index in range(len(ids)) if index == 0 or ids[index] != ids[index - 1]]
        self._declared = tuple(
            Span(ids[start], start, stop) for start, stop in zip(bounds, [*bounds[1:], len(ids)], strict=True)
        )
        return True

    def _invariants(self) -> dict[str, bool]:
        used = [*self._live, *self._free_ids]
        return {
            "each id that was used is live or free": sorted(used) == list(range(self._next_id)),
            "no more sequences live than may": len(self._live) <= self._max_seqs,
            "only live sequences are declared": {span.seq_id for span in self._declared} <= self._live.keys(),
        }

    # -- steps -------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step, which uses up the declaration."""
        super().begin_step()
        self._spans, self._declared = self._declared, ()

    def _leave(self) -> None:
        super()._leave()
        self._spans = ()

    def _check_step(self, positions: tuple[int, ...]) -> None:
        if not self._spans:
            raise StepError(
                "the step was not declared: call declare_step with one sequence id per token before each forward (a"
                " program whose attention lies in several delegates takes a step for each under stock"
                " executorch.runtime: run it with load_program)"
            )
        declared = self._spans[-1].stop
        if len(positions) != declared:
            raise StepError(f"the step was declared with {declared} tokens and brings {len(positions)}")

    # -- for layouts -------------------------------------------------------

    @abstractmethod
    def _new(self) -> EntryT:
        """Return an empty sequence."""

    @abstractmethod
    def _fork(self, source: EntryT, upto: int) -> EntryT | None:
        """Return a sequence with ``source``'s positions below ``upto`` (at most its own); None where it cannot be."""

    @abstractmethod
    def _truncate(self, entry: EntryT, position: int) -> bool:
        """Shorten a sequence; False, with nothing changed, where keys that it needs are gone."""

    @abstractmethod
    def _drop(self, entry: EntryT) -> None:
        """Free what an ended sequence alone holds."""

    # -- inside ------------------------------------------------------------

    def _entry(self, seq_id: int) -> EntryT | None:
        """Return the sequence of an id; None where it does not live."""
        return self._live.get(_plain(seq_id))

    def _takes(self, ids: Sequence[int]) -> bool:
        tokens = Counter(ids)
        if not tokens:
            raise ValueError("a step needs one sequence id per token, got none")
        if self.is_lost or not tokens.keys() <= self._live.keys():
            return False
        return tokens.total() <= self.free and (self.max_step is None or max(tokens.values()) <= self.max_step)

    def _admit(self, entry: EntryT) -> int:
        if self._free_ids:
            seq_id = heapq.heappop(self._free_ids)
        else:
            seq_id, self._next_id = self._next_id, self._next_id + 1
        self._live[seq_id] = entry
        return seq_id


def _plain(seq_id: int) -> int:
    """Return an id as a plain integer: of any library's integers, and -1, which never lives, of anything else."""
    try:
        return operator.index(seq_id)
    except TypeError:
        return -1
