"""One sequence's bookkeeping: layers of any policy under one logical length."""

from __future__ import annotations

from typing import TypeVar

from .arguments import require_position
from .config import CacheConfig
from .errors import CacheFullError, StepError
from .faces import SequenceControl
from .layout import CacheLayout, OpenStep
from .plan import LayerPlan, Mask, Run
from .policies import LayerPolicy, policy_for

SequenceT = TypeVar("SequenceT", bound="SequenceCache")


class SequenceCache(CacheLayout[LayerPlan], SequenceControl):
    """Control and planner of one sequence; a byte layer derives from it and owns the pools.

    Besides ``CacheLayout``'s hooks a byte layer overrides ``_copy_prefix``.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._policies = tuple(policy_for(layer, config) for layer in config.layers)
        limits = [policy.max_write for policy in self._policies if policy.max_write is not None]
        self._max_step = min(limits) if limits else None
        self._position = 0
        # Per layer, one past the last position: that holds this sequence's keys, and that was ever written.
        self._filled = [0] * len(self._policies)
        self._high = [0] * len(self._policies)

    # -- control -----------------------------------------------------------

    @property
    def max_step(self) -> int | None:
        """The most tokens of a step: the least that any ring takes; None without rings."""
        return self._max_step

    @property
    def position(self) -> int:
        """The position that the next token takes; the sequence's length."""
        return self._position

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit."""
        return 0 <= n <= self.capacity - self._position

    def rewind(self, position: int) -> bool:
        """Forget the positions from ``position`` on; see ``SequenceControl.rewind``."""
        self._check_outside_step("rewind")
        position = require_position("rewind", position)
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

    def fork(self: SequenceT, upto: int) -> SequenceT | None:
        """Return an independent cache that holds the positions below ``upto``.

        It keeps this one's retention floor: what its rings have overwritten is gone for the fork, too.

        Returns:
            None where the sequence is shorter, or where keys that a query at ``upto`` needs have been overwritten.
        """
        self._check_outside_step("fork")
        if upto > self._position or not self._retained(upto):
            return None
        fork = type(self)(self.config)
        if upto > 0:
            fork._position = upto
            fork._filled = [min(filled, upto) for filled in self._filled]
            fork._high = list(self._high)
            fork._copy_prefix(self, upto)
        return fork

    def most_slots(self, layer: int) -> int:
        """Return the most slots that a layer's pool may have."""
        return self._policies[layer].slots

    def _invariants(self) -> dict[str, bool]:
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
        return invariants

    # -- for byte layers ---------------------------------------------------

    def _copy_prefix(self: SequenceT, source: SequenceT, upto: int) -> None:
        """Copy the bytes of ``source``'s positions below ``upto`` into this cache, whose pools are still empty."""

    # -- steps -------------------------------------------------------------

    def _check_step(self, positions: tuple[int, ...]) -> None:
        start, num_tokens = self._position, len(positions)
        check_continues(start, positions)
        if start + num_tokens > self.capacity:
            raise CacheFullError(
                f"the cache is full: it holds {start} of {self.capacity} tokens and the step brings {num_tokens};"
                " rewind, clear, or build it with a larger capacity"
            )
        if self._max_step is not None and num_tokens > self._max_step:
            raise StepError(
                f"a step of {num_tokens} tokens: the sliding windows take at most {self._max_step} at a time; split it,"
                " or build the cache with a larger max_write"
            )

    def _plan(self, layer: int, positions: tuple[int, ...]) -> LayerPlan:
        assert self._step is not None
        start, stop = positions[0], positions[-1] + 1
        if self._filled[layer] < start:
            raise StepError(
                f"layer {layer} holds {self._filled[layer]} of the sequence's {start} tokens: an earlier step left this"
                " layer out"
            )
        policy = self._policies[layer]
        first_key = policy.first_visible(start)
        write: tuple[Run, ...] = () if layer in self._step.written else policy.runs(start, stop)
        return LayerPlan(
            layer=layer,
            positions=positions,
            write=write,
            read=policy.runs(first_key, stop),
            first_key=first_key,
            pool_slots=min(stop, policy.slots),
            mask=mask_for(policy, start, stop),
            window=policy.window,
        )

    def _commit(self, plan: LayerPlan) -> None:
        self._high[plan.layer] = max(self._high[plan.layer], plan.stop)
        self._filled[plan.layer] = plan.stop

    # -- inside ------------------------------------------------------------

    def _retained(self, position: int) -> bool:
        layers = zip(self._policies, self._filled, self._high, strict=True)
        return all(filled >= position and policy.retains(position, high) for policy, filled, high in layers)

    def _truncate(self, position: int) -> None:
        self._position = position
        self._filled = [min(filled, position) for filled in self._filled]
        if position == 0:
            self._high = [0] * len(self._policies)

    def _advance(self, step: OpenStep) -> None:
        if step.positions is not None:
            self._position = step.positions[-1] + 1

    def _roll_back(self, step: OpenStep) -> None:
        self._truncate(self._position)


def check_continues(start: int, positions: tuple[int, ...]) -> None:
    """Raise ValueError unless the positions are those from ``start`` on."""
    for expected, given in enumerate(positions, start):
        if given != expected:
            raise ValueError(
                f"position {given} where {expected} was due: the sequence holds {start} tokens, and a step continues it"
                " without gaps or repeats"
            )


def mask_for(policy: LayerPolicy, start: int, stop: int) -> Mask:
    """Return how visibility follows for queries at ``[start, stop)`` that read all that the first one sees."""
    if stop - start == 1:
        return Mask.NONE
    return Mask.CAUSAL if policy.first_visible(stop - 1) <= policy.first_visible(start) else Mask.BAND


def grown_slots(config: CacheConfig, current: int, needed: int, most: int) -> int:
    """Return a pool's next size: ``needed`` slots, reached by doubling, at most ``most``.

    It doubles the ``current`` size, or ``initial_capacity`` where there is no pool yet.
    """
    size = current or max(min(config.initial_capacity, most), 1)
    while size < needed:
        size *= 2
    return min(size, most)
