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

from .sampling import Sampler, Sampling

GREEDY = Sampling()

OnToken = Callable[[int], None]


@dataclass
class Generation:
    """An answer.

    Attributes:
        tokens: new tokens, the stop token not among them.
        finish_reason: "stop" (a stop token), "length" (as many as were asked for, or the context's end) or
            "interrupted" (Ctrl-C).
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
        layers: the caches that it needs, by layer id.
        max_context: the longest sequence.
        max_step: the most tokens of one step.
    """

    def __init__(self, path: Path) -> None:
        """Load a program; its methods are loaded when they are first used, and share their weights.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no program of a language model.
        """
        self._program = load_program(path)
        constants = self._program.constants()
        wanted = ("get_kv_heads", "get_head_dims", "get_windows", "get_prefill_chunk_size", "get_max_ctx_len")
        missing = [name for name in wanted if name not in constants]
        if missing:
            raise ValueError(f"{path} is no language model exported by export_llm: it lacks {', '.join(missing)}")
        self.layers = tuple(layers_from_constants(constants))
        self.max_context = int(constants["get_max_ctx_len"])
        self.max_step = int(constants["get_prefill_chunk_size"])

    def new_cache(self, capacity: int, kv_dtype: str = "float32", *, rings: bool = True) -> Any:
        """Build a cache for one sequence.

        Args:
            capacity: the most tokens of the sequence.
            kv_dtype: "float32", "float16" or "bfloat16".
            rings: keep of a layer with a sliding window the window only; False keeps all, so that any rewind works.
        """
        # A ring that takes a whole sequence in one step keeps the whole sequence.
        max_write = self.max_step if rings else capacity
        config = CacheConfig(capacity=capacity, layers=self.layers, kv_dtype=kv_dtype, max_write=max_write)
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
        return self._run("forward", tokens, start, rows)

    def step_greedy(self, tokens: Sequence[int], start: int, rows: Sequence[int]) -> list[int]:
        """Run one step, as ``step`` does; return the likeliest token that follows each row's."""
        likeliest: list[int] = self._run("forward_greedy", tokens, start, rows).tolist()
        return likeliest

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        sampling: Sampling = GREEDY,
        on_token: OnToken = lambda token: None,
        session: CacheSession,
    ) -> Generation:
        """Continue a prompt. Ctrl-C ends the answer early; what the cache then holds is a whole number of tokens.

        Args:
            prompt: one or more tokens.
            max_new_tokens: the most tokens to generate.
            stop_ids: tokens that end the answer.
            sampling: how tokens are chosen.
            on_token: called with each new token, the stop token excepted.
            session: an open session; the prompt continues what its cache holds.

        Raises:
            ValueError: an empty prompt, or one that does not fit the cache or the model's context.
        """
        cache = session.control
        room = min(cache.capacity, self.max_context) - cache.position
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) > room:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and there is room for {room}: shorten it, or raise --kv-capacity"
                f" (the model's context is {self.max_context})"
            )
        # The last new token is never fed back, so that it needs no room.
        budget = min(max_new_tokens, room - len(prompt) + 1)
        method, choose = self._chooser(sampling)
        result = Generation(prompt_tokens=len(prompt))
        began = time.perf_counter()
        try:
            chunks = [prompt[at : at + self.max_step] for at in range(0, len(prompt), self.max_step)]
            for chunk in chunks[:-1]:
                self._run(method, chunk, cache.position, [0])
            token = choose(chunks[-1], cache.position)
            result.prefill_s = time.perf_counter() - began
            while token not in stop_ids:
                result.tokens.append(token)
                on_token(token)
                if len(result.tokens) >= budget:
                    break
                token = choose([token], cache.position)
                result.decode_steps += 1
            else:
                result.finish_reason = "stop"
        except KeyboardInterrupt:
            result.finish_reason = "interrupted"
        total = time.perf_counter() - began
        result.prefill_s = result.prefill_s or total
        result.decode_s = total - result.prefill_s
        return result

    def _chooser(self, sampling: Sampling) -> tuple[str, Callable[[Sequence[int], int], int]]:
        """Return a method, loaded, and a function that feeds it tokens from a position on and chooses the next."""
        if sampling.is_greedy and "forward_greedy" in self._program.method_names:
            self._program.load_method("forward_greedy")
            return "forward_greedy", lambda tokens, start: self.step_greedy(tokens, start, [len(tokens) - 1])[0]
        self._program.load_method("forward")
        sampler = Sampler(sampling)
        return "forward", lambda tokens, start: sampler.choose(self.step(tokens, start, [len(tokens) - 1])[0].numpy())

    def _run(self, method: str, tokens: Sequence[int], start: int, rows: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        position = torch.arange(start, start + len(tokens))
        outputs = self._program.load_method(method).execute([ids, position, torch.tensor(list(rows))])
        result: torch.Tensor = outputs[0][0]
        return result
