"""One sequence, step by step: this package against mlx-lm and Hugging Face, on the same weights, dtype and device.

Each contender runs in a process of its own, with its own libraries; one works at a time, in turns, so that what else
the machine does meets all of them alike. Figures are medians over the turns. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Workers, machine, run, serve, write_section

REFERENCE = "mlx-lm, as installed"
HISTORY = 64
"""Tokens before the first timed step."""

# A contender takes tokens and a position, and returns once the likeliest next token is on the host.
Step = Callable[[list[int], int], int]


# -- contenders -------------------------------------------------------------------


def _program(folder: Path) -> tuple[Any, Any]:
    from executorch_mlx.examples.llm.folder import MODEL_FILE
    from executorch_mlx.examples.llm.generation import LanguageModel
    from executorch_mlx.extension.llm.cache import CacheSession

    model = LanguageModel(folder / "pte" / MODEL_FILE)
    session = CacheSession(model.new_cache(2048))
    session.__enter__()
    return model, session


def greedy(folder: Path) -> Step:
    model, session = _program(folder)

    def step(tokens: list[int], start: int) -> int:
        session.control.rewind(start)
        token: int = model.step_greedy(tokens, range(start, start + len(tokens)), [len(tokens) - 1])[0]
        return token

    return step


def logits(folder: Path) -> Step:
    model, session = _program(folder)

    def step(tokens: list[int], start: int) -> int:
        session.control.rewind(start)
        return int(model.step(tokens, range(start, start + len(tokens)), [len(tokens) - 1])[0].argmax())

    return step


def compiled(folder: Path) -> Step:
    import numpy as np

    from executorch_mlx.backends.mlx.runtime.device import STREAM, mx

    model, session = _program(folder)
    program = model._program.load_method("forward")._delegates[0].program
    cache = session.control

    def step(tokens: list[int], start: int) -> int:
        cache.rewind(start)
        with mx.stream(STREAM), cache.step():
            inputs = [
                mx.array([tokens], dtype=mx.int64),
                mx.arange(start, start + len(tokens), dtype=mx.int64),
                mx.array([len(tokens) - 1], dtype=mx.int64),
            ]
            (out,) = program(inputs, cache)
            mx.eval(out, cache.release())
            return int(np.array(out)[0, 0].argmax())

    return step


def mlx_lm(folder: Path) -> Step:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder / "hf")
    cache = make_prompt_cache(model)

    def step(tokens: list[int], start: int) -> int:
        trim_prompt_cache(cache, cache[0].offset - start)
        return int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item())

    return step


def mlx_lm_same_blas(folder: Path) -> Step:
    from executorch_mlx.backends.mlx.runtime.blas import install_blas

    install_blas()
    return mlx_lm(folder)


def hugging_face(folder: Path) -> Step:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="auto").eval()
    cache = DynamicCache()

    def step(tokens: list[int], start: int) -> int:
        if cache.get_seq_length() > start:
            cache.crop(start - cache.get_seq_length())
        out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    return step


CONTENDERS: dict[str, Callable[[Path], Step]] = {
    "executorch-mlx, forward_greedy": greedy,
    "executorch-mlx, forward": logits,
    "compiled callable, no ExecuTorch": compiled,
    "mlx-lm, as installed": mlx_lm,
    "mlx-lm, with our BLAS": mlx_lm_same_blas,
    "Hugging Face on torch": hugging_face,
}


# -- worker and parent ----------------------------------------------------------------


def work(name: str, folder: Path) -> None:
    """Serve turns: seconds of a prefill and of a decode step, and the tokens chosen."""
    step = CONTENDERS[name](folder)

    def turn(request: dict[str, Any]) -> dict[str, Any]:
        prompt = [(7 * index) % 900 + 100 for index in range(max(request["prefill"], HISTORY))]
        began = time.perf_counter()
        step(prompt[: request["prefill"]], 0)
        prefill_s = time.perf_counter() - began
        token = step(prompt[:HISTORY], 0)
        times, chosen = [], []
        for index in range(request["decode"]):
            began = time.perf_counter()
            token = step([token], HISTORY + index)
            times.append(time.perf_counter() - began)
            chosen.append(token)
        return {"prefill_s": prefill_s, "decode_s": statistics.median(times), "tokens": chosen}

    step(list(range(100, 100 + HISTORY)), 0)
    serve(turn)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Let the contenders take turns; return seconds by contender."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with Workers(__file__, list(CONTENDERS), folder) as workers:
        for turn in range(options.turns):
            for name, rows in turns.items():
                print(f"turn {turn + 1} of {options.turns}: {name}", file=sys.stderr)
                rows.append(workers.ask(name, {"decode": options.decode, "prefill": options.prefill}))
    for name, rows in turns.items():
        if any(turn["tokens"] != turns["Hugging Face on torch"][0]["tokens"] for turn in rows):
            print(f"note: {name} chose other tokens than Hugging Face", file=sys.stderr)
    return {
        name: {key: statistics.median(turn[key] for turn in rows) for key in ("prefill_s", "decode_s")}
        for name, rows in turns.items()
    }


# -- report ---------------------------------------------------------------------------


def table(results: dict[str, dict[str, float]], prefill: int) -> list[str]:
    """Return the Markdown table: rates, and their ratio to mlx-lm as pip installs it."""
    base = results[REFERENCE]
    lines = [
        f"| | decode, tokens/s | ratio | prefill of {prefill}, tokens/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, row in results.items():
        decode, fill = (base[key] / row[key] for key in ("decode_s", "prefill_s"))
        lines.append(
            f"| {name} | {1 / row['decode_s']:.1f} | {decode:.2f} | {prefill / row['prefill_s']:.0f} | {fill:.2f} |"
        )
    return lines


def plot(results: dict[str, dict[str, float]], prefill: int, path: Path) -> None:
    """Draw both rates as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(results)
    rates = {
        "decode, tokens/s": [1 / results[name]["decode_s"] for name in names],
        f"prefill of {prefill} tokens, tokens/s": [prefill / results[name]["prefill_s"] for name in names],
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 2.8), sharey=True, layout="constrained")
    colours = ["tab:blue" if name.startswith(("executorch", "compiled")) else "tab:gray" for name in names]
    for axis, (title, values) in zip(axes, rates.items(), strict=True):
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def write_report(results: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """Write the table into the page, and the picture beside it."""
    picture = "benchmarks-single-sequence.png"
    plot(results, options.prefill, options.docs / picture)
    about = (
        f"SmolLM2-135M, float32, greedy, history of {HISTORY} to {HISTORY + options.decode} tokens; {machine()};"
        f" {options.turns} turns, {time.strftime('%Y-%m-%d')}."
    )
    lines = [about, "", *table(results, options.prefill), "", f"![tokens per second]({picture})"]
    write_section(options.docs, "single_sequence", lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=32, help="steps timed in a turn (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    run(parser, CONTENDERS, work, report)


def report(folder: Path, options: argparse.Namespace) -> None:
    """Measure, and print or write the table."""
    results = measure(folder, options)
    print("\n".join(table(results, options.prefill)))
    if options.docs:
        write_report(results, options)


if __name__ == "__main__":
    main()
