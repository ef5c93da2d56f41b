"""One sequence's bookkeeping: layers of any policy under one logical length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .config import CacheConfig
from .errors import CacheFullError, CacheLostError, StepError
from .faces import SequenceControl
from .plan import LayerPlan, Mask, Run
from .policies import policy_for


@dataclass
class _OpenStep:
    """The step under way: its span once the first layer has planned, and the layers that have written it."""

    span: tuple[int, int] | None = None
    written: set[int] = field(default_factory=set)
    failed: bool = False


class SequenceCache(SequenceControl):
    """Control and planner of one sequence; a byte layer derives from it and owns the pools.

    The planner's face is ``plan`` (pure) and ``commit`` (mutates). A byte layer commits a plan *before* it touches the
    slots, so that a write which fails half-way counts as having overwritten them; ``writing`` brackets that.

    Byte layers override ``_settle`` and ``_forget``.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._policies = tuple(policy_for(layer, config) for layer in config.layers)
        limits = [policy.max_write for policy in self._policies if policy.max_write is not None]
        self._max_step = min(limits) if limits else None
        self._position = 0
        # Per layer, one past the last position: that holds this sequence's keys, and that was ever written.
        self._filled = [0] * len(self._policies)
        self._high = [0] * len(self._policies)
        self._step: _OpenStep | None = None
        self._lost: str | None = None

    # -- control -----------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that the sequence may reach."""
        return self.config.capacity

    @property
    def max_step(self) -> int | None:
        """The most tokens of a step: the least that any ring takes; None without rings."""
        return self._max_step

    @property
    def position(self) -> int:
        """The position that the next token takes; the sequence's length."""
        return self._position

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit."""
        return 0 <= n <= self.capacity - self._position

    def rewind(self, position: int) -> bool:
        """Forget the positions from ``position`` on; see ``SequenceControl.rewind``."""
        self._check_outside_step("rewind")
        if position < 0:
            raise ValueError(f"rewind: expected a position >= 0, got {position}")
        if position > self._position:
            return False
        if position == self._position:
            return True
        if not self._retained(position):
            return False
        self._truncate(position)
        return True

    def clear(self) -> None:
        """End the sequence and forget its bytes."""
        self._check_outside_step("clear")
        self._truncate(0)
        self._lost = None
        self._forget()

    def check_integrity(self) -> None:
        """Raise AssertionError naming the invariant that does not hold, if one does not."""
        invariants = {"the position lies within the capacity": 0 <= self._position <= self.capacity}
        for layer, policy in enumerate(self._policies):
            filled, high = self._filled[layer], self._high[layer]
            holds_window = filled < self._position or policy.retains(self._position, high)
            invariants |= {
                f"layer {layer}: what is held was written": filled <= high,
                f"layer {layer}: writes lie within the capacity": high <= self.capacity,
                f"layer {layer}: the pool is bounded by the capacity": policy.slots <= self.capacity,
                f"layer {layer}: an empty sequence holds nothing": self.in_step or self._position > 0 or high == 0,
                f"layer {layer}: the next query's window is held": holds_window,
            }
        for name, holds in invariants.items():
            if not holds:
                raise AssertionError(f"cache integrity: {name}")

    # -- steps -------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Bracket one forward; see ``CacheControl.step``."""
        if self._step is not None:
            raise StepError("a step is open already: leave it before the next one")
        if self._lost is not None:
            raise CacheLostError(f"the cache's bytes were lost ({self._lost}): call clear() and run the sequence again")
        self._step = _OpenStep()
        committed = False
        try:
            yield
            self._check_whole()
            self._settle(committed=True)
            committed = True
        finally:
            step, self._step = self._step, None
            if committed:
                self._advance(step)
            else:
                self._roll_back(step)

    def mark_lost(self, reason: str) -> None:
        """Refuse further steps until ``clear()``: a failed evaluation has left the pools undefined."""
        self._lost = reason

    def plan(self, layer: int, positions: Sequence[int]) -> LayerPlan:
        """Say what a layer's step writes and reads. Pure.

        Args:
            layer: the layer's id.
            positions: the positions of the step's tokens, in order.

        Raises:
            StepError: no step is open, the positions differ from those of the step's earlier layers, there are more
                tokens than ``max_step``, or an earlier step left this layer out.
            CacheFullError: the tokens do not fit.
            ValueError: an unknown layer; no tokens; positions that do not continue the sequence.
        """
        if self._step is None:
            raise StepError("attention outside a step: bracket each forward with `with cache.step():`")
        if not 0 <= layer < len(self._policies):
            raise ValueError(
                f"layer {layer}: the cache was built for layers 0..{len(self._policies) - 1}; build it with one"
                " LayerConfig per cache of the program"
            )
        self._check_whole()
        start, stop = self._span(positions)
        if self._step.span is None:
            self._check_fits(start, stop)
        elif self._step.span != (start, stop):
            raise StepError(
                f"layer {layer}: positions {start}..{stop - 1} differ from the step's"
                f" {self._step.span[0]}..{self._step.span[1] - 1}"
            )
        if self._filled[layer] < start:
            raise StepError(
                f"layer {layer} holds positions up to {self._filled[layer] - 1}, the sequence continues at {start}: an"
                " earlier step left this layer out"
            )
        return self._layer_plan(layer, start, stop)

    def commit(self, plan: LayerPlan) -> None:
        """Record that a plan's slots are being written. A layer asked again in the same step changes nothing."""
        assert self._step is not None, "plan() has checked that a step is open"
        self._step.span = (plan.start, plan.stop)
        self._step.written.add(plan.layer)
        self._high[plan.layer] = max(self._high[plan.layer], plan.stop)
        self._filled[plan.layer] = plan.stop

    @contextmanager
    def writing(self, plan: LayerPlan) -> Iterator[None]:
        """Commit a plan and bracket the work on its slots: an exception inside spoils the step."""
        self.commit(plan)
        try:
            yield
        except BaseException:
            assert self._step is not None
            self._step.failed = True
            raise

    # -- for byte layers ---------------------------------------------------

    def _settle(self, *, committed: bool) -> None:
        """Finish a step's bytes: evaluate them, or put back what an aborted step replaced."""

    def _forget(self) -> None:
        """Drop all pools."""

    # -- inside ------------------------------------------------------------

    def _check_outside_step(self, verb: str) -> None:
        if self._step is not None:
            raise StepError(f"{verb} inside a step: leave the step first")

    def _check_whole(self) -> None:
        if self._step is not None and self._step.failed:
            raise StepError("a layer failed in this step: leave the step, it is aborted, and run it again")

    def _retained(self, position: int) -> bool:
        layers = zip(self._policies, self._filled, self._high, strict=True)
        return all(filled >= position and policy.retains(position, high) for policy, filled, high in layers)

    def _truncate(self, position: int) -> None:
        self._position = position
        self._filled = [min(filled, position) for filled in self._filled]
        if position == 0:
            self._high = [0] * len(self._policies)

    def _span(self, positions: Sequence[int]) -> tuple[int, int]:
        if not positions:
            raise ValueError("a step needs one or more tokens, got none")
        start = self._position
        for expected, given in enumerate(positions, start):
            if given != expected:
                raise ValueError(
                    f"position {given} where {expected} was due: the sequence holds {start} tokens, and a step"
                    " continues it without gaps or repeats"
                )
        return start, start + len(positions)

    def _check_fits(self, start: int, stop: int) -> None:
        num_tokens = stop - start
        if stop > self.capacity:
            raise CacheFullError(
                f"the cache is full: it holds {start} of {self.capacity} tokens and the step brings {num_tokens};"
                " rewind, clear, or build it with a larger capacity"
            )
        if self._max_step is not None and num_tokens > self._max_step:
            raise StepError(
                f"a step of {num_tokens} tokens: the sliding windows take at most {self._max_step} at a time; split it,"
                " or build the cache with a larger max_write"
            )

    def _layer_plan(self, layer: int, start: int, stop: int) -> LayerPlan:
        assert self._step is not None
        policy = self._policies[layer]
        first_key = policy.first_visible(start)
        if stop - start == 1:
            mask = Mask.NONE
        elif policy.first_visible(stop - 1) <= first_key:
            mask = Mask.CAUSAL
        else:
            mask = Mask.BAND
        write: tuple[Run, ...] = () if layer in self._step.written else policy.runs(start, stop)
        return LayerPlan(
            layer=layer,
            start=start,
            stop=stop,
            write=write,
            read=policy.runs(first_key, stop),
            first_key=first_key,
            pool_slots=min(max(stop, self._high[layer]), policy.slots),
            mask=mask,
            window=policy.window,
        )

    def _advance(self, step: _OpenStep) -> None:
        if step.span is not None:
            self._position = step.span[1]

    def _roll_back(self, step: _OpenStep) -> None:
        self._truncate(self._position)
        self._settle(committed=False)


def grown_slots(config: CacheConfig, current: int, needed: int, most: int) -> int:
    """Return a pool's next size: ``needed`` slots, reached by doubling from ``initial_capacity``, at most ``most``."""
    size = max(current, min(config.initial_capacity, most), 1)
    while size < needed:
        size *= 2
    return min(size, most)
