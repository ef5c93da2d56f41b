"""Answer many prompts at once with an exported language model: continuous batching over any batched KV cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from executorch_mlx.extension.llm.engine import Completion, Engine, Request

from . import command, flags
from .answers import Answers, Display, totals
from .folder import MODEL_FILE
from .generation import LanguageModel
from .prompts import Prompt, read_prompts
from .tokenizer import Tokenizer


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.examples.llm.run_llm_batched",
        description="Answer many prompts at once with an exported language model. Answers are printed in the prompts'"
        " order, each as soon as those before it are complete.",
    )
    flags.add_model(result)
    flags.add_cpu_weights(result)
    result.add_argument("--prompt", default=[], action="append", help="what to answer; give it again for more prompts")
    result.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts to answer: one per line; or, in a .jsonl, .ndjson or .json file, an object per line with the keys"
        " prompt, system, chat, max_new_tokens, temperature, top_k, top_p, seed, n and stop, which override the flags",
    )
    flags.add_sampling(result)
    result.add_argument(
        "--stop", default=[], action="append", help="a text that ends an answer; give it again for more of them"
    )
    result.add_argument(
        "--n", type=int, default=1, help="samples of each prompt, drawn with seed, seed + 1, ... (default: %(default)s)"
    )
    result.add_argument(
        "--system", help="system prompt of all prompts, computed once (with --no-chat: text before each prompt)"
    )
    flags.add_chat(result)
    result.add_argument(
        "--cache-kind",
        default="batched",
        help="how the KV cache holds many sequences: batched, batched-paged, batched-cell, batched-sequence or a"
        " registered one (default: %(default)s)",
    )
    result.add_argument(
        "--max-seqs", type=int, default=32, help="most answers under way at once (default: %(default)s)"
    )
    flags.add_cache(
        result, capacity="what the prompts and limits need; memory grows as it fills", windows="as the program masks it"
    )
    result.add_argument(
        "--step-tokens",
        type=int,
        help="most tokens of a step; fewer make running answers wait less for arriving prompts (default: the program's"
        " limit)",
    )
    result.add_argument(
        "--json", action="store_true", help="print one JSON object per answer and nothing else on stdout"
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    flags.require_positive(options, "max_new_tokens", "n", "max_seqs", "kv_capacity", "step_tokens")
    prompts = [Prompt(text, f"prompt {number}") for number, text in enumerate(options.prompt, 1)]
    if options.prompts is not None:
        prompts += read_prompts(options.prompts)
    if not prompts:
        raise ValueError("nothing to answer: give --prompt, or --prompts with a file")
    flags.require_model(options.model_dir)
    flags.require_batched(options.cache_kind)
    tokenizer = Tokenizer(options.model_dir)
    requests = [prompt.request(vars(options), tokenizer) for prompt in prompts]
    model = LanguageModel(options.model_dir / MODEL_FILE, cpu_weights=options.cpu_weights)
    prefixes = _system_prefixes(prompts, requests, options, tokenizer)
    cache = model.new_cache(
        options.kv_capacity or _needed_capacity(model, requests, prefixes, options.max_seqs),
        options.kv_dtype,
        kind=options.cache_kind,
        max_seqs=options.max_seqs + len(prefixes),
        rings=options.kv_windows == "program",
    )
    engine = Engine(model, cache, tokenizer=tokenizer, step_tokens=options.step_tokens, max_running=options.max_seqs)
    with command.console.status("load the model"):
        for greedy in {request.sampling.is_greedy for request in requests}:
            model.prepare(greedy=greedy)
    answers = Answers(is_json=options.json)
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
        answers.add(number, prompt.text, _submit(engine, request))
    for prefix in prefixes:
        # One that is too long begins no prompt that could be answered.
        if len(prefix) <= min(cache.capacity, model.max_context):
            engine.keep(prefix)
    seconds = _answer_all(engine, Display(engine, cache, answers), answers)
    running_on = (
        f"KV cache: {options.cache_kind}, {options.kv_dtype}, {cache.capacity:,} tokens; MLX on {command.device()}"
    )
    command.console.print(
        f"{totals(engine.statistics, seconds)}\n{running_on}", style="dim", markup=False, soft_wrap=True
    )
    answers.raise_if_incomplete()


def _answer_all(engine: Engine, display: Display, answers: Answers) -> float:
    """Step until all is answered or Ctrl-C is pressed; print what there is, whatever happens; return the seconds."""
    began = time.perf_counter()
    with command.DeferredInterrupt() as interrupt:
        try:
            with display:
                while engine.has_work and not interrupt.is_pending:
                    engine.step()
                    display.show()
        finally:
            engine.close()
            answers.print_rest()
    return time.perf_counter() - began


def _system_prefixes(
    prompts: Sequence[Prompt], requests: Sequence[Request], options: argparse.Namespace, tokenizer: Tokenizer
) -> list[list[int]]:
    """Return the common beginning of the prompts of each system text that several prompts have."""
    groups: dict[object, list[Sequence[int]]] = {}
    for prompt, request in zip(prompts, requests, strict=True):
        system, chat = (prompt.settings.get(name, getattr(options, name)) for name in ("system", "chat"))
        if system is not None:
            is_chat = tokenizer.has_chat_template if chat is None else chat
            groups.setdefault((system, is_chat), []).append(request.prompt)
    prefixes = [_common(group) for group in groups.values() if len(group) > 1]
    return [prefix for prefix in prefixes if prefix]


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all rows begin with."""
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))]


def _needed_capacity(
    model: LanguageModel, requests: Sequence[Request], prefixes: Sequence[Sequence[int]], max_seqs: int
) -> int:
    """Return the tokens that the largest answers hold side by side."""
    needs = sorted(
        min(len(request.prompt) + request.max_new_tokens, model.max_context)
        for request in requests
        for _ in range(request.n)
    )
    return sum(needs[-max_seqs:]) + sum(map(len, prefixes))


def _submit(engine: Engine, request: Request) -> tuple[Completion, ...]:
    """Ask the engine; what it can never answer becomes an answer that says so."""
    try:
        return engine.submit(request)
    except ValueError as error:
        return (Completion(request, finish_reason="error", error=str(error)),)


if __name__ == "__main__":
    command.run(main)
