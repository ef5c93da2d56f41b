"""What every layout is built on: the step protocol, and an attention layer's call from checks to bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .arguments import check_heads, host_positions
from .config import CacheConfig
from .errors import CacheLostError, StepError
from .faces import CacheControl


class StepPlan(Protocol):
    """What a layer's step does, in integers."""

    @property
    def layer(self) -> int:
        """The layer's id."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Each token's logical position."""


PlanT = TypeVar("PlanT", bound=StepPlan)


@dataclass
class OpenStep:
    """The step under way.

    Attributes:
        positions: each token's position, once the first layer has begun to write.
        written: the layers that have.
        failed: whether a layer's work raised.
    """

    positions: tuple[int, ...] | None = None
    written: set[int] = field(default_factory=set)
    failed: bool = False


class CacheLayout(CacheControl, Generic[PlanT]):
    """A control face with a planner and its backend's byte layer: what a builder returns.

    The planner's face is ``plan`` (pure) and ``commit`` (mutates). ``attend`` joins them: it checks all that can be
    checked, commits the plan *before* it touches the slots (so that a write which fails half-way counts as having
    overwritten them) and leaves the bytes to ``_attend``.

    A layout's core overrides ``_check_step``, ``_plan``, ``_commit``, ``_advance``, ``_roll_back`` and ``_leave``; a
    byte layer ``_attend``, ``_settle``, ``_discard`` and ``_forget``.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._step: OpenStep | None = None
        self._lost: str | None = None

    # -- control -----------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that may be held."""
        return self.config.capacity

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    @property
    def is_lost(self) -> bool:
        """Whether only ``clear()`` makes the cache usable again."""
        return self._lost is not None

    def mark_lost(self, reason: str) -> None:
        """Refuse further steps until ``clear()``: a failed evaluation has left the pools undefined."""
        self._lost = reason

    def check_integrity(self) -> None:
        """Raise AssertionError naming the invariant that does not hold, if one does not."""
        for name, holds in self._invariants().items():
            if not holds:
                raise AssertionError(f"cache integrity: {name}")

    # -- steps -------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Bracket one forward; see ``CacheControl.step``."""
        self.begin_step()
        try:
            yield
            self.settle_step()
        except BaseException:
            self.end_step(committed=False)
            raise
        self.end_step(committed=True)

    def begin_step(self) -> None:
        """Open a step."""
        if self._step is not None:
            raise StepError("a step is open already: leave it before the next one")
        self._check_not_lost()
        self._step = OpenStep()

    def settle_step(self) -> None:
        """Do what may still fail at a step's end."""
        self._check_whole()
        self._settle()

    def end_step(self, *, committed: bool) -> None:
        """Close the step. Whatever interrupts it, the step is closed and its bookkeeping whole."""
        step = self._step
        assert step is not None
        try:
            if not committed:
                self._discard()
        finally:
            self._step = None
            if committed:
                self._advance(step)
            else:
                self._roll_back(step)
            self._leave()

    def fail_step(self) -> None:
        """Make the open step one that can only be aborted: something has failed in it."""
        assert self._step is not None, "there is a step to fail"
        self._step.failed = True

    def attend(self, layer: int, positions: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        """Append this step's keys and values to a layer, then attend.

        Args:
            layer: the layer's id.
            positions: each token's logical position, integers [n] or [n, 1].
            q: rotated queries [1, H_q, n, D].
            k: rotated keys [1, H_kv, n, D] with H_q a multiple of H_kv.
            v: values [1, H_kv, n, D_v].
            scale: softmax scale.

        Returns:
            [1, H_q, n, D_v] in q's dtype.

        Raises:
            ValueError: an unknown layer, another shape, positions that the layout does not take.
            TypeError: a dtype that is not of floating point, positions that are no integers.
            StepError: no step is open, or not this one.
            CacheFullError: the tokens do not fit.
        """
        host = host_positions(positions)
        plan = self.plan(layer, host)
        check_heads(layer, self.config.layers[layer], len(host), q, k, v)
        with self.writing(plan):
            return self._attend(plan, q, k, v, scale)

    def plan(self, layer: int, positions: Sequence[int]) -> PlanT:
        """Say what a layer's step writes and reads. Pure.

        Args:
            layer: the layer's id.
            positions: the positions of the step's tokens, in order.

        Raises:
            StepError: no step is open, the positions differ from those of the step's earlier layers, or the layout does
                not take them in this step.
            CacheFullError: the tokens do not fit.
            ValueError: an unknown layer; no tokens; positions that do not continue their sequence.
        """
        if self._step is None:
            raise StepError("attention outside a step: bracket each forward with `with cache.step():`")
        if not 0 <= layer < len(self.config.layers):
            raise ValueError(
                f"layer {layer}: the cache was built for layers 0..{len(self.config.layers) - 1}; build it with one"
                " LayerConfig per cache of the program"
            )
        self._check_whole()
        given = tuple(positions)
        if not given:
            raise ValueError("a step needs one or more tokens, got none")
        if self._step.positions is None:
            self._check_step(given)
        elif self._step.positions != given:
            raise StepError(
                f"layer {layer}: its {len(given)} positions from {given[0]} to {given[-1]} differ from those of the"
                f" step's earlier layers, {len(self._step.positions)} from {self._step.positions[0]} to"
                f" {self._step.positions[-1]}"
            )
        return self._plan(layer, given)

    def commit(self, plan: PlanT) -> None:
        """Record that a plan's slots are being written. A layer asked again in the same step changes nothing."""
        assert self._step is not None, "plan() has checked that a step is open"
        self._step.positions = plan.positions
        self._commit(plan)
        self._step.written.add(plan.layer)

    @contextmanager
    def writing(self, plan: PlanT) -> Iterator[None]:
        """Commit a plan and bracket the work on its slots: an exception inside spoils the step."""
        try:
            self.commit(plan)
            yield
        except BaseException:
            self.fail_step()
            raise

    # -- for layouts -------------------------------------------------------

    @abstractmethod
    def _invariants(self) -> dict[str, bool]:
        """Return whether each of the layout's invariants holds, by name."""

    @abstractmethod
    def _check_step(self, positions: tuple[int, ...]) -> None:
        """Raise if the step does not take these positions; called until its first layer is written."""

    @abstractmethod
    def _plan(self, layer: int, positions: tuple[int, ...]) -> PlanT:
        """Return a known layer's plan for positions that the step takes. Pure."""

    @abstractmethod
    def _commit(self, plan: PlanT) -> None:
        """Record that a plan's slots are being written."""

    @abstractmethod
    def _advance(self, step: OpenStep) -> None:
        """Commit the step. Cannot fail."""

    @abstractmethod
    def _roll_back(self, step: OpenStep) -> None:
        """Undo the step. Cannot fail."""

    def _leave(self) -> None:
        """Drop what belonged to the step that has ended. Cannot fail."""

    # -- for byte layers ---------------------------------------------------

    @abstractmethod
    def _attend(self, plan: PlanT, q: Any, k: Any, v: Any, scale: float) -> Any:
        """Write a committed plan's slots, read, and attend; see ``attend``."""

    def _settle(self) -> None:
        """Evaluate what a step has left pending; may fail."""

    def _discard(self) -> None:
        """Finish with what an aborted step has left pending; a failure marks the cache as lost."""

    def _forget(self) -> None:
        """Drop all pools."""

    # -- inside ------------------------------------------------------------

    def _check_not_lost(self) -> None:
        if self.is_lost:
            raise CacheLostError(f"the cache's bytes were lost ({self._lost}): call clear() and start again")

    def _check_outside_step(self, verb: str) -> None:
        if self._step is not None:
            raise StepError(f"{verb} inside a step: leave the step first")

    def _check_whole(self) -> None:
        self._check_not_lost()
        if self._step is not None and self._step.failed:
            raise StepError("a layer failed in this step: leave the step, it is aborted, and run it again")
