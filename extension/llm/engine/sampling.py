"""Chooses a token from logits: the likeliest, or one drawn from the likely ones."""

from __future__ import annotations

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
    """Draws tokens; each draw takes one number from the sampler's own generator, whatever else runs beside it."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self._sampling.is_greedy

    def choose(self, logits: npt.ArrayLike) -> int:
        """Return a token.

        Args:
            logits: [vocabulary].

        Raises:
            ValueError: a logit is NaN or inf, or all are -inf.
        """
        scores = np.asarray(logits, dtype=np.float64)
        highest = scores.max()
        if not np.isfinite(highest):
            raise ValueError(f"the model's logits cannot be sampled from: their highest is {highest}")
        if self._sampling.is_greedy:
            return int(scores.argmax())
        tokens = self._candidates(scores)
        probabilities = np.exp((scores[tokens] - highest) / self._sampling.temperature)
        cumulative = np.cumsum(probabilities / probabilities.sum())
        # Those before a token have less than top_p together.
        kept = 1 + int(np.count_nonzero(cumulative[:-1] < self._sampling.top_p))
        drawn = self._random.random() * cumulative[kept - 1]
        return int(tokens[min(np.searchsorted(cumulative[:kept], drawn, side="right"), kept - 1)])

    def _candidates(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Return the tokens to draw from, likeliest first; of equals the lower one."""
        top_k = self._sampling.top_k
        if not 0 < top_k < scores.size:
            return np.argsort(-scores, kind="stable")
        # Ties with the last of them may lie outside a partition; they are looked at too.
        least = np.partition(scores, scores.size - top_k)[scores.size - top_k]
        tokens = np.flatnonzero(scores >= least)
        return tokens[np.argsort(-scores[tokens], kind="stable")][:top_k]
