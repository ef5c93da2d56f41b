"""Generates from an exported language model, one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executorch_mlx.backends.mlx import UPSTREAM_BACKEND_ID, load_program
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, build, layers_from_constants

OnToken = Callable[[int], None]


@dataclass
class Generation:
    """An answer.

    Attributes:
        tokens: new tokens, the stop token not among them.
        finish_reason: "stop" (a stop token), "length" (as many as were asked for, or the context's end).
        prompt_tokens: tokens of the prompt.
        prefill_s: seconds until the first token.
        decode_s: seconds for all later tokens.
        decode_steps: steps after the first token.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0

    def timings(self) -> dict[str, float]:
        """Return counts and rates, tokens per second."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefill_s": round(self.prefill_s, 4),
            "prefill_tokens_per_s": round(self.prompt_tokens / self.prefill_s, 2) if self.prefill_s else 0.0,
            "decode_tokens": self.decode_steps,
            "decode_s": round(self.decode_s, 4),
            "decode_tokens_per_s": round(self.decode_steps / self.decode_s, 2) if self.decode_s else 0.0,
        }


class LanguageModel:
    """An exported model and what it says about itself.

    Attributes:
        max_context: the longest sequence.
        max_step: the most tokens of one step.
    """

    def __init__(self, path: Path) -> None:
        """Load a program.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no program of a language model.
        """
        program = load_program(path)
        constants = program.constants()
        wanted = ("get_kv_heads", "get_head_dims", "get_windows", "get_prefill_chunk_size", "get_max_ctx_len")
        missing = [name for name in wanted if name not in constants]
        if missing:
            raise ValueError(f"{path} is no language model exported by export_llm: it lacks {', '.join(missing)}")
        self._constants = constants
        self._forward = program.load_method("forward")
        self.max_context = int(constants["get_max_ctx_len"])
        self.max_step = int(constants["get_prefill_chunk_size"])

    def new_cache(self, capacity: int, kv_dtype: str = "float32") -> Any:
        """Build a cache for one sequence of up to ``capacity`` tokens."""
        layers = layers_from_constants(self._constants)
        config = CacheConfig(capacity=capacity, layers=layers, kv_dtype=kv_dtype, max_write=self.max_step)
        return build(UPSTREAM_BACKEND_ID, "sequence", config)

    def step(self, tokens: Sequence[int], start: int, rows: Sequence[int]) -> torch.Tensor:
        """Run one step of the active session's sequence.

        Args:
            tokens: at most ``max_step``.
            start: position of the first one.
            rows: which tokens' logits are wanted.

        Returns:
            float32 [rows, vocabulary].
        """
        ids = torch.tensor([list(tokens)])
        position = torch.arange(start, start + len(tokens))
        logits: torch.Tensor = self._forward.execute([ids, position, torch.tensor(list(rows))])[0]
        return logits[0]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        on_token: OnToken = lambda token: None,
        session: CacheSession,
    ) -> Generation:
        """Continue a prompt greedily.

        Args:
            prompt: one or more tokens.
            max_new_tokens: the most tokens to generate.
            stop_ids: tokens that end the answer.
            on_token: called with each new token, the stop token excepted.
            session: an open session; the prompt continues what its cache holds.

        Raises:
            ValueError: an empty prompt, or one that does not fit the cache or the model's context.
        """
        cache = session.control
        start = cache.position
        room = min(cache.capacity, self.max_context) - start
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) > room:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and there is room for {room}: shorten it, or raise --kv-capacity"
                f" (the model's context is {self.max_context})"
            )
        # The last new token is never fed back, so that it needs no room.
        budget = min(max_new_tokens, room - len(prompt) + 1)
        result = Generation(prompt_tokens=len(prompt))
        began = time.perf_counter()
        logits = self._prefill(prompt, start)
        result.prefill_s = time.perf_counter() - began
        position = start + len(prompt)
        while True:
            token = int(logits.argmax())
            if token in stop_ids:
                result.finish_reason = "stop"
                break
            result.tokens.append(token)
            on_token(token)
            if len(result.tokens) >= budget:
                break
            logits = self.step([token], position, [0])[0]
            position += 1
            result.decode_steps += 1
        result.decode_s = time.perf_counter() - began - result.prefill_s
        return result

    def _prefill(self, prompt: Sequence[int], start: int) -> torch.Tensor:
        """Feed a prompt in chunks; return the logits [vocabulary] of its last token."""
        for at in range(0, len(prompt), self.max_step):
            chunk = prompt[at : at + self.max_step]
            logits = self.step(chunk, start + at, [len(chunk) - 1])
        return logits[0]
