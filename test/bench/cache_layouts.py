"""Cache layouts against each other: a step's attention in all layers, forks, and what a pool's size costs.

No model: queries, keys and values are random arrays of a model's shapes, so that the figures are the caches' alone.
Runs wherever MLX does (no torch, no ExecuTorch). The contenders take turns within one run; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import write_section

from executorch_mlx.backends.mlx.runtime.caches.batch_cell import MLXBatchCellCache
from executorch_mlx.backends.mlx.runtime.device import BLAS, STREAM, exclusive
from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, build

SHAPES = {
    # query heads, key heads, head dim, layers
    "smollm2-135m": (9, 3, 64, 30),
    "llama-3.2-1b": (32, 8, 64, 16),
}


def cells(*, gathers: bool) -> Callable[[CacheConfig], Any]:
    """Return a builder of cells that gathers each sequence's, or reads all behind a mask."""
    return type("Cells", (MLXBatchCellCache,), {"gathers": gathers})


BUILDERS: dict[str, Callable[[CacheConfig], Any]] = {
    "batched-sequence": lambda config: build("MLXBackend", "batched-sequence", config),
    "batched-paged": lambda config: build("MLXBackend", "batched-paged", config),
    "batched-cell, gathered": cells(gathers=True),
    "batched-cell, masked": cells(gathers=False),
}
FORKING = ("batched-sequence", "batched-paged", "batched-cell, gathered")


class Runner:
    """A cache with sequences of given lengths, and arrays to feed it."""

    def __init__(
        self, builder: Callable[[CacheConfig], Any], lengths: Sequence[int], options: argparse.Namespace
    ) -> None:
        self.q_heads, self.kv_heads, self.dim, self.layers = SHAPES[options.shape]
        self.dtype = getattr(mx, options.dtype)
        capacity = options.pool or sum(lengths) + 64 * len(lengths)
        layer = LayerConfig(self.kv_heads, self.dim)
        self.cache = builder(CacheConfig(capacity, [layer] * self.layers, options.dtype, options.pool or 512))
        self.ids = [self.cache.seq_new() for _ in lengths]
        for seq_id, length in zip(self.ids, lengths, strict=True):
            for done in range(0, length, 512):
                self.step([seq_id] * min(512, length - done))

    def step(self, ids: Sequence[int]) -> float:
        """Run a step and return its seconds."""
        due = {seq_id: self.cache.pos(seq_id) for seq_id in set(ids)}
        positions = []
        for seq_id in ids:
            positions.append(due[seq_id])
            due[seq_id] += 1
        with mx.stream(STREAM):
            q = mx.random.normal((1, self.q_heads, len(ids), self.dim)).astype(self.dtype)
            k, v = (mx.random.normal((1, self.kv_heads, len(ids), self.dim)).astype(self.dtype) for _ in range(2))
            mx.eval(q, k, v)
        began = time.perf_counter()
        assert self.cache.declare_step(ids)
        with exclusive(), mx.stream(STREAM), self.cache.step():
            out = q
            for layer in range(self.layers):
                # Each layer's queries wait for the layer before, as in a model.
                out = self.cache.attend(layer, tuple(positions), q + out * 0, k, v, self.dim**-0.5)
            mx.eval(out, self.cache.release())
        return time.perf_counter() - began


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the milliseconds of a decode step, by layout, batch and history."""
    rows = []
    for history in options.history:
        for batch in options.batch:
            # Ragged: lengths from two thirds to four thirds of the history.
            lengths = [history * 2 // 3 + history * 2 // 3 * index // max(1, batch - 1) for index in range(batch)]
            runners = {name: Runner(builder, lengths, options) for name, builder in BUILDERS.items()}
            times: dict[str, list[float]] = {name: [] for name in runners}
            for turn in range(options.steps + 2):
                for name, runner in runners.items():
                    seconds = runner.step(runner.ids)
                    if turn >= 2:
                        times[name].append(seconds)
            row = {"history": history, "batch": batch, "ms": {n: 1e3 * statistics.median(t) for n, t in times.items()}}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def measure_forks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a fork of 2,000 tokens costs, by layout."""
    rows = []
    for name in FORKING:
        runner, times = Runner(BUILDERS[name], [2000], argparse.Namespace(**{**vars(options), "pool": 16384})), []
        for _ in range(5):
            began = time.perf_counter()
            fork = runner.cache.seq_clone(0)
            times.append(time.perf_counter() - began)
            runner.cache.seq_rm(fork)
        mx.synchronize()
        before = mx.get_active_memory()
        runner.cache.seq_clone(0)
        mx.synchronize()
        megabytes = (mx.get_active_memory() - before) / 2**20
        rows.append({"kind": name, "ms": 1e3 * statistics.median(times), "MB": megabytes})
    return rows


def measure_pools(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the milliseconds of a step of four sequences of 100 tokens in pools of two sizes."""
    rows = []
    for name in FORKING:
        sizes = (1024, 16384)
        runners = [
            Runner(BUILDERS[name], [100] * 4, argparse.Namespace(**{**vars(options), "pool": size})) for size in sizes
        ]
        times: list[list[float]] = [[] for _ in runners]
        for turn in range(options.steps + 2):
            for runner, its in zip(runners, times, strict=True):
                seconds = runner.step(runner.ids)
                if turn >= 2:
                    its.append(seconds)
        small, large = (1e3 * statistics.median(its) for its in times)
        rows.append({"kind": name, "slots": sizes, "ms": [small, large], "ratio": large / small})
    return rows


# -- report ------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown."""
    names = list(BUILDERS)
    lines = [f"| history | B | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in results["steps"]:
        base = row["ms"][names[0]]
        cells = [f"{row['ms'][name]:.2f} ({row['ms'][name] / base:.2f})" for name in names]
        lines.append(f"| {row['history']} | {row['batch']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| | fork of 2,000 tokens, ms | MB | step in pools of 16,384 slots to one in 1,024 |",
        "|---|---|---|---|",
    ]
    for fork, pool in zip(results["forks"], results["pools"], strict=True):
        lines.append(f"| {fork['kind']} | {fork['ms']:.2f} | {fork['MB']:.1f} | {pool['ratio']:.2f} |")
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="model's shape (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the cache and the queries (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="sequences in a step")
    parser.add_argument("--history", type=int, nargs="+", default=[128], help="mean tokens of a sequence")
    parser.add_argument("--steps", type=int, default=9, help="steps timed (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--from-json", type=Path, help="take the figures from such a file instead of measuring")
    parser.add_argument("--docs", type=Path, help="folder whose benchmarks.md gets the tables")
    options = parser.parse_args()
    if options.from_json:
        results = json.loads(options.from_json.read_text())
    else:
        options.pool = None
        machine = f"CPU of {os.cpu_count()} cores, {BLAS}" if BLAS else str(mx.device_info().get("device_name", ""))
        results = {
            "machine": "; ".join(
                [options.shape, options.dtype, machine, f"mlx {mx.__version__}", time.strftime("%Y-%m-%d.")]
            ),
            "steps": measure_steps(options),
            "forks": measure_forks(options),
            "pools": measure_pools(options),
        }
    print("\n".join(tables(results)))
    if options.json:
        options.json.write_text(json.dumps(results))
    if options.docs:
        mark = "cache_layouts_cpu" if "CPU" in results["machine"] else "cache_layouts_gpu"
        write_section(options.docs, mark, [results["machine"], "", *tables(results)])


if __name__ == "__main__":
    main()
