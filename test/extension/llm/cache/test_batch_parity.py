"""A batched layout's answer per sequence equals a ``sequence`` cache fed the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, build
from oracles.arrays import ARRAYS
from oracles.batch_pair import COMPOSED_PAGES, KINDS, OTHER_CELLS, SMALL_PAGES
from oracles.sequence_pair import random_rows

# Largest difference, relative and absolute, for values of order 1: both sides round the same softmax once.
BOUND = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}

LAYERS = (
    LayerConfig(n_kv_heads=2, head_dim=8),
    LayerConfig(n_kv_heads=1, head_dim=8, v_head_dim=4, window=5),
    LayerConfig(n_kv_heads=1, head_dim=4, v_head_dim=16, window=1),
)


class Parity:
    """A batched cache beside a ``sequence`` cache per sequence."""

    def __init__(self, backend: str, kind: str, num_seqs: int, dtype: str = "float32") -> None:
        self.arrays, self.dtype = ARRAYS[backend], dtype
        self.random = np.random.default_rng(num_seqs)
        config = CacheConfig(64 * num_seqs, LAYERS, dtype, initial_capacity=8, max_write=7, max_seqs=num_seqs)
        self.batch = build(backend, kind, config)
        self.ids = [self.batch.seq_new() for _ in range(num_seqs)]
        self.single = {
            seq_id: build(backend, "sequence", CacheConfig(64, LAYERS, dtype, 8, max_write=7)) for seq_id in self.ids
        }

    def step(self, ids: Sequence[int]) -> None:
        """Run a step on both and compare, row by row."""
        rows = {seq_id: [row for row, owner in enumerate(ids) if owner == seq_id] for seq_id in dict.fromkeys(ids)}
        positions = np.empty(len(ids), dtype=np.int64)
        for seq_id, its in rows.items():
            start = self.single[seq_id].position
            positions[its] = range(start, start + len(its))
        parts = [random_rows(self.random, layer, len(ids), 2, self.dtype) for layer in LAYERS]
        assert self.batch.declare_step(ids)
        with self.batch.step():
            answers = [self.answer(self.batch, layer, positions, part) for layer, part in enumerate(parts)]
        for seq_id, its in rows.items():
            with self.single[seq_id].step():
                for layer, part in enumerate(parts):
                    taken = tuple(array[:, :, its] for array in part)
                    alone = self.answer(self.single[seq_id], layer, positions[its], taken)
                    np.testing.assert_allclose(
                        answers[layer][:, :, its],
                        alone,
                        rtol=BOUND[self.dtype],
                        atol=BOUND[self.dtype],
                        err_msg=f"sequence {seq_id} on layer {layer}",
                    )

    def answer(self, cache: object, layer: int, positions: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        q, k, v = (self.arrays.floats(part, self.dtype) for part in rows)
        at = self.arrays.positions(positions.tolist())
        out = cache.attend(layer, at, q, k, v, LAYERS[layer].head_dim ** -0.5)  # type: ignore[attr-defined]
        return self.arrays.numpy(out)

    def spans(self, lengths: Sequence[int]) -> list[int]:
        """Return a step with so many tokens of each sequence, in spans that alternate."""
        left, ids = list(lengths), []
        while any(left):
            for index, seq_id in enumerate(self.ids):
                take = min(left[index], int(self.random.integers(1, 5)))
                ids += [seq_id] * take
                left[index] -= take
        return ids

    def run(self, num_steps: int) -> None:
        """Ragged prefills of some and single tokens of others, in the same steps."""
        for _ in range(num_steps):
            lengths = [int(self.random.choice([0, 1, 1, 1, self.random.integers(2, 8)])) for _ in self.ids]
            self.step(self.spans(lengths) or self.ids)
        self.batch.check_integrity()


@pytest.mark.parametrize("num_seqs", range(1, 65))
@pytest.mark.parametrize("kind", ["batched-cell", "batched-sequence"])
def test_batch_of_any_size_on_mlx_equals_single_sequences(kind: str, num_seqs: int) -> None:
    Parity("MLXBackend", kind, num_seqs).run(4)


@pytest.mark.parametrize(
    ("kind", "num_seqs"),
    [
        *((OTHER_CELLS["MLXBackend"], num_seqs) for num_seqs in (1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 48, 64)),
        *((kind, num_seqs) for kind in ("batched-paged", SMALL_PAGES, COMPOSED_PAGES) for num_seqs in (1, 2, 9, 33)),
    ],
)
def test_other_ways_of_reading_on_mlx_equal_single_sequences(kind: str, num_seqs: int) -> None:
    Parity("MLXBackend", kind, num_seqs).run(6)


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 33, 64])
@pytest.mark.parametrize("kind", ["batched", *KINDS["eager"]])
def test_batch_in_eager_torch_equals_single_sequences(kind: str, num_seqs: int) -> None:
    Parity("eager", kind, num_seqs).run(4)


@pytest.mark.parametrize("num_seqs", [1, 4, 17])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for backend, kinds in KINDS.items() for kind in kinds],
)
def test_batch_in_half_precision_equals_single_sequences(backend: str, kind: str, dtype: str, num_seqs: int) -> None:
    Parity(backend, kind, num_seqs, dtype).run(6)


@pytest.mark.parametrize("kind", KINDS["MLXBackend"])
def test_batch_past_a_rounded_extent_equals_single_sequences(kind: str) -> None:
    """A masked read's end is rounded up to 256 cells: cross it, and the growth of the pools with it."""
    parity = Parity("MLXBackend", kind, 24)
    for _ in range(4):
        parity.step(parity.spans([7] * 24))
    parity.run(12)
