"""Many sequences, each over its own private history: one single-sequence cache per sequence.

::

    step       A A A B C C        rows of q, k, v, in token order
    A's cache  [=======|A A A]    each answers its own rows, over its own pools
    B's cache  [=|B]
    C's cache  [====|C C]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from .batch import BatchCache
from .config import CacheConfig
from .errors import CacheError
from .layout import OpenStep
from .plan import LayerPlan, Span
from .sequence import SequenceCache, SequenceT


@dataclass(frozen=True)
class SequencePart:
    """One sequence's share of a step on one layer.

    Attributes:
        cache: the sequence.
        rows: its rows of the step, in order; each span continues the one before.
        plan: what its own cache does.
    """

    cache: SequenceCache
    rows: tuple[Span, ...]
    plan: LayerPlan


@dataclass(frozen=True)
class SequencesPlan:
    """A step of many sequences on one layer.

    Each part is committed by itself, just before its slots are written: a step that fails at one sequence leaves the
    slots, and the retention, of those after it as they were.
    """

    layer: int
    positions: tuple[int, ...]
    parts: tuple[SequencePart, ...]


class BatchSequenceCache(BatchCache[SequencesPlan, SequenceT], Generic[SequenceT]):
    """Control and planner of many private histories under one capacity.

    A byte layer names its single-sequence cache in ``sequence_type`` and says how its arrays are joined. What the
    sequences' caches leave pending at a step's end is for its own ``_settle`` to evaluate.
    """

    sequence_type: type[SequenceT]

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._max_step = self._new().max_step
        self._stepping: dict[int, SequenceT] = {}
        self._rows: dict[int, list[Span]] = {}

    @property
    def max_step(self) -> int | None:
        """The most tokens of one sequence in a step: the least that any ring takes; None without rings."""
        return self._max_step

    @property
    def free(self) -> int:
        """Tokens that still fit: the capacity less all sequences' positions, copies counted in full."""
        return self.capacity - sum(cache.position for cache in self._live.values())

    def _invariants(self) -> dict[str, bool]:
        for cache in self._live.values():
            cache.check_integrity()
        return super()._invariants() | {
            "all sequences together fit": self.free >= 0,
            "sequences step with their batch": self._stepping.keys() <= self._live.keys()
            and all(cache.in_step is (seq_id in self._stepping) for seq_id, cache in self._live.items()),
        }

    # -- sequences ---------------------------------------------------------

    def _new(self) -> SequenceT:
        return self.sequence_type(self.config)

    def _fork(self, source: SequenceT, upto: int) -> SequenceT | None:
        return source.fork(upto) if upto <= self.free else None

    def _truncate(self, entry: SequenceT, position: int) -> bool:
        return entry.rewind(position)

    def _drop(self, entry: SequenceT) -> None:
        """Nothing is shared: a sequence's bytes go with it."""

    # -- steps -------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step, of the batch and of each sequence that takes part."""
        super().begin_step()
        for span in self._spans:
            if span.seq_id not in self._stepping:
                self._live[span.seq_id].begin_step()
                self._stepping[span.seq_id] = self._live[span.seq_id]
            self._rows.setdefault(span.seq_id, []).append(span)

    def _leave(self) -> None:
        super()._leave()
        self._stepping, self._rows = {}, {}

    def _plan(self, layer: int, positions: tuple[int, ...]) -> SequencesPlan:
        parts = []
        for seq_id, cache in self._stepping.items():
            rows = self._rows[seq_id]
            its = [position for span in rows for position in positions[span.start : span.stop]]
            try:
                plan = cache.plan(layer, its)
            except (CacheError, ValueError) as error:
                raise type(error)(f"sequence {seq_id}: {error}") from error
            parts.append(SequencePart(cache, tuple(rows), plan))
        return SequencesPlan(layer, positions, tuple(parts))

    def _commit(self, plan: SequencesPlan) -> None:
        """Nothing: ``_attend`` commits the parts; see ``SequencesPlan``."""

    def _advance(self, step: OpenStep) -> None:
        for cache in self._stepping.values():
            cache.end_step(committed=True)

    def _roll_back(self, step: OpenStep) -> None:
        for cache in self._stepping.values():
            cache.end_step(committed=False)

    # -- bytes -------------------------------------------------------------

    @abstractmethod
    def _joined(self, parts: Sequence[Any]) -> Any:
        """Concatenate arrays [1, H, n, D] along their tokens."""

    def _attend(self, plan: SequencesPlan, q: Any, k: Any, v: Any, scale: float) -> Any:
        outputs: list[tuple[int, Any]] = []
        for part in plan.parts:
            with part.cache.writing(part.plan):
                its_q, its_k, its_v = (self._taken(array, part.rows) for array in (q, k, v))
                out = part.cache._attend(part.plan, its_q, its_k, its_v, scale)
            done = 0
            for span in part.rows:
                length = span.stop - span.start
                outputs.append((span.start, out if len(part.rows) == 1 else out[:, :, done : done + length]))
                done += length
        if len(outputs) == 1:
            return outputs[0][1]
        return self._joined([out for _, out in sorted(outputs, key=lambda output: output[0])])

    def _taken(self, array: Any, rows: tuple[Span, ...]) -> Any:
        """Return rows of an array [1, H, n, D]."""
        if (rows[0].start, rows[0].stop) == (0, array.shape[2]):
            return array
        taken = [array[:, :, span.start : span.stop] for span in rows]
        return taken[0] if len(taken) == 1 else self._joined(taken)
