"""Chooses a token from logits: the likeliest, or one drawn from the likely ones."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw from so many likeliest tokens; 0 means from all.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum.
        seed: the same seed gives the same tokens; None draws anew each time.

    Raises:
        ValueError: a field is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more"),
        )
        for field, value, is_allowed, allowed in checks:
            if not is_allowed:
                raise ValueError(f"{field}: expected {allowed}, got {value}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


GREEDY = Sampling()
"""Take the likeliest token each time."""


class Sampler:
    """Draws the tokens of one answer. Each depends on the seed and its place in the answer only: whatever else runs
    beside it, and however often a step has to be repeated, the same logits give the same token.

    A draw is a race: every token of the vocabulary gets an exponential time divided by its weight, and the first one
    wins, which it does with a probability in proportion to its weight
    (https://en.wikipedia.org/wiki/Exponential_distribution on the least of exponential variables). So the same numbers
    choose the same token unless two are about to tie: logits differ in their last bits from one batch to the next, and
    where a running sum is compared with one number, thousands of bounds lie that close.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self._sampling.is_greedy

    def choose(self, logits: npt.ArrayLike, place: int) -> int:
        """Return a token.

        Args:
            logits: [vocabulary].
            place: how many tokens the answer has already.

        Raises:
            ValueError: a logit is NaN or inf, or all are -inf.
        """
        scores = np.asarray(logits, dtype=np.float64)
        highest = scores.max()
        if not np.isfinite(highest):
            raise ValueError(f"the model's logits cannot be sampled from: their highest is {highest}")
        if self._sampling.is_greedy:
            return int(scores.argmax())
        times = np.random.default_rng([self._seed, place]).standard_exponential(scores.size)
        tokens = self._candidates(scores)
        with np.errstate(divide="ignore"):
            times = times[tokens] / self._weights(scores[tokens], highest)
        return int(tokens[times.argmin()])

    def _candidates(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Return the tokens to draw from."""
        tokens = self._top_k(scores)
        if self._sampling.top_p == 1:
            return tokens
        weights = self._weights(scores[tokens], scores.max())
        probabilities = weights / weights.sum()
        # All tokens that are less likely than this have less than 1 - top_p together.
        least = min((1 - self._sampling.top_p) / probabilities.size, probabilities.max())
        likely = np.flatnonzero(probabilities >= least)
        likely = likely[np.argsort(-scores[tokens[likely]], kind="stable")]
        # Those before a token have less than top_p together.
        kept = 1 + np.count_nonzero(np.cumsum(probabilities[likely])[:-1] < self._sampling.top_p)
        return tokens[likely[:kept]]

    def _top_k(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Return the likeliest tokens; of equals the lower ones."""
        top_k = self._sampling.top_k
        if not 0 < top_k < scores.size:
            return np.arange(scores.size)
        # Ties with the last of them may lie outside a partition; they are looked at too.
        least = np.partition(scores, scores.size - top_k)[scores.size - top_k]
        tokens = np.flatnonzero(scores >= least)
        return tokens[np.argsort(-scores[tokens], kind="stable")][:top_k]

    def _weights(self, scores: npt.NDArray[np.float64], highest: np.float64) -> npt.NDArray[np.float64]:
        """Return the tokens' probabilities, up to a common factor."""
        weights: npt.NDArray[np.float64] = np.exp((scores - highest) / self._sampling.temperature)
        return weights
