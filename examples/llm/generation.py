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
from executorch_mlx.extension.llm.engine import GREEDY, Sampler, Sampling, timings

_LIMITS = ("get_max_ctx_len", "get_prefill_chunk_size", "get_vocab_size")

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
        return timings(self.prompt_tokens, self.prefill_s, self.decode_steps, self.decode_s)


class LanguageModel:
    """An exported model and what it says about itself.

    Attributes:
        layers: the caches that it needs, by layer id.
        max_context: the longest sequence.
        max_step: the most tokens of one step.
        vocab_size: tokens are from 0 on, below it.
    """

    def __init__(self, path: Path, *, cpu_weights: str = "stored") -> None:
        """Load a program; its methods are loaded when they are first used, and share their weights.

        Args:
            path: the program.
            cpu_weights: see ``load_program``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no program of a language model.
        """
        self._program = load_program(path, cpu_weights=cpu_weights)
        self._greedy_method = "forward_greedy" if "forward_greedy" in self._program.method_names else "forward"
        constants = self._program.constants()
        wanted = ("get_kv_heads", "get_head_dims", "get_windows", *_LIMITS)
        missing = [name for name in wanted if name not in constants]
        if missing:
            raise ValueError(f"{path} is no language model exported by export_llm: it lacks {', '.join(missing)}")
        self.layers = tuple(layers_from_constants(constants))
        self.max_context, self.max_step, self.vocab_size = (int(constants[name]) for name in _LIMITS)

    def new_cache(
        self,
        capacity: int,
        kv_dtype: str = "float32",
        *,
        kind: str = "sequence",
        max_seqs: int | None = None,
        rings: bool = True,
    ) -> Any:
        """Build a cache.

        Args:
            capacity: the most tokens that it holds.
            kv_dtype: "float32", "float16" or "bfloat16".
            kind: "sequence" for one sequence, "batched" and its like for many.
            max_seqs: the most sequences that live at once (batched kinds); None leaves it to the kind.
            rings: keep of a layer with a sliding window the window only; False keeps all, so that any rewind works.

        Raises:
            ValueError: a number out of range.
            LookupError: an unknown kind.
        """
        # A ring that takes a whole sequence in one step keeps the whole sequence.
        max_write = self.max_step if rings else capacity
        config = CacheConfig(capacity, self.layers, kv_dtype, max_write=max_write, max_seqs=max_seqs)
        return build(UPSTREAM_BACKEND_ID, kind, config)

    def prepare(self, *, greedy: bool) -> None:
        """Load the method behind ``step_greedy`` or ``step`` now rather than at its first use."""
        self._program.load_method(self._greedy_method if greedy else "forward")

    def step(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Run one step with the active session's cache.

        Args:
            tokens: at most ``max_step``, of one sequence or, flat, of several.
            positions: each token's position in its sequence.
            rows: which tokens' logits are wanted, one or more.

        Returns:
            float32 [rows, vocabulary].
        """
        return self._run("forward", tokens, positions, rows)

    def step_greedy(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Run one step, as ``step`` does; return the likeliest token that follows each row's."""
        out = self._run(self._greedy_method, tokens, positions, rows)
        likeliest: list[int] = (out.argmax(-1) if out.ndim == 2 else out).tolist()
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
        self.prepare(greedy=sampling.is_greedy)
        advance = self.step_greedy if sampling.is_greedy else self.step
        sampler = Sampler(sampling)

        def choose(tokens: Sequence[int], start: int) -> int:
            (row,) = advance(tokens, _from(start, tokens), [len(tokens) - 1])
            return row if isinstance(row, int) else sampler.choose(row.numpy(), len(result.tokens))

        result = Generation(prompt_tokens=len(prompt))
        began = time.perf_counter()
        try:
            chunks = [prompt[at : at + self.max_step] for at in range(0, len(prompt), self.max_step)]
            for chunk in chunks[:-1]:
                advance(chunk, _from(cache.position, chunk), [0])
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

    def _run(self, method: str, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        inputs = [torch.tensor([list(tokens)]), torch.tensor(list(positions)), torch.tensor(list(rows))]
        result: torch.Tensor = self._program.load_method(method).execute(inputs)[0][0]
        return result


def _from(start: int, tokens: Sequence[int]) -> range:
    return range(start, start + len(tokens))
