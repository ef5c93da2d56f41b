"""What the delegate needs of a cache on MLX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from ..device import mx


class MLXCache(ABC):
    """The byte layer's face: one virtual ``attend``, and the arrays that a step has changed."""

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """Whether a step is open."""

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """Bracket one forward; see ``CacheControl.step``."""

    @abstractmethod
    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """Append and attend, lazily; see ``CacheLayout.attend``."""

    @abstractmethod
    def release(self) -> list[mx.array]:
        """Return the pools that this step has written since the last call, to be evaluated with the outputs.

        After this call the step's old pools are no longer held, so that their buffers are updated in place. An abort
        then no longer restores bytes; it never has to, since nothing reads beyond a sequence's position.
        """

    @abstractmethod
    def mark_lost(self, reason: str) -> None:
        """Refuse further steps until ``clear()``: evaluation failed."""
