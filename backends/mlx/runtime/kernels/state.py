"""What one run carries besides its tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from executorch_mlx.extension.llm.cache.arguments import host_positions

from ...program import Tid, Vid
from ...program.flow import MAX_STEPS
from ..device import mx
from .rotation import Rotation

Extent = tuple[Any, Any, int, int]
"""Least and most of indices that were computed, arrays that nothing may have evaluated yet, and their bounds."""


class StepState:
    """What one run carries besides its tensors: the cache, and what its layers share.

    Attributes:
        cache: what attention is computed with.
        reads_inputs: whether indices among the inputs are compared before use, which waits for their numbers; otherwise
            they are treated like computed ones, unless ``know`` has given the numbers.
    """

    def __init__(self, cache: Any, *, reads_inputs: bool = True) -> None:
        self.cache = cache
        self.reads_inputs = reads_inputs
        self._host: dict[Tid | Vid, tuple[mx.array, tuple[int, ...]]] = {}
        self._known_extents: dict[int, tuple[mx.array, tuple[int, int]]] = {}
        self._rotations: dict[tuple[Any, ...], tuple[Any, Any, Rotation]] = {}
        self._confined: dict[tuple[int, int, int], tuple[mx.array, mx.array]] = {}
        self._steps_left = MAX_STEPS
        self.extents: list[Extent] = []

    def know(self, slot: Tid | Vid, array: mx.array, numbers: np.ndarray[Any, Any]) -> None:
        """Note an input's integers, which then are not read from the device."""
        self._host[slot] = (array, tuple(numbers.ravel().tolist()))
        if numbers.size:
            self._known_extents[id(array)] = (array, (int(numbers.min()), int(numbers.max())))

    def can_read(self, array: mx.array) -> bool:
        """Whether ``extent`` may be asked for the integers of an input, or of what is the same numbers."""
        return self.reads_inputs or id(array) in self._known_extents

    def positions(self, slot: Tid | Vid, array: mx.array) -> tuple[int, ...]:
        """Return the integers of the positions in a slot, reading each array once."""
        known = self._host.get(slot)
        if known is None or known[0] is not array:
            known = self._host[slot] = (array, host_positions(array))
        return known[1]

    def rotation(
        self, dims: int, base: float, scale: float, length: int, offset: Any, freqs: mx.array | None
    ) -> Rotation:
        """Return the rotation of these parameters; layers that give the same arrays share it."""
        key = (dims, base, scale, length, id(offset), id(freqs))
        known = self._rotations.get(key)
        if known is None:
            rotation = Rotation(dims, base, scale, length, offset, freqs)
            # The arrays are kept, so that their ids stay theirs.
            known = self._rotations[key] = (offset, freqs, rotation)
        return known[2]

    def extent(self, array: mx.array) -> tuple[int, int]:
        """Return the least and the most of an array's integers, reading each array once."""
        known = self._known_extents.get(id(array))
        if known is None:
            numbers = np.array(array, copy=False)
            known = self._known_extents[id(array)] = (array, (int(numbers.min()), int(numbers.max())))
        return known[1]

    def confined(self, array: mx.array, low: int, high: int) -> mx.array:
        """Return computed indices, those outside of their bounds moved to the nearest; ``extents`` tells of them."""
        if high < low:
            raise IndexError("indices of an axis that has no elements")
        key = (id(array), low, high)
        known = self._confined.get(key)
        if known is None:
            # What is past 63 bits would wrap around, to an index that counts from the end.
            wide = (mx.minimum(array, 2**63 - 1) if array.dtype == mx.uint64 else array).astype(mx.int64)
            self.extents.append((mx.min(wide), mx.max(wide), low, high))
            known = self._confined[key] = (array, mx.clip(wide, low, high))
        return known[1]

    def spend(self, steps: int) -> None:
        """Count instructions that a chain is about to run.

        Raises:
            ValueError: they are more than one run may take.
        """
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ValueError(f"the program's scans take more than {MAX_STEPS} instructions in one run")
