"""What the benchmarks share: contenders in processes of their own, the model, and the page that gets the tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# A contender serves requests: each a JSON object, and so is its answer.
Serve = Callable[[dict[str, Any]], dict[str, Any]]


class Workers:
    """Contenders, each in a process of its own with its own libraries; one works at a time."""

    def __init__(self, script: str, names: list[str], folder: Path) -> None:
        """Start them: ``script --worker NAME --folder FOLDER``, whose ``main`` calls ``serve``."""
        self._workers: dict[str, subprocess.Popen[str]] = {}
        for name in names:
            print(f"start {name}", file=sys.stderr)
            command = [sys.executable, script, "--worker", name, "--folder", str(folder)]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._workers[name] = worker
            self._answer(name)

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Let a contender answer a request."""
        pipe = self._workers[name].stdin
        assert pipe is not None
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()
        answer: dict[str, Any] = json.loads(self._answer(name))
        return answer

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.communicate()

    def _answer(self, name: str) -> str:
        worker = self._workers[name]
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith(("ready", "{")):
                return line
        raise RuntimeError(f"{name} ended with status {worker.wait()}")


def serve(contender: Serve) -> None:
    """Answer the parent's requests until it closes the pipe."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(contender(json.loads(line))), flush=True)


def run(
    parser: argparse.ArgumentParser,
    contenders: Iterable[str],
    work: Callable[[str, Path], None],
    report: Callable[[Path, argparse.Namespace], None],
) -> None:
    """Run a benchmark of SmolLM2: as the parent, or as the worker that the parent has started.

    Args:
        parser: with the benchmark's own options; it gets those that all have.
        contenders: their names.
        work: serves as a contender, given its name and the model's folder.
        report: measures and reports, given the model's folder and the options.
    """
    parser.add_argument("--docs", type=Path, help="folder whose benchmarks.md gets the table and the picture")
    parser.add_argument("--folder", type=Path, help="where the model lies or is written (default: a temporary folder)")
    parser.add_argument("--worker", choices=contenders, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        prepare(folder)
        report(folder, options)


def prepare(folder: Path) -> None:
    """Write SmolLM2 as a Hugging Face folder ``hf`` and as a program, ``pte``, unless they are there."""
    if (folder / "pte").is_dir():
        return
    import torch

    from executorch_mlx.examples.llm.checkpoint import load_checkpoint
    from executorch_mlx.examples.llm.export import export_model

    print("load and export SmolLM2", file=sys.stderr)
    model = load_checkpoint("smollm2", torch.float32).model
    # A model read from GGUF cannot be saved; a plain one of the same weights can.
    plain = type(model)(type(model.config)(**_without_quantization(model.config.to_dict())))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "hf")
    # mlx-lm looks for the rotary base where transformers had it before version 5.
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_theta": config["rope_parameters"]["rope_theta"]}))
    export_model(model, folder / "pte")


def machine() -> str:
    """Describe the machine and the libraries."""
    from importlib.metadata import version

    from executorch_mlx.backends.mlx import backend_info

    info = backend_info()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    libraries = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "torch", "transformers"))
    return f"{os.cpu_count()} cores of {cpu}, {platform.system()}; {info.blas or info.device}; {libraries}"


def write_section(docs: Path, mark: str, lines: list[str]) -> None:
    """Put lines between the markers of this name in benchmarks.md."""
    begin, end = f"<!-- {mark} begin -->", f"<!-- {mark} end -->"
    page = docs / "benchmarks.md"
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    body = "\n".join(lines)
    page.write_text(f"{before}{begin}\n{body}\n{end}{after}")


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "_name_or_path")}
