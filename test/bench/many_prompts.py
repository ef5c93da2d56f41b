"""Many prompts: one batch against one after the other and against mlx-lm, on the same weights, dtype and device.

Prompts are ragged, share no beginning, and get equally many new tokens; a rate is all new tokens over the whole time,
prompts included. Each contender runs in a process of its own; one works at a time, in turns. Figures are medians over
the turns. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from common import Workers, machine, run, serve, write_section

ALONE = "executorch-mlx, one after the other"
SLOW = "mlx-lm, as installed"
KINDS = ("batched-paged", "batched-sequence", "batched-cell")
PROMPT_TOKENS = (16, 64)
"""The shortest and the longest prompt."""

# A contender takes prompts and a number of new tokens of each, and returns the new tokens.
Generate = Callable[[list[list[int]], int], list[list[int]]]


# -- contenders -------------------------------------------------------------------


def _model(folder: Path) -> Any:
    from executorch_mlx.examples.llm.folder import MODEL_FILE
    from executorch_mlx.examples.llm.generation import LanguageModel

    model = LanguageModel(folder / "pte" / MODEL_FILE)
    model.prepare(greedy=True)
    return model


def alone(folder: Path) -> Generate:
    from executorch_mlx.extension.llm.cache import CacheSession

    model = _model(folder)

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            with CacheSession(model.new_cache(len(prompt) + new)) as session:
                answers.append(model.generate(prompt, max_new_tokens=new, session=session).tokens)
        return answers

    return generate


def engine(kind: str) -> Callable[[Path], Generate]:
    def load(folder: Path) -> Generate:
        from executorch_mlx.extension.llm.engine import Engine, Request

        model = _model(folder)

        def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
            capacity = sum(len(prompt) + new for prompt in prompts)
            batch = Engine(model, model.new_cache(capacity, kind=kind))
            answers = [batch.submit(Request(prompt, new))[0] for prompt in prompts]
            for _ in batch.run():
                pass
            return [answer.tokens for answer in answers]

        return generate

    return load


def mlx_lm(folder: Path) -> Generate:
    from mlx_lm.generate import batch_generate
    from mlx_lm.utils import load_model

    model, _ = load_model(folder / "hf")

    class NoStop:
        """A tokenizer whose answers end with their length only."""

        eos_token_ids = frozenset()

        def decode(self, ids: list[int]) -> str:
            return ""

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        answers: list[list[int]] = batch_generate(
            model, NoStop(), prompts, max_tokens=new, return_token_ids=True
        ).token_ids
        return answers

    return generate


def mlx_lm_same_blas(folder: Path) -> Generate:
    from executorch_mlx.backends.mlx.runtime.blas import install_blas

    install_blas()
    return mlx_lm(folder)


CONTENDERS: dict[str, Callable[[Path], Generate]] = {
    ALONE: alone,
    **{f"executorch-mlx, {kind}": engine(kind) for kind in KINDS},
    "mlx-lm, with our BLAS": mlx_lm_same_blas,
    SLOW: mlx_lm,
}


# -- worker and parent ----------------------------------------------------------------


def work(name: str, folder: Path) -> None:
    """Serve turns: seconds of a batch, and the tokens generated."""
    generate = CONTENDERS[name](folder)

    def turn(request: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(request["batch"])
        lengths = [draw.randint(*PROMPT_TOKENS) for _ in range(request["batch"])]
        prompts = [[draw.randrange(100, 40000) for _ in range(length)] for length in lengths]
        began = time.perf_counter()
        tokens = generate(prompts, request["new"])
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    turn({"batch": 2, "new": 2})
    serve(turn)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Let the contenders take turns; return new tokens per second by contender and batch size."""
    cases = [(name, batch) for batch in options.batch for name in CONTENDERS if name != SLOW or batch == options.slow]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    first: dict[int, Any] = {}
    with Workers(__file__, list(CONTENDERS), folder) as workers:
        for turn, (name, batch) in product(range(options.turns), cases):
            if name == SLOW and turn > 0:
                continue
            print(f"turn {turn + 1} of {options.turns}: {name}, {batch} prompts", file=sys.stderr)
            answer = workers.ask(name, {"batch": batch, "new": options.new})
            rates[name, batch].append(batch * options.new / answer["seconds"])
            if answer["tokens"] != first.setdefault(batch, answer["tokens"]):
                print(f"note: {name} chose other tokens than {ALONE}", file=sys.stderr)
    return {
        name: {batch: statistics.median(rates[name, batch]) for batch in options.batch if (name, batch) in rates}
        for name in CONTENDERS
    }


# -- report ---------------------------------------------------------------------------


def table(results: dict[str, dict[int, float]], batches: list[int]) -> list[str]:
    """Return the Markdown table: rates, and their ratio to one after the other."""
    lines = [f"| | {' | '.join(f'{batch} prompts' for batch in batches)} |", "|---" * (len(batches) + 1) + "|"]
    for name, rates in results.items():
        cells = [
            f"{rates[batch]:.1f} ({rates[batch] / results[ALONE][batch]:.2f})" if batch in rates else ""
            for batch in batches
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def plot(results: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the rates over the number of prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, rates in results.items():
        style = "-" if name.startswith("executorch") else "--"
        axes.plot(list(rates), list(rates.values()), style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({batch for rates in results.values() for batch in rates}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts")
    axes.set_ylabel("new tokens per second")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def write_report(results: dict[str, dict[int, float]], options: argparse.Namespace) -> None:
    """Write the table into the page, and the picture beside it."""
    picture = "benchmarks-many-prompts.png"
    plot(results, options.docs / picture)
    about = (
        f"SmolLM2-135M, float32, greedy, prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, {options.new} new"
        f" tokens each; {machine()}; {options.turns} turns, {time.strftime('%Y-%m-%d')}."
    )
    lines = [about, "", *table(results, options.batch), "", f"![new tokens per second]({picture})"]
    write_section(options.docs, "many_prompts", lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32], help="numbers of prompts")
    parser.add_argument("--new", type=int, default=48, help="new tokens of each prompt (default: %(default)s)")
    parser.add_argument(
        "--slow", type=int, default=8, help=f"prompts that '{SLOW}' gets, in one turn (default: %(default)s)"
    )
    run(parser, CONTENDERS, work, report)


def report(folder: Path, options: argparse.Namespace) -> None:
    """Measure, and print or write the table."""
    results = measure(folder, options)
    print("\n".join(table(results, options.batch)))
    if options.docs:
        write_report(results, options)


if __name__ == "__main__":
    main()
