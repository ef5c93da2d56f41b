"""Run a language model that ``export_llm`` exported: answer prompts, or hold a conversation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from executorch_mlx.backends.mlx import backend_info
from executorch_mlx.extension.llm.cache import CacheSession
from executorch_mlx.extension.llm.cache.config import KV_DTYPES
from executorch_mlx.extension.llm.engine import Sampling

from . import command
from .conversation import Conversation
from .folder import MODEL_FILE
from .generation import Generation, LanguageModel
from .interactive import converse
from .tokenizer import TextStream, Tokenizer


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.examples.llm.run_llm",
        description="Answer prompts with an exported language model, one after the other, or hold a conversation.",
    )
    result.add_argument("--model-dir", required=True, type=Path, help="folder written by export_llm")
    result.add_argument(
        "--prompt",
        default=[],
        action="append",
        help="what to answer; give it again for further, unrelated prompts (with --interactive: for the first turns)",
    )
    result.add_argument(
        "--interactive",
        action="store_true",
        help="hold a conversation: answer lines from the standard input; /help lists the commands",
    )
    result.add_argument(
        "--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)"
    )
    result.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token each time (default: %(default)s)"
    )
    result.add_argument(
        "--top-k", type=int, default=0, help="draw from so many likeliest tokens; 0: from all (default: %(default)s)"
    )
    result.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the fewest likeliest tokens whose probabilities reach this sum (default: %(default)s)",
    )
    result.add_argument("--seed", type=int, help="draw the same tokens each time (default: others each time)")
    result.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt in the model's chat template, or continue it as plain text (default: --chat if the model"
        " has a template)",
    )
    result.add_argument(
        "--kv-capacity",
        type=int,
        help="tokens that the KV cache holds (default: what prompt and answer need; with --interactive the model's"
        " context; memory grows as it fills)",
    )
    result.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="float32",
        help="dtype of the KV cache (default: %(default)s)",
    )
    result.add_argument(
        "--kv-windows",
        choices=("program", "none"),
        default="program",
        help="program: of a layer with a sliding window keep the window only, in a ring; none: keep all, so that any"
        " /undo works without computing the conversation anew (default: %(default)s)",
    )
    result.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt and nothing else on stdout",
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    for name in ("max_new_tokens", "kv_capacity"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    if not options.prompt and not options.interactive:
        raise ValueError("nothing to answer: give --prompt, or --interactive for a conversation")
    if not options.model_dir.is_dir():
        raise FileNotFoundError(f"{options.model_dir}: no such folder; export a model with export_llm first")
    runner = _Runner(options, sampling)
    if options.interactive:
        runner.converse()
    else:
        runner.answer_each()


class _Runner:
    """The model, and how its answers are shown."""

    def __init__(self, options: argparse.Namespace, sampling: Sampling) -> None:
        self._options = options
        self._sampling = sampling
        self._tokenizer = Tokenizer(options.model_dir)
        self._chat: bool = self._tokenizer.has_chat_template if options.chat is None else options.chat
        # Prompts that cannot be encoded are refused before the model is loaded.
        self._prompts = [self._encode(prompt) for prompt in options.prompt]
        with command.console.status("load the model"):
            self._model = LanguageModel(options.model_dir / MODEL_FILE)

    def answer_each(self) -> None:
        """Answer unrelated prompts, each with a cache of its own."""
        options = self._options
        for text, prompt in zip(options.prompt, self._prompts, strict=True):
            needed = min(len(prompt) + options.max_new_tokens, self._model.max_context)
            cache = self._new_cache(options.kv_capacity or needed)
            with CacheSession(cache) as session:
                generate = partial(
                    self._model.generate, prompt, stop_ids=self._tokenizer.stop_ids, session=session, **self._how()
                )
                result = self._answer(text, generate, cache)
            if result.finish_reason == "interrupted":
                raise KeyboardInterrupt

    def converse(self) -> None:
        """Hold one conversation."""
        options = self._options
        cache = self._new_cache(options.kv_capacity or self._model.max_context)
        with CacheSession(cache) as session:
            conversation = Conversation(self._model, self._tokenizer, session, chat=self._chat)

            def answer(text: str) -> None:
                self._answer(text, partial(conversation.ask, text, **self._how()), cache)

            for text in options.prompt:
                answer(text)
            converse(conversation, answer, lambda: self._describe(cache), prompt="" if options.json else "> ")

    def _how(self) -> dict[str, Any]:
        return {"max_new_tokens": self._options.max_new_tokens, "sampling": self._sampling}

    def _answer(self, text: str, generate: Callable[..., Generation], cache: Any) -> Generation:
        """Show an answer as it comes; Ctrl-C ends it after the prompt or the token that is under way."""
        shown = _Shown(self._tokenizer, is_json=self._options.json)
        with command.DeferredInterrupt() as interrupt:

            def show(token: int) -> None:
                shown.push(token)
                interrupt.check()

            result = generate(on_token=show)
            if interrupt.is_pending:
                result.finish_reason = "interrupted"
        shown.finish(text, result, self._describe(cache))
        return result

    def _encode(self, prompt: str) -> list[int]:
        if self._chat:
            return self._tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return self._tokenizer.encode(prompt)

    def _new_cache(self, capacity: int) -> Any:
        options = self._options
        return self._model.new_cache(capacity, options.kv_dtype, rings=options.kv_windows == "program")

    def _describe(self, cache: Any) -> str:
        """Say what runs: the cache's layers and bytes, and MLX's device."""
        windowed = sum(layer.window is not None for layer in self._model.layers)
        rings = windowed if self._options.kv_windows == "program" else 0
        kinds = {"flat": len(self._model.layers) - rings, "ring": rings}
        layers = " and ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
        info = backend_info()
        device = f"{info.device}, {info.blas}" if info.blas else info.device
        return (
            f"KV cache: {layers} layers, {self._options.kv_dtype}, {cache.pool_bytes / 1e6:.1f} MB, {cache.position} of"
            f" {cache.capacity} tokens; MLX on {device}"
        )


class _Shown:
    """One answer on the standard output, as it comes or as a JSON object."""

    def __init__(self, tokenizer: Tokenizer, *, is_json: bool) -> None:
        self._tokenizer = tokenizer
        self._stream: TextStream | None = None if is_json else tokenizer.stream()

    def push(self, token: int) -> None:
        """Show a token's text."""
        if self._stream is not None:
            print(self._stream.push(token), end="", flush=True)

    def finish(self, prompt: str, result: Generation, running_on: str) -> None:
        """End the answer."""
        timings = result.timings()
        if self._stream is None:
            row = {
                "prompt": prompt,
                "text": self._tokenizer.decode(result.tokens),
                "tokens": result.tokens,
                "finish_reason": result.finish_reason,
                "timings": timings,
            }
            print(json.dumps(row), flush=True)
            return
        print()
        command.console.print(
            f"prefill {result.prompt_tokens} tokens, {timings['prefill_tokens_per_s']} tokens/s; decode"
            f" {result.decode_steps} tokens, {timings['decode_tokens_per_s']} tokens/s ({result.finish_reason})\n"
            f"{running_on}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    command.run(main)
