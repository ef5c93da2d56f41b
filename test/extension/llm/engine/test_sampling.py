"""Sampling against transformers' own filters, as distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from executorch_mlx.extension.llm.engine import Sampler, Sampling

DRAWS = 20_000


def reference_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    scores = torch.tensor(logits)[None]
    filters = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    for keep in filters:
        scores = keep(None, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=1),
        Sampling(0.3, seed=2),
        Sampling(2.5, top_k=5, seed=3),
        Sampling(1.0, top_p=0.6, seed=4),
        Sampling(0.8, top_k=12, top_p=0.9, seed=5),
        Sampling(1.0, top_k=1, seed=6),
        Sampling(1.0, top_k=1000, top_p=1e-9, seed=7),
        Sampling(1.0, top_p=1e-17, seed=8),
    ],
    ids=str,
)
def test_drawn_tokens_follow_the_distribution_of_transformers_filters(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).normal(size=40) * 2
    expected = reference_probabilities(logits, sampling)
    sampler = Sampler(sampling)
    counts = np.bincount([sampler.choose(logits, place) for place in range(DRAWS)], minlength=40)
    assert not counts[expected == 0].any()
    # Five standard deviations of a binomial: a wrong probability is seen, chance is not.
    deviation = np.sqrt(expected * (1 - expected) * DRAWS)
    assert (abs(counts - expected * DRAWS) <= 5 * deviation + 1e-9).all()


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 2**32),
)
def test_drawn_token_is_among_the_top_k_and_the_nucleus(
    logits: list[float], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    token = Sampler(Sampling(temperature, top_k, top_p, seed)).choose(logits, 0)
    likelier = [score for score in logits if score > logits[token]]
    assert not top_k or len(likelier) < top_k
    weights = [math.exp((score - max(logits)) / temperature) for score in sorted(logits, reverse=True)]
    weights = weights[: top_k or None]
    assert sum(weights[: len(likelier)]) / sum(weights) < top_p + 1e-9


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    assert Sampler(Sampling()).choose([0.5, 3.0, -1.0, 3.0], 0) == 1


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = np.zeros(1000)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler.choose(logits, place) for place in range(10)]

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=3), Sampling(1.0, top_p=0.95, seed=3)], ids=str)
def test_logits_that_differ_in_their_last_bits_give_the_same_tokens(sampling: Sampling) -> None:
    random = np.random.default_rng(0)
    one, other = Sampler(sampling), Sampler(sampling)
    for place in range(1000):
        logits = random.normal(size=5000).astype(np.float32) * 2
        noise = random.normal(size=5000).astype(np.float32) * 1e-6
        assert one.choose(logits, place) == other.choose(logits + noise, place)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]], ids=str)
def test_logits_that_are_no_scores_are_an_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match="cannot be sampled from"):
        Sampler(Sampling(temperature)).choose(logits, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected 0 or more, got -0.1"),
        ({"temperature": math.nan}, "temperature: expected 0 or more, got nan"),
        ({"temperature": math.inf}, "temperature: expected 0 or more, got inf"),
        ({"top_k": -1}, "top_k: expected 0 or more, got -1"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected more than 0 and at most 1, got 1.1"),
        ({"seed": -3}, "seed: expected 0 or more, got -3"),
    ],
)
def test_option_out_of_range_is_an_error(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
