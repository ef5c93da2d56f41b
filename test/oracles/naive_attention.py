"""Naive oracles, of one sequence and of many: lists of tokens, and a dense softmax in float64.

It is written from the specification alone and imports nothing of the package it judges.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

# Largest error of an output that was computed in a dtype, absolute and relative, for values of order 1.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def round_to(dtype: str, values: Array) -> Array:
    """Return the float32 values nearest to ``values`` that a dtype can hold (ties to even)."""
    single = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {dtype!r}")
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(single), single, rounded.view(np.float32))


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    query_positions: Sequence[int],
    key_positions: Sequence[int],
    window: int | None,
    scale: float,
) -> npt.NDArray[np.float64]:
    """Attend in float64; only visible keys are read at all.

    Args:
        q: [H_q, n, D].
        k: [H_kv, keys, D]; H_q a multiple of H_kv.
        v: [H_kv, keys, D_v].
        query_positions: the position of each query.
        key_positions: the position of each key, increasing.
        window: how many positions a query sees, its own included; None is all.
        scale: softmax scale.

    Returns:
        [H_q, n, D_v].
    """
    group = q.shape[0] // k.shape[0]
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]))
    for row, position in enumerate(query_positions):
        visible = [
            index
            for index, held in enumerate(key_positions)
            if held <= position and (window is None or held > position - window)
        ]
        for head in range(q.shape[0]):
            keys = k[head // group, visible].astype(np.float64)
            values = v[head // group, visible].astype(np.float64)
            logits = keys @ q[head, row].astype(np.float64) * scale
            weights = np.exp(logits - logits.max())
            out[head, row] = weights @ values / weights.sum()
    return out


@dataclass
class NaiveLayer:
    """One layer's tokens, and what its ring would physically hold.

    Attributes:
        window: the layer's window; None keeps all.
        max_write: the most tokens that a step writes to a ring; unused without a window.
        tokens: (name, key [H_kv, D], value [H_kv, D_v]) per position.
        written_end: one past the last position ever written since the sequence was last empty.
        slots: which token's bytes each slot holds, by name.
    """

    window: int | None
    max_write: int
    tokens: list[tuple[int, Array, Array]] = field(default_factory=list)
    written_end: int = 0
    slots: dict[int, int] = field(default_factory=dict)

    @property
    def ring_size(self) -> int | None:
        """Slots of the ring; None for full history."""
        return None if self.window is None else self.window + self.max_write - 1

    def slot_of(self, position: int) -> int:
        """Return the slot where a position's token is written."""
        return position if self.ring_size is None else position % self.ring_size

    def retains(self, position: int) -> bool:
        """The specification's rule for whether a query at ``position`` still finds its keys."""
        if self.window is None or self.ring_size is None or position == 0 or self.window == 1:
            return True
        return max(0, position - self.window + 1) >= max(0, self.written_end - self.ring_size)

    def holds(self, position: int) -> bool:
        """What that rule stands for: each key that a query at ``position`` sees lies in its slot."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return all(self.slots.get(self.slot_of(j)) == self.tokens[j][0] for j in range(first, position))


class NaiveSequence:
    """One sequence over several layers, with steps that commit or abort."""

    def __init__(
        self,
        capacity: int,
        windows: Sequence[int | None],
        max_write: int | None = None,
        kv_dtype: str = "float32",
        q_dtype: str = "float32",
    ) -> None:
        self.capacity = capacity
        self.layers = [NaiveLayer(window, max_write or window or capacity) for window in windows]
        self.length = 0
        self._kv_dtype = kv_dtype
        self._q_dtype = q_dtype
        self._names = itertools.count()

    @property
    def max_step(self) -> int | None:
        """The most tokens of a step; None without windows."""
        limits = [layer.max_write for layer in self.layers if layer.window is not None]
        return min(limits) if limits else None

    def admits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is legal now."""
        short_enough = self.max_step is None or num_tokens <= self.max_step
        return 1 <= num_tokens <= self.capacity - self.length and short_enough

    def attend(self, layer: int, q: Array, k: Array, v: Array, scale: float) -> npt.NDArray[np.float64]:
        """Write a step's keys and values to a layer, then attend; a repeat in one step only attends.

        Args:
            layer: the layer's index.
            q: [1, H_q, n, D], in values of the query dtype.
            k: [1, H_kv, n, D].
            v: [1, H_kv, n, D_v].
            scale: softmax scale.

        Returns:
            [1, H_q, n, D_v].
        """
        entry, num_tokens = self.layers[layer], q.shape[2]
        if len(entry.tokens) == self.length:
            for row in range(num_tokens):
                name = next(self._names)
                entry.slots[entry.slot_of(len(entry.tokens))] = name
                entry.tokens.append((name, self._stored(k[0, :, row]), self._stored(v[0, :, row])))
            entry.written_end = max(entry.written_end, len(entry.tokens))
        keys = np.stack([key for _, key, _ in entry.tokens], axis=1)
        values = np.stack([value for _, _, value in entry.tokens], axis=1)
        positions = range(self.length, self.length + num_tokens)
        return dense_attention(q[0], keys, values, positions, range(len(entry.tokens)), entry.window, scale)[None]

    def commit(self) -> None:
        """End a step in which every layer was written."""
        (self.length,) = {len(layer.tokens) for layer in self.layers}

    def abort(self) -> None:
        """End a step that failed: the tokens never were, but their slots have been overwritten."""
        self._truncate(self.length)

    def can_rewind(self, position: int) -> bool:
        """Whether ``rewind`` would be granted; the rule and what it stands for must agree."""
        if position > self.length:
            return False
        if position == self.length:
            return True
        by_rule = all(layer.retains(position) for layer in self.layers)
        assert by_rule == all(layer.holds(position) for layer in self.layers), "the retention rule is not exact"
        return by_rule

    def rewind(self, position: int) -> bool:
        """Forget the positions from ``position`` on, if every layer retains what a query there sees."""
        granted = self.can_rewind(position)
        if granted:
            self._truncate(position)
        return granted

    def clear(self) -> None:
        """Forget everything."""
        self._truncate(0)

    def fork(self, position: int) -> NaiveSequence:
        """Return a copy of the positions below ``position``, to which a rewind would be granted."""
        other = copy.copy(self)
        other.layers = [replace(layer, tokens=list(layer.tokens), slots=dict(layer.slots)) for layer in self.layers]
        other._truncate(position)
        return other

    def _stored(self, values: Array) -> Array:
        return round_to(self._q_dtype, round_to(self._kv_dtype, values))

    def _truncate(self, length: int) -> None:
        self.length = length
        for layer in self.layers:
            del layer.tokens[length:]
            if length == 0:
                layer.written_end = 0
                layer.slots.clear()
