"""Measure an exported language model: prompt lengths x new tokens x batch sizes x cache kinds."""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from executorch_mlx.extension.llm.cache import BatchControl, CacheSession
from executorch_mlx.extension.llm.cache.config import KV_DTYPES

from . import command, flags
from .folder import MODEL_FILE
from .generation import LanguageModel


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.examples.llm.bench_llm",
        description="Measure an exported language model: for each prompt length, number of new tokens, batch size and"
        " cache kind, B prompts are computed and then B tokens in each step. Figures are medians; the cases take turns,"
        " so that ratios can be trusted where the machine's speed varies. Lists are written with spaces or commas.",
    )
    source = result.add_mutually_exclusive_group(required=True)
    flags.add_model(source, required=False)
    source.add_argument(
        "--config",
        help="a Hugging Face configuration (a config.json, its folder, or a name to download): measure that model with"
        " random weights",
    )
    result.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="with --config: dtype of weights and activations (default: %(default)s)",
    )
    result.add_argument(
        "--quantize", choices=("4w", "8w"), help="with --config: store weights in 4 or 8 bits (default: in --dtype)"
    )
    for flag, default, text in (
        ("--batch-sizes", "1,2,4,8", "sequences side by side"),
        ("--prompt-tokens", "128", "tokens of each prompt"),
        ("--new-tokens", "32", "decode steps"),
        ("--cache-kinds", "batched-sequence,batched-paged,batched-cell", "cache kinds; ratios are to the first"),
    ):
        result.add_argument(flag, nargs="+", default=[default], help=f"{text} (default: {default})")
    result.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="float32", help="dtype of the KV cache (default: %(default)s)"
    )
    flags.add_cpu_weights(result)
    result.add_argument("--turns", type=int, default=3, help="runs, after one to warm up (default: %(default)s)")
    result.add_argument("--output-dir", type=Path, help="folder for bench.csv, bench.json and the plot, bench.png")
    return result


@dataclass(frozen=True)
class Case:
    """What is measured."""

    cache_kind: str
    prompt_tokens: int
    new_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Figures:
    """A case's medians: seconds, and tokens per second, all its sequences together.

    Attributes:
        decode_ratio: decode speed to that of the first cache kind, all else equal.
    """

    prefill_s: float
    prefill_tokens_per_s: float
    decode_s: float
    decode_tokens_per_s: float
    total_s: float
    total_tokens_per_s: float
    decode_ratio: float


Results = dict[Case, Figures]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    options.cache_kinds = ",".join(options.cache_kinds).split(",")
    for name in ("batch_sizes", "prompt_tokens", "new_tokens"):
        setattr(options, name, _integers(name, getattr(options, name)))
    flags.require_positive(options, "batch_sizes", "prompt_tokens", "new_tokens", "turns")
    for kind in options.cache_kinds:
        flags.require_batched(kind)
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        begin = stack.enter_context(command.stages())
        folder = options.model_dir
        if options.config is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _export_random(options, folder, begin)
        flags.require_model(folder)
        begin("load the model")
        model = LanguageModel(folder / MODEL_FILE, cpu_weights=options.cpu_weights)
        cases = _cases(options, model)
        model.prepare(greedy=True)
        results = measure(model, cases, options.turns, options.kv_dtype, begin)
    _print(results)
    if options.output_dir is not None:
        write(results, options.output_dir)


def measure(
    model: LanguageModel, cases: Sequence[Case], turns: int, kv_dtype: str, begin: Callable[[str], None]
) -> Results:
    """Measure cases, which take turns; a first turn warms up and is not counted.

    Args:
        model: the model.
        cases: what to measure; ratios are to the first one's cache kind.
        turns: runs of each case.
        kv_dtype: dtype of the cache.
        begin: told what is measured.
    """
    seconds: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(turns + 1):
        for case in cases:
            begin(f"turn {turn} of {turns}: {case.cache_kind}, {case.batch_size} x {case.prompt_tokens} tokens")
            times = _run(model, case, kv_dtype)
            if turn > 0:
                seconds[case].append(times)
    prefill_s, decode_s = (
        {case: statistics.median(times[part] for times in rows) for case, rows in seconds.items()} for part in (0, 1)
    )
    first = {case: replace(case, cache_kind=cases[0].cache_kind) for case in cases}
    return {
        case: _figures(case, prefill_s[case], decode_s[case], decode_s[first[case]] / decode_s[case]) for case in cases
    }


def write(results: Results, folder: Path) -> None:
    """Write bench.csv, bench.json and bench.png."""
    rows = [asdict(case) | asdict(figures) for case, figures in results.items()]
    with (folder / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "bench.json").write_text(json.dumps({"device": command.device(), "rows": rows}, indent=1) + "\n")
    _plot(results, folder / "bench.png")


# -- measuring --------------------------------------------------------------------


def _integers(name: str, values: Sequence[str]) -> list[int]:
    try:
        return [int(value) for value in ",".join(values).split(",")]
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')}: expected integers, got {' '.join(values)}") from None


def _cases(options: argparse.Namespace, model: LanguageModel) -> list[Case]:
    longest = max(options.prompt_tokens) + max(options.new_tokens)
    if longest > model.max_context:
        raise ValueError(f"{longest} tokens of prompt and answer: the model's context is {model.max_context}")
    if max(options.batch_sizes) > model.max_step:
        raise ValueError(
            f"batch size {max(options.batch_sizes)}: the program's steps take at most {model.max_step} tokens"
        )
    grid = product(options.prompt_tokens, options.new_tokens, options.batch_sizes, options.cache_kinds)
    return [Case(kind, prompt, new, batch) for prompt, new, batch, kind in grid]


def _export_random(options: argparse.Namespace, folder: Path, begin: Callable[[str], None]) -> None:
    """Export a model of a configuration with random weights."""
    import torch

    from .checkpoint import random_model
    from .export import export_model

    begin("make random weights")
    model = random_model(options.config, getattr(torch, options.dtype))
    export_model(model, folder, quantize=options.quantize, progress=begin)


def _run(model: LanguageModel, case: Case, kv_dtype: str) -> tuple[float, float]:
    """Return the seconds that the prompts and the decode steps of a case take."""
    capacity = case.batch_size * (case.prompt_tokens + case.new_tokens)
    cache = model.new_cache(capacity, kv_dtype, kind=case.cache_kind, max_seqs=case.batch_size)
    draw = random.Random(0)
    with CacheSession(cache):
        ids = [cache.seq_new() for _ in range(case.batch_size)]
        prompts = [(seq_id, position) for seq_id in ids for position in range(case.prompt_tokens)]
        tokens = [draw.randrange(model.vocab_size) for _ in prompts]
        began = time.perf_counter()
        for at in range(0, len(prompts), model.max_step):
            part = prompts[at : at + model.max_step]
            _step(model, cache, tokens[at : at + model.max_step], part, [len(part) - 1])
        prefilled = time.perf_counter()
        tokens = tokens[-case.batch_size :]
        for position in range(case.prompt_tokens, case.prompt_tokens + case.new_tokens):
            places = [(seq_id, position) for seq_id in ids]
            tokens = _step(model, cache, tokens, places, range(case.batch_size))
        return prefilled - began, time.perf_counter() - prefilled


def _step(
    model: LanguageModel,
    cache: BatchControl,
    tokens: Sequence[int],
    places: Sequence[tuple[int, int]],
    rows: Sequence[int],
) -> list[int]:
    """Run one flat step of tokens at (sequence, position); return the likeliest next tokens of some rows."""
    ids, positions = zip(*places, strict=True)
    if not cache.declare_step(ids):
        raise RuntimeError(f"the cache refused a step of {len(ids)} tokens with room for {cache.free}")
    return model.step_greedy(tokens, positions, rows)


def _figures(case: Case, prefill_s: float, decode_s: float, ratio: float) -> Figures:
    prompt, new = case.batch_size * case.prompt_tokens, case.batch_size * case.new_tokens
    total_s = prefill_s + decode_s
    rates = prompt / prefill_s, new / decode_s, (prompt + new) / total_s
    return Figures(prefill_s, rates[0], decode_s, rates[1], total_s, rates[2], ratio)


# -- showing ----------------------------------------------------------------------


_COLUMNS = (
    ("prefill s", "prefill_s"),
    ("tokens/s", "prefill_tokens_per_s"),
    ("decode s", "decode_s"),
    ("tokens/s", "decode_tokens_per_s"),
    ("ratio", "decode_ratio"),
    ("total s", "total_s"),
    ("tokens/s", "total_tokens_per_s"),
)


def _print(results: Results) -> None:
    """Print a table."""
    table = Table("prompt", "new", "B", "cache kind", *(name for name, _ in _COLUMNS), caption=command.device())
    for column in table.columns:
        column.justify = "left" if column.header == "cache kind" else "right"
    for case, figures in results.items():
        numbers = [case.prompt_tokens, case.new_tokens, case.batch_size, case.cache_kind]
        table.add_row(*map(str, numbers), *(f"{getattr(figures, field):.2f}" for _, field in _COLUMNS))
    # A pipe has no width to fit.
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)


def _plot(results: Results, path: Path) -> None:
    """Draw prefill and decode speed over the batch size, a line per cache kind and length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = (("prefill, tokens/s", "prefill_tokens_per_s"), ("decode, tokens/s", "decode_tokens_per_s"))
    for axes, (title, field) in zip(figure.subplots(1, 2), panels, strict=True):
        lines: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for case, figures in results.items():
            key = (case.cache_kind, case.prompt_tokens, case.new_tokens)
            lines.setdefault(key, []).append((case.batch_size, getattr(figures, field)))
        for (kind, prompt, new), points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{kind}, {prompt} + {new}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({case.batch_size for case in results}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("sequences side by side")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, title="cache kind, prompt + new tokens", title_fontsize=8)
    figure.suptitle(command.device(), fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    command.run(main)
