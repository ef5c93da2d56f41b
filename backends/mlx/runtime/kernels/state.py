"""What one run carries besides its tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from executorch_mlx.extension.llm.cache.arguments import host_positions

from ..device import mx
from .rotation import Rotation


class StepState:
    """What one run carries besides its tensors: the cache, and what its layers share."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._host: dict[int, tuple[mx.array, tuple[int, ...]]] = {}
        self._rotations: dict[tuple[Any, ...], tuple[Any, Any, Rotation]] = {}

    def positions(self, slot: int, array: mx.array) -> tuple[int, ...]:
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

    @staticmethod
    def check_indices(array: mx.array, size: int) -> None:
        """Raise IndexError where an input's indices lie outside an axis of this size."""
        indices = np.array(array, copy=False)
        if indices.size and not (-size <= indices.min() and indices.max() < size):
            raise IndexError(
                f"an input holds an index outside {-size}..{size - 1}: it goes from {int(indices.min())} to"
                f" {int(indices.max())} (a token id past the vocabulary, or a row past the step's tokens)"
            )
