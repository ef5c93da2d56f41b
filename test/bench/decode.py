"""Whole decode steps of many sequences: cache layouts against each other, against mlx-lm, and through ExecuTorch.

Histories are random keys and values, put into the caches without running the model; then all sequences step together.
With a model's folder, each contender runs in a process of its own; with ``--payload``, which needs no torch and no
ExecuTorch, all run in this one, on random weights. They take turns; figures are medians over the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from common import Workers, machine, prepare, serve, write_section

from executorch_mlx.backends.mlx.runtime.caches import KINDS
from executorch_mlx.backends.mlx.runtime.device import STREAM, exclusive, is_cpu
from executorch_mlx.backends.mlx.runtime.trace import TracedAttention
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig

Shape = dict[str, Any]


def _llama(layers: int, width: int, inner: int, heads: tuple[int, int], vocab: int, base: float, dtype: str) -> Shape:
    """Return a model's shape as mlx-lm's configuration has it, and the dtype."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, (layers, width, inner, *heads), strict=True))
    return {**sizes, "head_dim": 64, "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": base, "dtype": dtype}


SHAPES = {
    "smollm2-135m": _llama(30, 576, 1536, (9, 3), 49152, 1e5, "float32"),
    "llama-3.2-1b": _llama(16, 2048, 8192, (32, 8), 128256, 5e5, "bfloat16"),
}

METHOD = "forward_greedy"
PAGED, SEQUENCE, CELL = LAYOUTS = ("batched-paged", "batched-sequence", "batched-cell")
THROUGH = "batched-paged through ExecuTorch"
MLX_LM = "mlx-lm"
FLOOR = "no attention"
CONTENDERS = (*LAYOUTS, THROUGH, MLX_LM, FLOOR)

# How a contender is stepped: it waits for each step; or begins the next one before it reads the last one's tokens; or
# copies each step's tokens to the host and feeds them from there.
SYNCHRONOUS, OVERLAPPED, HOST = "synchronous", "overlapped", "host"
LINES = {
    PAGED: (PAGED, SYNCHRONOUS),
    f"{PAGED}, overlapped": (PAGED, OVERLAPPED),
    SEQUENCE: (SEQUENCE, SYNCHRONOUS),
    CELL: (CELL, SYNCHRONOUS),
    MLX_LM: (MLX_LM, SYNCHRONOUS),
    f"{MLX_LM}, pipelined": (MLX_LM, OVERLAPPED),
    FLOOR: (FLOOR, SYNCHRONOUS),
}
HOST_LINES = {"callable": (PAGED, HOST), ".pte through ExecuTorch": (THROUGH, HOST)}
ROOFLINE = "memory roofline"

FORKED = 2000
RAGGED = 2
"""The longest of ragged sequences, in lengths of the shortest."""
ROOM = 1024
"""Tokens that a sequence may grow by."""


# -- contenders -------------------------------------------------------------------


class Contender(ABC):
    """Sequences with a history, and a model that steps them."""

    @abstractmethod
    def fill(self, lengths: Sequence[int]) -> None:
        """Begin anew with sequences of these lengths."""

    @abstractmethod
    def drop(self) -> None:
        """Free what the sequences take."""

    @abstractmethod
    def step(self, manner: str) -> Any:
        """Step all sequences once, in a manner; return their tokens."""

    def steps(self, count: int, manner: str) -> list[float]:
        """Return the seconds of steps; one that comes before them is not counted."""
        last, times = self.step(manner), []
        for _ in range(count):
            began = time.perf_counter()
            tokens = self.step(manner)
            if manner == OVERLAPPED:
                np.array(last)
            last = tokens
            times.append(time.perf_counter() - began)
        np.array(last)
        return times

    def bandwidth(self) -> float:
        """Return the bytes per second, read and written, of a copy."""
        num_bytes, times = 2**28 if is_cpu() else 2**30, []
        source = mx.zeros(num_bytes // 4)
        mx.eval(source)
        on_host = np.array(source) if is_cpu() else None
        target = None if on_host is None else on_host.copy()
        for _ in range(8):
            began = time.perf_counter()
            if on_host is not None:
                np.copyto(target, on_host)  # MLX would pay for fresh pages with each copy
            else:
                mx.eval(source + 0)
            times.append(time.perf_counter() - began)
        return 2 * num_bytes / statistics.median(times)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the method that a request names; an exception is part of the answer."""
        method = getattr(self, request.pop("do"))
        try:
            return {"value": method(**request)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class Ours(Contender):
    """The compiled callable over one of this package's caches."""

    def __init__(self, direct: Any, builder: Callable[[CacheConfig], Any], shape: Shape) -> None:
        self._direct, self._builder, self._shape = direct, builder, shape
        self._cache: Any = None

    def fill(self, lengths: Sequence[int], *, capacity: int | None = None, initial: int = 512) -> None:
        """As ``Contender.fill``; a cache may be given another capacity and size to start with."""
        self.drop()
        heads, dim, layers = (self._shape[key] for key in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
        capacity = capacity or sum(lengths) + ROOM * (len(lengths) + 1)
        config = CacheConfig(capacity, [LayerConfig(heads, dim)] * layers, self._shape["dtype"], initial)
        cache = self._cache = self._builder(config)
        ids = [cache.seq_new() for _ in lengths]
        for seq_id, length in zip(ids, lengths, strict=True):
            assert cache.declare_step([seq_id] * length)
            with exclusive(), mx.stream(STREAM), cache.step():
                q, k, v = (
                    _random(self._shape, count, length) for count in (self._shape["num_attention_heads"], heads, heads)
                )
                for layer in range(layers):
                    # What the queries find is never computed: only the pools are evaluated, at the step's end.
                    cache.attend(layer, tuple(range(length)), q, k, v, dim**-0.5)
        self._begin(ids)

    def drop(self) -> None:
        self._cache = self._tokens = None
        mx.clear_cache()

    def step(self, manner: str) -> Any:
        positions = [self._cache.pos(seq_id) for seq_id in self._ids]
        assert self._cache.declare_step(self._ids)
        with CacheSession(self._cache):
            self._tokens = self._advance(positions, manner)
        return self._tokens

    def prefill(self, length: int) -> float:
        """Return the seconds of one step with a whole prompt."""
        seq_id = self._cache.seq_new()
        assert self._cache.declare_step([seq_id] * length)
        began = time.perf_counter()
        with CacheSession(self._cache):
            self._direct([np.full((1, length), 100), np.arange(length), np.array([length - 1])])
        seconds = time.perf_counter() - began
        assert self._cache.seq_rm(seq_id)
        return seconds

    def fork(self, length: int, count: int) -> list[dict[str, float]]:
        """Fork a sequence; return seconds, bytes of pools that are added, and seconds of the first step of both."""
        # Pools large enough for both, so that none of them grows in the step that is timed.
        self.fill([length], initial=2 * length + ROOM)
        (donor,) = self._ids
        rows = []
        for _ in range(count):
            assert self._cache.rewind(donor, length)
            before, began = self._cache.pool_bytes, time.perf_counter()
            fork = self._cache.seq_clone(donor)
            forked_s = time.perf_counter() - began
            self._begin([donor, fork])
            began = time.perf_counter()
            self.step(SYNCHRONOUS)
            step_s = time.perf_counter() - began
            rows.append({"fork_s": forked_s, "bytes": self._cache.pool_bytes - before, "step_s": step_s})
            assert self._cache.seq_rm(fork)
        return rows

    def pool_bytes(self) -> int:
        """Return the bytes of the cache's pools."""
        return int(self._cache.pool_bytes)

    def _begin(self, ids: list[int]) -> None:
        self._ids, self._tokens = ids, np.full((1, len(ids)), 100)
        self._rows = np.arange(len(ids))

    def _advance(self, positions: list[int], manner: str) -> Any:
        inputs = [self._tokens, np.array(positions), self._rows]
        (tokens,) = self._direct(inputs, wait=manner != OVERLAPPED)
        return np.array(tokens) if manner == HOST else tokens


class ThroughExecuTorch(Ours):
    """The program, run by ExecuTorch."""

    def _advance(self, positions: list[int], manner: str) -> Any:
        # Here the callable is a LanguageModel.
        rows = range(len(positions))
        return np.array([self._direct.step_greedy(self._tokens[0].tolist(), positions, rows)])


class NoAttention(KINDS[SEQUENCE]):  # type: ignore[misc]
    """A cache that hands queries back, and keeps nothing."""

    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return q

    def traced(self, layers: Sequence[int], positions: tuple[int, ...]) -> TracedAttention:
        return TracedNothing()


class TracedNothing(TracedAttention):
    """The same in a traced step."""

    arrays: ClassVar[list[Any]] = []
    fixed: ClassVar[tuple[Any, ...]] = ()

    def attend(self, arrays: list[Any], layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return q

    def commit(self, results: list[mx.array]) -> None:
        pass


class MlxLm(Contender):
    """mlx-lm's model over its cache for batches."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self._model, self._shape = model, shape
        self.drop()

    def fill(self, lengths: Sequence[int]) -> None:
        from mlx_lm.models.cache import BatchKVCache, KVCache

        batch, longest = len(lengths), max(lengths)
        # Shorter sequences are padded at their beginning.
        padding = [longest - length for length in lengths]
        self._caches = [
            KVCache() if batch == 1 else BatchKVCache(padding) for _ in range(self._shape["num_hidden_layers"])
        ]
        for cache in self._caches:
            keys, values = (
                _random(self._shape, self._shape["num_key_value_heads"], longest, batch=batch) for _ in range(2)
            )
            mx.eval(cache.update_and_fetch(keys, values))
        self._tokens = mx.full((batch, 1), 100)

    def drop(self) -> None:
        self._caches, self._tokens = [], None
        mx.clear_cache()

    def step(self, manner: str) -> Any:
        logits = self._model(self._tokens, cache=self._caches)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)[:, None]
        (mx.async_eval if manner == OVERLAPPED else mx.eval)(self._tokens)
        return self._tokens


def _random(shape: Shape, heads: int, length: int, *, batch: int = 1) -> mx.array:
    array = mx.random.normal((batch, heads, length, shape["head_dim"])).astype(getattr(mx, shape["dtype"]))
    mx.eval(array)
    return array


# -- where models come from ---------------------------------------------------------


class Folder:
    """SmolLM2, as ``common.prepare`` writes it."""

    def __init__(self, folder: Path) -> None:
        self.pte, self._hf = folder / "pte" / "model.pte", folder / "hf"

    def direct(self) -> Any:
        from executorch_mlx.backends.mlx import load_program

        return load_program(self.pte).load_method(METHOD).direct()

    def mlx_lm(self) -> Any:
        from mlx_lm.utils import load_model

        # MLX multiplies with our BLAS here, too: what this file imports has installed it.
        return load_model(self._hf)[0]

    def weight_bytes(self) -> int:
        return (self._hf / "model.safetensors").stat().st_size


class Payload:
    """A program without its weights, and random ones."""

    def __init__(self, payload: Path, pte: Path | None, shape: Shape) -> None:
        self.pte, self._payload, self._shape = pte, payload, shape

    @functools.cached_property
    def _loaded(self) -> tuple[Any, int]:
        from executorch_mlx.backends.mlx.program import read_payload
        from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
        from executorch_mlx.backends.mlx.runtime.device import DTYPES
        from executorch_mlx.backends.mlx.runtime.direct import DirectMethod
        from executorch_mlx.backends.mlx.runtime.fuse import fuse

        graph, constants = read_payload(self._payload.read_bytes()), {}
        with exclusive(), mx.stream(STREAM):
            for index in (named.slot.idx for named in graph.named_slots):
                if index < graph.num_constant_tensors:
                    meta = graph.tensor_meta[index]
                    assert meta is not None, "a constant is described"
                    size = [dim.value for dim in meta.shape]
                    array = mx.random.normal(size, scale=0.02) if len(size) > 1 else mx.random.uniform(0.5, 1.5, size)
                    constants[index] = array.astype(DTYPES[meta.scalar_type])
                    mx.eval(constants[index])
            num_bytes = sum(array.nbytes for array in constants.values())
            fusion = fuse(graph, constants, None, {})
            return DirectMethod(CompiledProgram(graph, constants, fusion=fusion)), num_bytes

    def direct(self) -> Any:
        return self._loaded[0]

    def mlx_lm(self) -> Any:
        from mlx_lm.models import llama

        rest = {key: value for key, value in self._shape.items() if key != "dtype"}
        model = llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=True, **rest))
        model.set_dtype(getattr(mx, self._shape["dtype"]))
        mx.eval(model.parameters())
        return model

    def weight_bytes(self) -> int:
        return self._loaded[1]


def contender(name: str, source: Folder | Payload, shape: Shape) -> Contender:
    """Load a contender."""
    if name == MLX_LM:
        return MlxLm(source.mlx_lm(), shape)
    if name == THROUGH:
        from executorch_mlx.examples.llm.generation import LanguageModel

        assert source.pte is not None, "this contender is left out where there is no program"
        return ThroughExecuTorch(LanguageModel(source.pte), KINDS[PAGED], shape)
    return Ours(source.direct(), NoAttention if name == FLOOR else KINDS[name], shape)


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


# -- report ---------------------------------------------------------------------------


def figure(value: float | None, per: float = 1, digits: int = 2) -> str:
    """Return a figure as text."""
    return "failed" if value is None else f"{value / per:,.{digits}f}"


def tables(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown."""
    rows, lines = results["decode"], []
    if rows:
        names = list(rows[0]["ms"])
        lines += [f"| tokens | B | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        batch, ms = row["batch"], row["ms"]
        cells = [figure(it) + (f" ({figure(1e3 * batch / it, digits=0)})" if it else "") for it in ms.values()]
        lines.append(f"| {span(row)} | {batch} | {' | '.join(cells)} |")
    if results["bandwidth"]:
        lines += ["", f"A copy reads and writes {results['bandwidth'] / 1e9:,.1f} GB/s."]
    if results["host"]:
        lines += ["", f"| B | {' | '.join(HOST_LINES)} | ratio |", "|---|---|---|---|"]
    for row in results["host"]:
        ours, through = (row["ms"][label] for label in HOST_LINES)
        ratio = figure(through / ours if ours and through else None)
        lines.append(f"| {row['batch']} | {figure(ours)} | {figure(through)} | {ratio} |")
    held, prompt = results["layouts"]["held"], results["prefill"]
    lines += [
        "",
        f"| | prefill of {prompt}, tokens/s | fork of {FORKED:,} tokens, ms | MB added | first step of both, ms"
        f" | pools of {held['batch']} sequences of {held['least']} to {held['most']} tokens, MB |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in results["layouts"]["kinds"].items():
        rate = prompt / row["prefill_s"] if row["prefill_s"] else None
        lines.append(
            f"| {kind} | {figure(rate, digits=0)} | {figure(row['fork_s'], 1e-3)} | {figure(row['bytes'], 2**20, 1)}"
            f" | {figure(row['step_s'], 1e-3)} | {figure(row['pool_bytes'], 2**20, 1)} |"
        )
    lines += ["", f"The tokens of these {held['batch']} sequences need {held['bytes'] / 2**20:,.1f} MB."]
    if "long" in results:
        row = results["long"]
        first, last = (figure(row[key], 1e-3) for key in ("first_s", "last_s"))
        lines += [
            "",
            f"{row['steps']} steps of two sequences in *{CELL}*: {first} ms in the first {row['part']}, {last} in the"
            f" last {row['part']}.",
        ]
    return lines


def span(row: dict[str, Any]) -> str:
    """Return the lengths of a row's sequences as text."""
    return f"{max(1, row['history'] // row['spread'])} to {row['history']}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step over the number of sequences, a panel per lengths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(span(row), []).append(row)
    drawing = Figure(figsize=(4 * len(panels), 4.4), layout="constrained")
    all_axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, its) in zip(all_axes, panels.items(), strict=True):
        for label in rows[0]["ms"]:
            points = [(row["batch"], row["ms"][label]) for row in its if row["ms"].get(label)]
            is_floor = label in (FLOOR, ROOFLINE)
            style = (
                {"color": "gray" if label == FLOOR else "silver", "linestyle": "--"} if is_floor else {"marker": "o"}
            )
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["batch"] for row in its])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{title} tokens each", fontsize=10)
        axes.set_xlabel("sequences")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("step, ms")
    handles, labels = all_axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    drawing.savefig(path, dpi=110)


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
