"""Rotary embedding whose angles are computed once per step."""

from __future__ import annotations

from typing import Any

from ..device import mx


class Rotation:
    """Rotary embedding of pairs (i, i + dims / 2), for the positions of a step: its cosines and signed sines."""

    def __init__(self, dims: int, base: float, scale: float, length: int, offset: Any, freqs: mx.array | None) -> None:
        """Compute them, [B or 1, 1, length, dims]; see ``mx.fast.rope``, of whose terms these are."""
        self._half = dims // 2
        if freqs is None:
            freqs = mx.power(base, mx.arange(self._half, dtype=mx.float32) * (2.0 / dims))
        starts = mx.reshape(mx.array(offset, dtype=mx.float32), (-1, 1, 1, 1))
        positions = (starts + mx.arange(length, dtype=mx.float32)[:, None]) * scale
        angles = positions / freqs.astype(mx.float32)
        cosines, sines = mx.cos(angles), mx.sin(angles)
        self._cosines = mx.concatenate([cosines, cosines], axis=-1)
        self._sines = mx.concatenate([-sines, sines], axis=-1)

    def apply(self, x: mx.array) -> mx.array:
        """Rotate the first ``dims`` of the last axis of [B, H, length, D]."""
        half, dims = self._half, 2 * self._half
        low, high = x[..., :half], x[..., half:dims]
        whole = x if x.shape[-1] == dims else x[..., :dims]
        rotated = (whole * self._cosines + mx.concatenate([high, low], axis=-1) * self._sines).astype(x.dtype)
        return rotated if whole is x else mx.concatenate([rotated, x[..., dims:]], axis=-1)
