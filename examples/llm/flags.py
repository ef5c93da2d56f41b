"""Flags that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

from executorch_mlx.backends.mlx import CPU_WEIGHTS, UPSTREAM_BACKEND_ID
from executorch_mlx.extension.llm.cache import BatchControl, CacheConfig, LayerConfig, build
from executorch_mlx.extension.llm.cache.config import KV_DTYPES


def add_model(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Add the folder of an exported model."""
    parser.add_argument("--model-dir", required=required, type=Path, help="folder written by export_llm")


def add_cpu_weights(parser: argparse.ArgumentParser) -> None:
    """Add how quantized weights lie in memory."""
    parser.add_argument(
        "--cpu-weights",
        choices=CPU_WEIGHTS,
        default="float32",
        help="of quantized weights on a CPU, where products with them are slow; float32: expand them when the model is"
        " loaded, to 4 bytes per number; stored: leave them as they are (default: %(default)s)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add how an answer's tokens are chosen, and how many."""
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token each time (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw from so many likeliest tokens; 0: from all (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the fewest likeliest tokens whose probabilities reach this sum (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="draw the same tokens each time (default: others each time)")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add whether prompts are wrapped in the chat template."""
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt in the model's chat template, or continue it as plain text (default: --chat if the model"
        " has a template)",
    )


def add_cache(parser: argparse.ArgumentParser, *, capacity: str, windows: str) -> None:
    """Add the KV cache's size, dtype and storage.

    Args:
        parser: the command's.
        capacity: what the capacity is by default.
        windows: what ``--kv-windows none`` is good for.
    """
    parser.add_argument("--kv-capacity", type=int, help=f"tokens that the KV cache holds (default: {capacity})")
    parser.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="float32", help="dtype of the KV cache (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-windows",
        choices=("program", "none"),
        default="program",
        help=f"program: of a layer with a sliding window keep the window only, in a ring; none: keep all, {windows}"
        " (default: %(default)s)",
    )


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for a number, or one of a list of numbers, that is given and less than 1."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {number}")


def require_model(folder: Path) -> None:
    """Raise FileNotFoundError where there is no such folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; export a model with export_llm first")


def require_batched(kind: str) -> None:
    """Raise an error for a cache kind that is not known, or that holds one sequence only.

    Raises:
        LookupError: it is not known; the message names those that are.
        ValueError: it holds one sequence.
    """
    cache = build(UPSTREAM_BACKEND_ID, kind, CacheConfig(1, [LayerConfig(1, 1)], "float32"))
    if not isinstance(cache, BatchControl):
        raise ValueError(f"cache kind {kind!r} holds one sequence; use a batched one, or run_llm")
