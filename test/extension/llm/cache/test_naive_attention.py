"""The oracle itself: against torch's dense attention and rounding, and the retention examples by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oracles.naive_attention import NaiveSequence, dense_attention, round_to


def token() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2))


def decoded(num_tokens: int, window: int, max_write: int) -> NaiveSequence:
    sequence = NaiveSequence(32, [window], max_write)
    for _ in range(num_tokens):
        sequence.attend(0, *token(), 1.0)
        sequence.commit()
    return sequence


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("start", [0, 6])
def test_dense_attention_equals_torchs(window: int | None, start: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal(shape) for shape in ((6, 4, 8), (2, start + 4, 8), (2, start + 4, 5)))
    queries = torch.arange(start, start + 4)[:, None]
    keys = torch.arange(start + 4)[None, :]
    visible = (keys <= queries) & (keys > queries - (window or 99))
    expected = F.scaled_dot_product_attention(
        *(torch.from_numpy(part)[None] for part in (q, k, v)), attn_mask=visible, scale=0.3, enable_gqa=True
    )
    out = dense_attention(q, k, v, range(start, start + 4), range(start + 4), window, 0.3)
    np.testing.assert_allclose(out, expected[0].numpy(), rtol=1e-12, atol=1e-12)


def test_dense_attention_with_nan_in_keys_that_no_query_sees_is_finite() -> None:
    k = np.ones((1, 6, 2))
    k[:, :2] = k[:, 5:] = np.nan
    assert np.isfinite(dense_attention(np.ones((1, 1, 2)), k, k, [4], range(6), 3, 1.0)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_to_equals_torchs_conversion(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:4] = [0.0, -0.0, np.nan, 1 + 2**-8]
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(round_to(dtype, values), expected)


@pytest.mark.parametrize(
    ("window", "max_write", "written", "position", "granted"),
    [
        (4, 1, 10, 9, True),
        (4, 1, 10, 8, False),
        (2, 1, 3, 1, False),
        (2, 1, 3, 0, True),
        (4, 2, 12, 11, True),
        (4, 2, 12, 10, True),
        (4, 2, 12, 9, False),
        (1, 1, 9, 2, True),
    ],
)
def test_naive_sequence_rewinds_as_the_specifications_examples(
    window: int, max_write: int, written: int, position: int, granted: bool
) -> None:
    assert decoded(written, window, max_write).rewind(position) is granted


def test_naive_sequence_after_an_abort_remembers_what_was_overwritten() -> None:
    sequence = decoded(10, 4, 2)
    assert sequence.can_rewind(9)
    sequence.attend(0, *(np.repeat(part, 2, axis=2) for part in token()), 1.0)
    sequence.abort()
    assert sequence.length == 10
    assert not sequence.can_rewind(9)
