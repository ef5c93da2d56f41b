"""Whole decode steps of many sequences: cache layouts against each other, against mlx-lm, and through ExecuTorch.

Histories are random keys and values, put into the caches without running the model; then all sequences step together.
With a model's folder, each contender runs in a process of its own; with ``--payload``, which needs no torch and no
ExecuTorch, all run in this one, on random weights. They take turns; figures are medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import Workers, machine, prepare, serve, write_section
from contenders import (
    CELL,
    CONTENDERS,
    FLOOR,
    FORKED,
    HOST_LINES,
    LAYOUTS,
    LINES,
    METHOD,
    RAGGED,
    ROOFLINE,
    SHAPES,
    SYNCHRONOUS,
    THROUGH,
    Folder,
    Payload,
    contender,
)
from decode_report import figure, plot, tables

from executorch_mlx.backends.mlx.runtime.device import is_cpu

# -- measuring ---------------------------------------------------------------------


Send = Callable[[str, dict[str, Any]], dict[str, Any]]


class Bench:
    """Asks contenders, and keeps what was measured."""

    def __init__(self, send: Send, weight_bytes: int, about: str, options: argparse.Namespace) -> None:
        self._send, self._options = send, options
        self._weight_bytes, self._shape = weight_bytes, SHAPES[options.shape]
        device = "cpu" if is_cpu() else "gpu"
        self.results: dict[str, Any] = {"about": about, "device": device, "prefill": options.prefill}

    def run(self) -> None:
        """Measure; what is there is written whenever a part is done."""
        parts = [self.bandwidth, self.decode, self.host, self.layouts, *([self.long] if self._options.long else [])]
        for part in parts:
            self.results[part.__name__] = part()
            if self._options.json:
                self._options.json.write_text(json.dumps(self.results))

    def bandwidth(self) -> float | None:
        return self._ask(FLOOR, "bandwidth")

    def decode(self) -> list[dict[str, Any]]:
        """Steps by history, spread and batch."""
        options, rows = self._options, []
        cases = [(history, RAGGED) for history in options.history]
        cases += [(max(options.history), options.spread)] if options.spread else []
        for (history, spread), batch in product(cases, options.batch):
            lengths = ragged(batch, history, spread)
            row = {"history": history, "spread": spread, "batch": batch, "ms": self._in_turns(lengths, LINES)}
            if self.results["bandwidth"]:
                num_bytes = self._weight_bytes + self._kv_bytes(lengths)
                row["ms"][ROOFLINE] = 1e3 * num_bytes / self.results["bandwidth"]
            rows.append(row)
        return rows

    def host(self) -> list[dict[str, Any]]:
        """Steps whose tokens are copied to the host."""
        options = self._options
        batches = [batch for batch in (1, 32) if batch <= max(options.batch)] if THROUGH in options.contenders else []
        return [
            {"batch": batch, "ms": self._in_turns(ragged(batch, options.history[0], RAGGED), HOST_LINES)}
            for batch in batches
        ]

    def layouts(self) -> dict[str, Any]:
        """What layouts differ in besides."""
        options = self._options
        seconds: dict[str, list[float]] = {kind: [] for kind in LAYOUTS}
        for kind in LAYOUTS:
            self._ask(kind, "fill", lengths=[])
        for turn, kind in product(range(options.turns + 1), LAYOUTS):
            its = self._ask(kind, "prefill", length=options.prefill)
            if turn > 0 and its is not None:
                seconds[kind].append(its)
        batch, history = min(32, max(options.batch)), max(options.history)
        lengths = ragged(batch, history, options.spread or RAGGED)
        rows = {}
        for kind in LAYOUTS:
            forks = self._ask(kind, "fork", length=FORKED, count=options.turns + 1) or []
            self._ask(kind, "fill", lengths=lengths, capacity=batch * history)
            rows[kind] = {
                "prefill_s": median(seconds[kind]),
                **{key: median([fork[key] for fork in forks[1:]]) for key in ("fork_s", "bytes", "step_s")},
                "pool_bytes": self._ask(kind, "pool_bytes"),
            }
            self._ask(kind, "drop")
        held = {"batch": batch, "least": min(lengths), "most": max(lengths), "bytes": self._kv_bytes(lengths)}
        return {"kinds": rows, "held": held}

    def long(self) -> dict[str, Any]:
        """Many steps of two sequences of cells."""
        count = 60 if self._options.quick else 600
        self._ask(CELL, "fill", lengths=ragged(2, self._options.history[0], RAGGED))
        times = self._ask(CELL, "steps", count=count, manner=SYNCHRONOUS) or []
        self._ask(CELL, "drop")
        part = count // 6
        return {"steps": count, "part": part, "first_s": median(times[:part]), "last_s": median(times[-part:])}

    def _in_turns(self, lengths: list[int], lines: dict[str, tuple[str, str]]) -> dict[str, float | None]:
        """Return the milliseconds of a step."""
        print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens", file=sys.stderr)
        names = sorted({name for name, _ in lines.values()})
        for name in names:
            self._ask(name, "fill", lengths=lengths)
        times: dict[str, list[float]] = {label: [] for label in lines}
        for _ in range(self._options.turns):
            for label, (name, manner) in lines.items():
                times[label] += self._ask(name, "steps", count=self._options.steps, manner=manner) or []
        for name in names:
            self._ask(name, "drop")
        ms = {label: median([1e3 * seconds for seconds in its]) for label, its in times.items()}
        print("  " + ", ".join(f"{label} {figure(value)}" for label, value in ms.items()), file=sys.stderr, flush=True)
        return ms

    def _ask(self, name: str, what: str, **arguments: Any) -> Any:
        """Return a contender's answer; None, and a note, where it failed."""
        answer = self._send(name, {"do": what, **arguments})
        if "error" in answer:
            print(f"note: {name}, {what}: {answer['error']}", file=sys.stderr)
        return answer.get("value")

    def _kv_bytes(self, lengths: list[int]) -> int:
        shape = self._shape
        width = 2 * shape["num_key_value_heads"] * shape["head_dim"] * getattr(mx, shape["dtype"]).size
        return int(sum(lengths) * shape["num_hidden_layers"] * width)


def ragged(batch: int, history: int, spread: int) -> list[int]:
    """Return lengths from a part of the history to all of it; a single sequence has all."""
    least = max(1, history // spread)
    return [history - (history - least) * index // max(1, batch - 1) for index in range(batch)][::-1]


def median(values: Sequence[float]) -> float | None:
    """Return the median; None of no values."""
    return statistics.median(values) if values else None


def report(results: dict[str, Any], docs: Path | None) -> None:
    """Print the tables, and write them and the picture where a folder is given."""
    lines = [results["about"], "", *tables(results)]
    print("\n".join(lines))
    if docs:
        device = results["device"]
        picture = f"benchmarks-decode-{device}.png"
        plot(results["decode"], docs / picture)
        write_section(docs, f"decode_{device}", [*lines, "", f"![milliseconds of a step]({picture})"])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="model's shape (default: %(default)s)")
    parser.add_argument("--payload", type=Path, help="program without weights: measure it with random ones, in-process")
    parser.add_argument("--pte", type=Path, help="the same program with weights, for ExecuTorch (with --payload)")
    parser.add_argument("--write-payload", type=Path, help="write the payload of --pte to this file, measure nothing")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences in a step")
    parser.add_argument("--history", type=int, nargs="+", help="tokens of the longest sequence")
    parser.add_argument("--spread", type=int, default=8, help="longest to shortest in a further case; 0: no such case")
    parser.add_argument("--prefill", type=int, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps timed in a turn (default: %(default)s)")
    parser.add_argument(
        "--long", action=argparse.BooleanOptionalAction, help=f"600 steps of {CELL} (default: on a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="one turn of two steps, to see that it runs")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--from-json", type=Path, help="take the figures from such a file instead of measuring")
    parser.add_argument("--docs", type=Path, help="folder whose benchmarks.md gets the tables and the picture")
    parser.add_argument("--folder", type=Path, help="where SmolLM2 lies or is written (default: a temporary folder)")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(contender(options.worker, Folder(options.folder), SHAPES["smollm2-135m"]).answer)
    elif options.write_payload:
        write_payload_file(options.pte or parser.error("--write-payload needs --pte"), options.write_payload)
    elif options.from_json:
        report(json.loads(options.from_json.read_text()), options.docs)
    elif options.payload:
        report(measure_payload(options), options.docs)
    elif options.shape != "smollm2-135m" or options.pte:
        parser.error("another model than SmolLM2 needs --payload")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            report(measure_folder(options, options.folder or Path(temporary)), options.docs)


def write_payload_file(pte: Path, target: Path) -> None:
    """Write a program's delegate without its weights."""
    from executorch_mlx.backends.mlx.inspect_pte import graphs
    from executorch_mlx.backends.mlx.program import write_payload

    (graph,) = [graph for method, _, graph in graphs(pte) if method == METHOD]
    target.write_bytes(write_payload(graph))


def measure_folder(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure SmolLM2, each contender in a process of its own."""
    prepare(folder)
    complete(options, CONTENDERS)
    about = f"SmolLM2-135M, float32, greedy; {machine()}; {time.strftime('%Y-%m-%d')}."
    with Workers(__file__, list(CONTENDERS), folder) as workers:
        bench = Bench(workers.ask, Folder(folder).weight_bytes(), about, options)
        bench.run()
    return bench.results


def measure_payload(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a program with random weights, all contenders in this process."""
    from importlib.metadata import version

    complete(options, [name for name in CONTENDERS if name != THROUGH or options.pte])
    shape, source = SHAPES[options.shape], Payload(options.payload, options.pte, SHAPES[options.shape])
    contenders = {name: contender(name, source, shape) for name in options.contenders}
    device = str(mx.device_info().get("device_name", "CPU"))
    libraries = f"mlx {mx.__version__}, mlx-lm {version('mlx-lm')}"
    about = f"{options.shape}, {shape['dtype']}, random weights, greedy; {device}; {libraries}; {time.strftime('%F')}."
    bench = Bench(lambda name, request: contenders[name].answer(request), source.weight_bytes(), about, options)
    bench.run()
    return bench.results


def complete(options: argparse.Namespace, contenders: Sequence[str]) -> None:
    """Set what was not given, by the device."""
    options.contenders = contenders
    options.batch = options.batch or [1, 2, 4, 8, 16, 32, *([] if is_cpu() else [64])]
    options.history = options.history or ([128, 512] if is_cpu() else [512, 2048])
    options.prefill = options.prefill or (128 if is_cpu() else 512)
    options.long = not is_cpu() if options.long is None else options.long
    if options.quick:
        options.turns, options.steps = 1, 2


if __name__ == "__main__":
    main()
