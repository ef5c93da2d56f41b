"""A ``sequence`` cache and the naive oracle, fed the same tokens and compared after each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, build

from .arrays import ARRAYS
from .naive_attention import TOLERANCE, NaiveSequence, round_to

Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]


class InjectedError(Exception):
    """Raised by a test in the middle of a step."""


def random_rows(random: np.random.Generator, layer: LayerConfig, num_tokens: int, group: int, dtype: str) -> Rows:
    """Return q, k and v of fresh tokens for a layer, in values of a dtype; ``group`` query heads per key head."""
    heads = layer.n_kv_heads
    shapes = (
        (1, heads * group, num_tokens, layer.head_dim),
        (1, heads, num_tokens, layer.head_dim),
        (1, heads, num_tokens, layer.v_head_dim or layer.head_dim),
    )
    q, k, v = (round_to(dtype, random.standard_normal(shape)) for shape in shapes)
    return q, k, v


class SequencePair:
    """Drives a cache and its oracle together.

    Attributes:
        cache: the cache under test.
        oracle: what judges it.
    """

    def __init__(
        self, backend: str, config: CacheConfig, *, group: int = 2, q_dtype: str = "float32", seed: int = 0
    ) -> None:
        self.arrays = ARRAYS[backend]
        self.config = config
        self.cache: Any = build(backend, "sequence", config)
        self.oracle = NaiveSequence(
            config.capacity,
            [layer.window for layer in config.layers],
            config.max_write,
            kv_dtype=config.kv_dtype,
            q_dtype=q_dtype,
        )
        self.q_dtype = q_dtype
        self._scales = {index: float(layer.head_dim**-0.5) for index, layer in enumerate(config.layers)}
        self._group = group
        self._random = np.random.default_rng(seed)

    @property
    def layers(self) -> range:
        """The layer ids."""
        return range(len(self.config.layers))

    def rows(self, layer: int, num_tokens: int, *, poisoned: bool = False) -> Rows:
        """Return q, k and v of fresh tokens, in values of the query dtype; k and v NaN if poisoned."""
        q, k, v = random_rows(self._random, self.config.layers[layer], num_tokens, self._group, self.q_dtype)
        return (q, np.full_like(k, np.nan), np.full_like(v, np.nan)) if poisoned else (q, k, v)

    def scale(self, layer: int) -> float:
        """Return the softmax scale of a layer (1 for one that does not exist)."""
        return self._scales.get(layer, 1.0)

    def attend(self, layer: int, rows: Rows, positions: Any = None) -> Any:
        """Call the cache alone; positions default to those that are due."""
        if positions is None:
            start = self.oracle.length
            positions = self.arrays.positions(range(start, start + rows[0].shape[2]))
        q, k, v = (self.arrays.floats(part, self.q_dtype) for part in rows)
        return self.cache.attend(layer, positions, q, k, v, self.scale(layer))

    def attend_both(self, layer: int, rows: Rows, positions: Any = None) -> npt.NDArray[np.float32]:
        """Call the cache and the oracle; assert that they agree; return the cache's answer."""
        out = self.attend(layer, rows, positions)
        expected = self.oracle.attend(layer, *rows, self.scale(layer))
        assert self.arrays.dtype_name(out) == self.q_dtype
        answer = self.arrays.numpy(out)
        tolerance = TOLERANCE[self.q_dtype]
        np.testing.assert_allclose(
            answer, expected, rtol=tolerance, atol=tolerance, err_msg=f"layer {layer} at {self.oracle.length}"
        )
        return answer

    def step(
        self,
        num_tokens: int = 1,
        *,
        calls: Iterable[int] | None = None,
        position_dtype: str = "int32",
        column: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """Run one step on both and compare.

        Args:
            num_tokens: tokens of the step.
            calls: layer ids in call order, each at least once; a repeat brings the same k and v and a new q.
            position_dtype: dtype of the positions.
            column: positions [n, 1] instead of [n].

        Returns:
            The cache's answer to each call.
        """
        start = self.oracle.length
        positions = self.arrays.positions(range(start, start + num_tokens), position_dtype, column=column)
        tokens: dict[int, Rows] = {}
        answers = []
        with self.cache.step():
            for layer in self.layers if calls is None else calls:
                q, k, v = self.rows(layer, num_tokens)
                if layer in tokens:
                    _, k, v = tokens[layer]
                tokens[layer] = (q, k, v)
                answers.append(self.attend_both(layer, (q, k, v), positions))
        self.oracle.commit()
        self.check()
        return answers

    def steps(self, sizes: Sequence[int]) -> None:
        """Run several steps on both and compare."""
        for num_tokens in sizes:
            self.step(num_tokens)

    def poison(self, num_tokens: int, calls: Sequence[int]) -> None:
        """Run a step of NaN keys and values on both, that fails after the given layer calls."""
        try:
            with self.cache.step():
                for layer in calls:
                    rows = self.rows(layer, num_tokens, poisoned=True)
                    self.attend(layer, rows)
                    self.oracle.attend(layer, *rows, self.scale(layer))
                raise InjectedError
        except InjectedError:
            self.oracle.abort()
        self.check()

    def rewind(self, position: int) -> bool:
        """Rewind both; assert that they agree on whether it is granted."""
        granted: bool = self.cache.rewind(position)
        assert granted is self.oracle.rewind(position), f"rewind({position}) answered {granted}"
        self.check()
        return granted

    def clear(self) -> None:
        """Clear both."""
        self.cache.clear()
        self.oracle.clear()
        self.check()

    def check(self) -> None:
        """Assert what holds between any two operations."""
        self.cache.check_integrity()
        assert self.cache.position == self.oracle.length
        assert self.cache.max_step == self.oracle.max_step
        assert self.cache.capacity == self.oracle.capacity
        assert not self.cache.in_step
