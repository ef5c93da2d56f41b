"""Checks of what an attention layer hands to its cache, before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .config import KV_DTYPES, LayerConfig

_FLOATS = (*KV_DTYPES, "float64")


def host_positions(positions: Any) -> tuple[int, ...]:
    """Return positions [n] or [n, 1], of any array library or a sequence, as integers on the host.

    Raises:
        ValueError: another rank, or no token at all.
        TypeError: not integers.
    """
    if type(positions) is tuple and set(map(type, positions)) == {int}:
        return positions
    rows = positions.tolist() if hasattr(positions, "tolist") else positions
    if not isinstance(rows, Sequence):
        raise ValueError(f"positions: expected [n] or [n, 1], got {type(rows).__name__}")
    if not rows:
        raise ValueError("positions: expected one or more, as [n] or [n, 1], got none")
    if isinstance(rows[0], Sequence):
        if any(not isinstance(row, Sequence) or len(row) != 1 or isinstance(row[0], Sequence) for row in rows):
            raise ValueError("positions: expected [n] or [n, 1], got another shape")
        rows = [row[0] for row in rows]
    if any(isinstance(row, bool) or not hasattr(row, "__index__") for row in rows):
        raise TypeError(f"positions: expected integers, got {', '.join(sorted({type(row).__name__ for row in rows}))}")
    return tuple(operator.index(row) for row in rows)


def require_position(verb: str, position: int) -> int:
    """Return a position given to a verb as a plain integer.

    Raises:
        TypeError: no integer.
        ValueError: a negative one.
    """
    index = operator.index(position)
    if index < 0:
        raise ValueError(f"{verb}: expected a position >= 0, got {index}")
    return index


def check_heads(layer: int, config: LayerConfig, num_tokens: int, q: Any, k: Any, v: Any) -> None:
    """Compare q, k and v [1, H, n, D], of any array library, with the layer's configuration.

    Raises:
        ValueError: naming the array, the shape expected and the shape given.
        TypeError: an array that is not of a floating-point type.
    """
    n = num_tokens
    for name, array in (("q", q), ("k", k), ("v", v)):
        dtype = str(array.dtype).rsplit(".", 1)[-1]
        if dtype not in _FLOATS:
            raise TypeError(f"layer {layer}: {name} has type {dtype}, expected one of {', '.join(_FLOATS)}")
    for name, shape, expected in (
        ("k", k.shape, (1, config.n_kv_heads, n, config.head_dim)),
        ("v", v.shape, (1, config.n_kv_heads, n, config.value_dim)),
    ):
        if tuple(shape) != expected:
            raise ValueError(
                f"layer {layer}: {name} has shape {list(shape)}, but the cache's layer and the {n} positions given need"
                f" {list(expected)}: build the cache from the program's own head counts and dims"
            )
    shape = tuple(q.shape)
    heads_fit = len(shape) == 4 and shape[0] == 1 and shape[1] > 0 and shape[1] % config.n_kv_heads == 0
    if not heads_fit or shape[2:] != (n, config.head_dim):
        raise ValueError(
            f"layer {layer}: q has shape {list(shape)}, expected [1, a multiple of {config.n_kv_heads}, {n},"
            f" {config.head_dim}]"
        )
