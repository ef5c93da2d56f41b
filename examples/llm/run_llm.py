"""Run a language model that ``export_llm`` exported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from executorch_mlx.extension.llm.cache import CacheSession
from executorch_mlx.extension.llm.cache.config import KV_DTYPES

from . import command
from .folder import MODEL_FILE
from .generation import Generation, LanguageModel
from .tokenizer import Tokenizer


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.examples.llm.run_llm",
        description="Answer prompts with an exported language model, one after the other.",
    )
    result.add_argument("--model-dir", required=True, type=Path, help="folder written by export_llm")
    result.add_argument(
        "--prompt",
        required=True,
        action="append",
        help="what to answer; give it again for further, unrelated prompts",
    )
    result.add_argument(
        "--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)"
    )
    result.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt in the model's chat template, or continue it as plain text (default: --chat if the model"
        " has a template)",
    )
    result.add_argument(
        "--kv-capacity",
        type=int,
        help="tokens that the KV cache holds (default: what prompt and answer need)",
    )
    result.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="float32",
        help="dtype of the KV cache (default: %(default)s)",
    )
    result.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt and nothing else on stdout"
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    for name in ("max_new_tokens", "kv_capacity"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    if not options.model_dir.is_dir():
        raise FileNotFoundError(f"{options.model_dir}: no such folder; export a model with export_llm first")
    tokenizer = Tokenizer(options.model_dir)
    chat = tokenizer.has_chat_template if options.chat is None else options.chat
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        for prompt in options.prompt
    ]
    model = LanguageModel(options.model_dir / MODEL_FILE)
    for text, prompt in zip(options.prompt, prompts, strict=True):
        _answer(model, tokenizer, text, prompt, options)


def _answer(
    model: LanguageModel, tokenizer: Tokenizer, text: str, prompt: list[int], options: argparse.Namespace
) -> None:
    needed = min(len(prompt) + options.max_new_tokens, model.max_context)
    cache = model.new_cache(options.kv_capacity or needed, options.kv_dtype)
    stream = tokenizer.stream()

    def show(token: int) -> None:
        if not options.json:
            print(stream.push(token), end="", flush=True)

    with CacheSession(cache) as session:
        result = model.generate(
            prompt,
            max_new_tokens=options.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            on_token=show,
            session=session,
        )
    if options.json:
        print(json.dumps(_row(text, result, tokenizer)), flush=True)
    else:
        print()
        timings = result.timings()
        command.console.print(
            f"prefill {result.prompt_tokens} tokens, {timings['prefill_tokens_per_s']} tokens/s; decode"
            f" {result.decode_steps} tokens, {timings['decode_tokens_per_s']} tokens/s ({result.finish_reason})"
        )


def _row(prompt: str, result: Generation, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": tokenizer.decode(result.tokens),
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "timings": result.timings(),
    }


if __name__ == "__main__":
    command.run(main)
