"""Run a language model that ``export_llm`` exported: answer prompts, or hold a conversation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from executorch_mlx.extension.llm.cache import CacheSession
from executorch_mlx.extension.llm.engine import Sampling

from . import command, flags
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
    flags.add_model(result)
    flags.add_cpu_weights(result)
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
    flags.add_sampling(result)
    flags.add_chat(result)
    flags.add_cache(
        result,
        capacity="what prompt and answer need; with --interactive the model's context; memory grows as it fills",
        windows="so that any /undo works without computing the conversation anew",
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
    flags.require_positive(options, "max_new_tokens", "kv_capacity")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    if not options.prompt and not options.interactive:
        raise ValueError("nothing to answer: give --prompt, or --interactive for a conversation")
    flags.require_model(options.model_dir)
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
            self._model = LanguageModel(options.model_dir / MODEL_FILE, cpu_weights=options.cpu_weights)

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
        return (
            f"KV cache: {layers} layers, {self._options.kv_dtype}, {cache.pool_bytes / 1e6:.1f} MB, {cache.position} of"
            f" {cache.capacity} tokens; MLX on {command.device()}"
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
