"""Quantized weights on a CPU: SmolLM2 with its GGUF file's blocks, as stored and expanded, beside float32.

Each contender runs in a process of its own, in turns; figures are medians. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Serve, Workers, machine, run, serve, write_section

HISTORY, NEW_TOKENS = 64, 16
PREFILL = 128
FLOAT32 = "float32"
# Contender -> (folder of its program, how its weights lie in memory).
CONTENDERS = {
    FLOAT32: ("pte", "stored"),
    "4-bit blocks, --cpu-weights float32": ("blocks", "float32"),
    "4-bit blocks, --cpu-weights stored": ("blocks", "stored"),
}


def contender(folder: Path, cpu_weights: str) -> Serve:
    """Load a program and return what times it."""
    from executorch_mlx.examples.llm.folder import MODEL_FILE
    from executorch_mlx.examples.llm.generation import LanguageModel
    from executorch_mlx.extension.llm.cache import CacheSession

    start = time.perf_counter()
    model = LanguageModel(folder / MODEL_FILE, cpu_weights=cpu_weights)
    session = CacheSession(model.new_cache(512))
    session.__enter__()

    def step(tokens: list[int], at: int) -> None:
        model.step_greedy(tokens, range(at, at + len(tokens)), [len(tokens) - 1])

    step([0], 0)
    load_s = time.perf_counter() - start

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        session.control.rewind(0)
        prefill_s = _timed(lambda: step(list(range(PREFILL)), 0))
        session.control.rewind(HISTORY)
        decode_s = _timed(lambda: [step([at], at) for at in range(HISTORY, HISTORY + NEW_TOKENS)])
        return {
            "load_s": load_s,
            "prefill": PREFILL / prefill_s,
            "decode": NEW_TOKENS / decode_s,
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }

    return answer


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def export_blocks(folder: Path) -> None:
    """Export SmolLM2 with its blocks as they are, unless it is there."""
    import torch

    from executorch_mlx.examples.llm.checkpoint import load_checkpoint
    from executorch_mlx.examples.llm.export import export_model

    if not (folder / "blocks").is_dir():
        export_model(load_checkpoint("smollm2", torch.float32, keep_blocks=True).model, folder / "blocks")


def report(folder: Path, options: argparse.Namespace) -> None:
    """Measure and print the table; with --docs, also write it there."""
    export_blocks(folder)
    with Workers(__file__, list(CONTENDERS), folder) as workers:
        turns = [{name: workers.ask(name, {}) for name in CONTENDERS} for _ in range(options.turns)]
    medians = {
        name: {key: statistics.median(turn[name][key] for turn in turns) for key in turns[0][name]}
        for name in CONTENDERS
    }
    lines = [
        f"SmolLM2-135M, activations in float32, greedy, history of {HISTORY}; {machine()}; {options.turns} turns,"
        f" {time.strftime('%Y-%m-%d')}.",
        "",
        f"| weights | `.pte`, MB | load and first step, s | most memory, MB | decode, tokens/s | ratio"
        f" | prefill of {PREFILL}, tokens/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (program, _) in CONTENDERS.items():
        row = medians[name]
        size = sum(file.stat().st_size for file in (folder / program).glob("*.pte")) / 1e6
        ratios = {key: row[key] / medians[FLOAT32][key] for key in ("decode", "prefill")}
        lines.append(
            f"| {name} | {size:.0f} | {row['load_s']:.1f} | {row['memory_mb']:.0f} | {row['decode']:.1f}"
            f" | {ratios['decode']:.2f} | {row['prefill']:.0f} | {ratios['prefill']:.2f} |"
        )
    print("\n".join(lines))
    if options.docs:
        write_section(options.docs, "quantized_weights", lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each contender (default: %(default)s)")

    def work(name: str, folder: Path) -> None:
        program, cpu_weights = CONTENDERS[name]
        serve(contender(folder / program, cpu_weights))

    run(parser, CONTENDERS, work, report)


if __name__ == "__main__":
    main()
