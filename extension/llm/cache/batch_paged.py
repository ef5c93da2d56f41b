"""Many sequences over one pool of pages: a sequence has a table of the pages that hold its tokens, in order.

::

    page       0        1        2        3         a page holds page_size tokens
    slots      [======] [======] [==    ] [===   ]
    tables     A: 0, 2     B: 0, 1, 3               B was cloned from A in page 0: no key is copied

A page that several sequences hold is copied by the first of them that writes into it. Layers of one window share their
pages' numbers, and each layer has a pool of its own. Of a window, pages that lie before what must be kept are freed.

What a sequence may do is what it may do in ``batched-sequence``: the layouts differ in where tokens lie, and in that
all sequences' tokens can be answered at once.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .batch import BatchCache
from .cells import FreeCells
from .config import CacheConfig
from .errors import StepError
from .layout import OpenStep
from .plan import PagedPlan, PagedRead, PagedStep, Span
from .policies import LayerPolicy, policy_for
from .sequence import check_continues, mask_for


@dataclass
class PageTable:
    """One sequence's pages in the layers of a window.

    Attributes:
        pages: the pages, in the order of their positions.
        first: how many pages before them were freed: position p lies in ``pages[p // page_size - first]``.
        high: one past the last position ever written since the sequence was last empty.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    first: int = 0
    high: int = 0


@dataclass
class PagedSequence:
    """One sequence.

    Attributes:
        position: the position that its next token takes.
        tables: its pages, by window.
        unwritten: per layer that a step left out, the first position that it does not hold.
    """

    position: int
    tables: Mapping[int | None, PageTable]
    unwritten: dict[int, int] = field(default_factory=dict)

    def held(self, layer: int) -> int:
        """Return one past the last position that a layer holds."""
        return self.unwritten.get(layer, self.position)


@dataclass
class _Pages:
    """The pages of the layers of one window."""

    policy: LayerPolicy
    free: FreeCells = field(default_factory=lambda: FreeCells([]))
    num_pages: int = 0  # how many there are, free and held
    owners: dict[int, int] = field(default_factory=dict)  # how many tables hold a page; none is not listed

    def kept_from(self, high: int) -> int:
        """Return the first position that must be kept."""
        if self.policy.window is None or self.policy.max_write is None:
            return 0
        return max(0, high - (self.policy.window + self.policy.max_write - 1))

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] = self.owners.get(page, 0) + 1

    def drop(self, pages: Sequence[int]) -> None:
        freed = []
        for page in pages:
            if self.owners[page] == 1:
                del self.owners[page]
                freed.append(page)
            else:
                self.owners[page] -= 1
        if freed:
            self.free.give(freed)


@dataclass(frozen=True)
class _Change:
    """What a step does to a sequence's table: pages are added, the last one may be copied first."""

    table: PageTable
    length: int  # pages before
    added: tuple[int, ...]
    copied: tuple[int, int] | None  # the page that was shared, and its copy

    @property
    def taken(self) -> tuple[int, ...]:
        """The pages that were free before."""
        return self.added if self.copied is None else (self.copied[1], *self.added)


@dataclass(frozen=True)
class _Placement:
    """A step in the layers of one window: what the plans say, and how the books change."""

    step: PagedStep
    num_pages_before: int
    free_before: FreeCells
    free_after: FreeCells
    changes: tuple[_Change, ...]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """The pages that are copied, and to where."""
        return [change.copied for change in self.changes if change.copied is not None]


class BatchPagedCache(BatchCache[PagedPlan, PagedSequence]):
    """Control and planner of sequences over shared pages; a byte layer owns the pools.

    Attributes:
        page_size: tokens of a page: few enough that the last, partly filled one costs little.
    """

    page_size: ClassVar[int] = 64

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pages = {layer.window: _Pages(policy_for(layer, config)) for layer in config.layers}
        limits = [pages.policy.max_write for pages in self._pages.values() if pages.policy.max_write is not None]
        self._max_step = min(limits) if limits else None
        # Of the open step: what plan() has found for its positions, what the first layer has committed, and the windows
        # of which a layer was written.
        self._draft: tuple[tuple[int, ...], dict[int | None, _Placement]] | None = None
        self._placements: dict[int | None, _Placement] | None = None
        self._begun: set[int | None] = set()
        # Of the open step: spans of sequences that lack tokens on some layer.
        self._incomplete: list[Span] = []

    # -- control -----------------------------------------------------------

    @property
    def max_step(self) -> int | None:
        """The most tokens of one sequence in a step: the least that any window takes; None without windows."""
        return self._max_step

    @property
    def free(self) -> int:
        """Tokens that still fit: the capacity less all sequences' positions, copies counted in full."""
        return self.capacity - sum(entry.position for entry in self._live.values())

    def clear(self) -> None:
        """End all sequences and forget their bytes."""
        super().clear()
        self._pages = {window: _Pages(pages.policy) for window, pages in self._pages.items()}

    def _invariants(self) -> dict[str, bool]:
        size = self.page_size
        invariants = super()._invariants() | {"all sequences together fit": self.free >= 0}
        for window, pages in self._pages.items():
            # A page that the open step has copied counts until the step commits.
            owners = Counter(source for source, _ in self._placements[window].copies) if self._placements else Counter()
            covered = in_order = True
            for entry in self._live.values():
                table = entry.tables[window]
                owners.update(table.pages)
                stop = (table.first + len(table.pages)) * size
                seen_from = pages.policy.first_visible(entry.position)
                if seen_from < entry.position:
                    kept = min(pages.kept_from(table.high), seen_from)
                    covered &= table.first * size <= kept and stop >= entry.position
                held = max(entry.held(layer) for layer, its in enumerate(self.config.layers) if its.window == window)
                in_order &= held <= table.high <= self.capacity
                in_order &= self.in_step or (stop < entry.position + size and (entry.position > 0 or table.high == 0))
            spread = {page for start, stop in pages.free.intervals for page in range(start, stop)}
            invariants |= {
                f"window {window}: each page counts its tables": owners == pages.owners,
                f"window {window}: a page is free or held": spread == set(range(pages.num_pages)) - owners.keys(),
                f"window {window}: tables cover what must be kept": covered,
                f"window {window}: tables hold no more than was written": in_order,
            }
        return invariants

    # -- sequences ---------------------------------------------------------

    def _new(self) -> PagedSequence:
        return PagedSequence(0, {window: PageTable() for window in self._pages})

    def _fork(self, source: PagedSequence, upto: int) -> PagedSequence | None:
        size = self.page_size
        if upto > self.free or not self._retained(source, upto):
            return None
        fork = self._new()
        if upto > 0:
            fork.position = upto
            fork.unwritten = {layer: first for layer, first in source.unwritten.items() if first < upto}
            for window, table in source.tables.items():
                pages = table.pages[: max(-(-upto // size) - table.first, 0)]
                self._pages[window].share(pages)
                its = fork.tables[window]
                its.pages, its.high = pages, table.high
                its.first = table.first if pages else upto // size
        return fork

    def _truncate(self, entry: PagedSequence, position: int) -> bool:
        size = self.page_size
        if not self._retained(entry, position):
            return False
        entry.position = position
        entry.unwritten = {layer: first for layer, first in entry.unwritten.items() if first < position}
        for window, table in entry.tables.items():
            kept = max(-(-position // size) - table.first, 0)
            self._pages[window].drop(table.pages[kept:])
            del table.pages[kept:]
            if not table.pages:
                # A window of one keeps nothing that was before: the sequence may go back behind its first page.
                table.first = position // size
            if position == 0:
                table.high = 0
        return True

    def _drop(self, entry: PagedSequence) -> None:
        for window, table in entry.tables.items():
            self._pages[window].drop(table.pages)

    def _retained(self, entry: PagedSequence, position: int) -> bool:
        if any(first < position for first in entry.unwritten.values()):
            return False
        return all(self._pages[window].policy.retains(position, table.high) for window, table in entry.tables.items())

    # -- steps -------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step."""
        super().begin_step()
        self._incomplete = [span for span in self._spans if self._live[span.seq_id].unwritten]

    def _leave(self) -> None:
        super()._leave()
        self._draft = self._placements = None
        self._begun = set()

    def _check_step(self, positions: tuple[int, ...]) -> None:
        super()._check_step(positions)
        if self._draft is not None and self._draft[0] == positions:
            return  # they were checked before they were placed
        due: dict[int, int] = {}
        for span in self._spans:
            start = due.get(span.seq_id, self._live[span.seq_id].position)
            try:
                check_continues(start, positions[span.start : span.stop])
            except ValueError as error:
                raise ValueError(f"sequence {span.seq_id}: {error}") from error
            due[span.seq_id] = start + span.stop - span.start

    def _plan(self, layer: int, positions: tuple[int, ...]) -> PagedPlan:
        assert self._step is not None
        for span in self._incomplete:
            entry = self._live[span.seq_id]
            if layer in entry.unwritten:
                raise StepError(
                    f"sequence {span.seq_id}: layer {layer} holds {entry.held(layer)} of the sequence's"
                    f" {entry.position} tokens: an earlier step left this layer out"
                )
        placements = self._placements or self._drafted(positions)
        step = placements[self.config.layers[layer].window].step
        return PagedPlan(layer, positions, step, is_written=layer in self._step.written)

    def _commit(self, plan: PagedPlan) -> None:
        if self._placements is None:
            self._placements = self._drafted(plan.positions)
            for window, placement in self._placements.items():
                pages = self._pages[window]
                pages.free, pages.num_pages = placement.free_after, placement.step.num_pages
                for change in placement.changes:
                    if change.copied is not None:
                        change.table.pages[-1] = change.copied[1]
                    change.table.pages.extend(change.added)
                    pages.share(change.taken)
            for window, placement in self._placements.items():
                copies = placement.copies
                if copies:
                    self._copy_pages(window, copies, placement.step.num_pages)
        window = self.config.layers[plan.layer].window
        if window not in self._begun:
            self._begun.add(window)
            for span in self._spans:
                table = self._live[span.seq_id].tables[window]
                table.high = max(table.high, plan.positions[span.stop - 1] + 1)

    def _advance(self, step: OpenStep) -> None:
        size = self.page_size
        if step.positions is None or self._placements is None:
            return
        left_out = set(range(len(self.config.layers))) - step.written
        for span in self._spans:
            entry = self._live[span.seq_id]
            for layer in left_out:
                entry.unwritten.setdefault(layer, entry.position)
            entry.position = step.positions[span.stop - 1] + 1
        for window, placement in self._placements.items():
            pages = self._pages[window]
            pages.drop([source for source, _ in placement.copies])
            if window is None:
                continue  # nothing is past
            for span in self._spans:
                table = self._live[span.seq_id].tables[window]
                seen_from = pages.policy.first_visible(self._live[span.seq_id].position)
                num_past = min(pages.kept_from(table.high), seen_from) // size - table.first
                if num_past > 0:
                    pages.drop(table.pages[:num_past])
                    table.first += len(table.pages[:num_past])
                    del table.pages[:num_past]

    def _roll_back(self, step: OpenStep) -> None:
        for window, placement in (self._placements or {}).items():
            pages = self._pages[window]
            pages.free, pages.num_pages = placement.free_before, placement.num_pages_before
            for change in placement.changes:
                del change.table.pages[change.length :]
                if change.copied is not None:
                    change.table.pages[-1] = change.copied[0]
                for page in change.taken:
                    pages.owners.pop(page, None)
            for span in self._spans:
                if self._live[span.seq_id].position == 0:
                    self._live[span.seq_id].tables[window].high = 0

    # -- for byte layers ---------------------------------------------------

    @abstractmethod
    def _copy_pages(self, window: int | None, copies: Sequence[tuple[int, int]], num_pages: int) -> None:
        """Copy pages in all layers of a window that hold any.

        Args:
            window: the window.
            copies: pages, and the pages that get their rows.
            num_pages: the pages that the pools must have before.
        """

    # -- placement ---------------------------------------------------------

    def _drafted(self, positions: tuple[int, ...]) -> dict[int | None, _Placement]:
        if self._draft is None or self._draft[0] != positions:
            self._draft = (positions, {window: self._placed(window, positions) for window in self._pages})
        return self._draft[1]

    def _placed(self, window: int | None, positions: tuple[int, ...]) -> _Placement:
        """Choose pages for a step's tokens, which were admitted, and say what each span reads. Pure."""
        size = self.page_size
        pages = self._pages[window]
        free, num_pages, changes = pages.free, pages.num_pages, []
        stops = {span.seq_id: positions[span.stop - 1] + 1 for span in self._spans}
        tables: dict[int, tuple[array[int], int]] = {}
        for seq_id, stop in stops.items():
            entry = self._live[seq_id]
            table, after = entry.tables[window], None
            held, first = table.pages, table.first
            missing = -(-stop // size) - first - len(held)
            # A step begins in the last page, unless that is full.
            is_shared = bool(held) and entry.position % size > 0 and pages.owners[held[-1]] > 1
            if missing > 0 or is_shared:
                free = pages.free.copy() if free is pages.free else free
                lacking = max(missing, 0) + is_shared - len(free)
                if lacking > 0:
                    # What was freed is used before there are more.
                    free.give(range(num_pages, num_pages + lacking))
                    num_pages += lacking
                copied = None
                if is_shared:
                    copied = (held[-1], free.take(1, None)[0])
                    held = held[:-1] + array("i", copied[1:])
                after = held[-1] if held else None
                added = tuple(free.take(missing, after)) if missing > 0 else ()
                held = held + array("i", added)
                changes.append(_Change(table, len(table.pages), added, copied))
            tables[seq_id] = held, first
        reads, slots = [], []
        for span in self._spans:
            held, first = tables[span.seq_id]
            start, stop = positions[span.start], positions[span.stop - 1] + 1
            first_key = pages.policy.first_visible(start)
            base = first * size
            reads.append(PagedRead(span, held, first_key - base, stop - first_key, mask_for(pages.policy, start, stop)))
            slots += [held[(p - base) // size] * size + p % size for p in range(start, stop)]
        copies = any(change.copied is not None for change in changes)
        step = PagedStep(window, tuple(slots), tuple(reads), num_pages, copies)
        return _Placement(step, pages.num_pages, pages.free, free, tuple(changes))
