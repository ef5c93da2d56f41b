"""What a cache is built from: sizes and dtypes, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KV_DTYPES = ("float32", "float16", "bfloat16")


def _require_int(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field}: expected an integer >= {least}, got {value!r}")


@dataclass(frozen=True)
class LayerConfig:
    """One attention layer's cache.

    Attributes:
        n_kv_heads: key and value heads (GQA: fewer than the query heads).
        head_dim: elements of a key.
        v_head_dim: elements of a value; None means ``head_dim``.
        window: a query sees positions above its own minus ``window``; None keeps and sees all history.
    """

    n_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        _require_int("n_kv_heads", self.n_kv_heads, 1)
        _require_int("head_dim", self.head_dim, 1)
        if self.v_head_dim is not None:
            _require_int("v_head_dim", self.v_head_dim, 1)
        if self.window is not None:
            _require_int("window", self.window, 1)

    @property
    def value_dim(self) -> int:
        """Elements of a value: ``v_head_dim`` where given, else ``head_dim``."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


def layers_from_constants(constants: Mapping[str, int | list[int]]) -> list[LayerConfig]:
    """Return the layers that an exported program asks for.

    Args:
        constants: values of its constant methods: ``get_kv_heads``, ``get_head_dims``, ``get_windows`` (0: full
            attention) and, where values are not as wide as keys, ``get_v_head_dims``. ExecuTorch gives a list of one
            number as the number.

    Raises:
        ValueError: the program has no such methods, or they differ in length.
    """
    names = ("get_kv_heads", "get_head_dims", "get_windows")
    missing = [name for name in names if name not in constants]
    if missing:
        raise ValueError(f"the program does not describe its KV caches: it lacks {', '.join(missing)}")
    rows = [constants[name] for name in (*names, "get_v_head_dims") if name in constants]
    columns = [row if isinstance(row, list) else [row] for row in rows]
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"the program's cache descriptions differ in length: {[len(column) for column in columns]}")
    return [
        LayerConfig(heads, dim, v_dims[0] if v_dims else None, window or None)
        for heads, dim, window, *v_dims in zip(*columns, strict=True)
    ]


@dataclass(frozen=True)
class CacheConfig:
    """What every layout is built from.

    Attributes:
        capacity: tokens that may be held: of one sequence in ``sequence``, of all together in the batched layouts.
        layers: one entry per attention layer, in the order of the program's layer ids.
        kv_dtype: storage dtype of keys and values, "float32", "float16" or "bfloat16".
        initial_capacity: slots that a full-history pool starts with; it doubles on demand. Clamped to ``capacity``.
        max_write: the most tokens that one sequence writes in a step, which sizes the rings; None lets each ring take
            its own window, which doubles its memory.
        max_seqs: the most sequences that live at once (batched layouts); None leaves it to the layout.

    Raises:
        ValueError: a field is out of range; the message names it, what was given and what is allowed.
    """

    capacity: int
    layers: Sequence[LayerConfig]
    kv_dtype: str
    initial_capacity: int = 512
    max_write: int | None = None
    max_seqs: int | None = None

    def __post_init__(self) -> None:
        _require_int("capacity", self.capacity, 1)
        _require_int("initial_capacity", self.initial_capacity, 0)
        if self.max_write is not None:
            _require_int("max_write", self.max_write, 1)
        if self.max_seqs is not None:
            _require_int("max_seqs", self.max_seqs, 1)
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        layers = tuple(self.layers) if isinstance(self.layers, Sequence) else ()
        if not layers or not all(isinstance(layer, LayerConfig) for layer in layers):
            raise ValueError(f"layers: expected one or more LayerConfig, got {self.layers!r}")
        object.__setattr__(self, "layers", layers)
