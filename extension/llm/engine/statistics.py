"""What an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


def rate(tokens: int, seconds: float) -> float:
    """Return tokens per second, to show; 0 where no time was spent."""
    return round(tokens / seconds, 2) if seconds else 0.0


def timings(prompt_tokens: int, prefill_s: float, decode_tokens: int, decode_s: float) -> dict[str, float]:
    """Return an answer's counts, seconds and rates (tokens per second), to show."""
    return {
        "prompt_tokens": prompt_tokens,
        "prefill_s": round(prefill_s, 4),
        "prefill_tokens_per_s": rate(prompt_tokens, prefill_s),
        "decode_tokens": decode_tokens,
        "decode_s": round(decode_s, 4),
        "decode_tokens_per_s": rate(decode_tokens, decode_s),
    }


@dataclass
class Statistics:
    """What an engine has done.

    Attributes:
        steps: forwards.
        prefill_tokens: tokens computed of prompts, and again of preempted sequences.
        shared_tokens: tokens that did not have to be computed for a sequence, since another one had done so.
        new_tokens: tokens generated, stop tokens included.
        prefill_s: seconds of the steps that carried any prefill tokens.
        decode_steps, decode_tokens, decode_s: steps that carried none, the tokens they generated, and their seconds.
        preemptions: sequences that gave their room to older ones.
        most_running: the most sequences of a step.
        most_held: the most tokens that the cache held.
    """

    steps: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    preemptions: int = 0
    most_running: int = 0
    most_held: int = 0

    def summary(self) -> dict[str, float]:
        """Return the figures, and rates in tokens per second."""
        seconds = self.prefill_s + self.decode_s
        rates = {
            "prefill_tokens_per_s": (self.prefill_tokens, self.prefill_s),
            "decode_tokens_per_s": (self.decode_tokens, self.decode_s),
            "new_tokens_per_s": (self.new_tokens, seconds),
        }
        return {
            **{name: round(value, 4) for name, value in vars(self).items()},
            **{name: rate(tokens, over) for name, (tokens, over) in rates.items()},
        }
