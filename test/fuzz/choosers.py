"""Where the fuzzer's choices come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Chooser(Protocol):
    """Where choices come from: a seed, or hypothesis, which makes them smaller once a test fails."""

    def below(self, count: int) -> int:
        """Return one of 0..count - 1; 0 is the plainest."""

    def pick(self, items: Sequence[T]) -> T:
        """Return one of these; the first is the plainest."""

    def chance(self, percent: int) -> bool:
        """Return True so often; False is the plainest."""


class SeededChooser:
    """Choices that follow from a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        return self._random.random() * 100 < percent


class DrawnChooser:
    """Choices that hypothesis makes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent
