"""ExecuTorch's own MLX exporter, made importable where its wheel does not build it.

The wheel holds the exporter's Python sources everywhere, but the modules that are generated from ``schema.fbs`` only
where the backend itself is built. They are generated here in a temporary copy, which then stands in for
``executorch.backends.mlx`` in the process that asks for it. Its operators would collide with those of this project:
give it a process of its own.

As a program: ``python upstream.py PROGRAM.pte...`` prints, as JSON, the instructions that upstream's own reader finds
in each delegate of each program.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What is neither part of the exporter nor of its operator tests.
_LEFT_OUT = ("third-party", "examples", "runtime", "__pycache__")
_NEEDED = ("serialization/generate.py", "serialization/schema.fbs", "test/test_ops.py", "test/test_utils.py")


def wheel() -> Path:
    """Return the folder of the installed ``executorch``."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("executorch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def missing_sources() -> list[str]:
    """Return which of the files that are needed here the installed wheel lacks."""
    needed = ["data/bin/flatc", *(f"backends/mlx/{name}" for name in _NEEDED)]
    return [name for name in needed if not (wheel() / name).is_file()]


def copy_exporter(folder: Path) -> None:
    """Copy the exporter to ``folder/mlx`` and generate there the modules that the wheel lacks.

    Raises:
        FileNotFoundError: the wheel does not hold the sources.
        RuntimeError: the wheel's generator failed.
    """
    missing = missing_sources()
    if missing:
        raise FileNotFoundError(f"the installed executorch lacks {', '.join(missing)}")
    copy = folder / "mlx"
    shutil.copytree(wheel() / "backends/mlx", copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    # The generator also writes C++, from templates that are not in the wheel; empty ones do, since nothing builds it.
    (copy / "runtime").mkdir()
    for name in ("MLXLoader.h.tmpl", "MLXLoader.cpp.tmpl"):
        (copy / "serialization" / name).touch()
    command = [sys.executable, str(copy / "serialization/generate.py"), "--flatc", str(wheel() / "data/bin/flatc")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # The generator carries on without what flatc did not write.
    if done.returncode or not any((copy / "serialization/_generated/mlx_delegate").glob("*.py")):
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


@contextmanager
def exporter() -> Iterator[None]:
    """Let ``executorch.backends.mlx`` be a temporary copy with all its modules, in this process only."""
    import executorch.backends

    if "executorch.backends.mlx" in sys.modules:
        raise RuntimeError("executorch.backends.mlx is imported already")
    with tempfile.TemporaryDirectory(prefix="mlx-exporter-") as folder:
        copy_exporter(Path(folder))
        executorch.backends.__path__.insert(0, folder)
        # Upstream's tests need one subpackage of this package, whose __init__ imports torchtune for others.
        modules = types.ModuleType("executorch.extension.llm.modules")
        modules.__path__ = [str(wheel() / "extension/llm/modules")]
        sys.modules[modules.__name__] = modules
        try:
            yield
        finally:
            executorch.backends.__path__.remove(folder)


def instructions(program: bytes) -> list[list[list[str]]]:
    """Return the kinds of the instructions, as upstream reads them: per delegate, per chain.

    To be called within ``exporter``.

    Raises:
        ValueError: upstream's reader cannot read a delegate or one of its instructions.
    """
    from executorch.backends.mlx.pte_inspector import extract_delegate_payload, parse_mlx_payload

    delegates: list[list[list[str]]] = []
    while (payload := extract_delegate_payload(program, "mlx", delegate_index=len(delegates))) is not None:
        read: dict[str, Any] = parse_mlx_payload(payload)
        if "error" in read:
            raise ValueError(f"delegate {len(delegates)}: {read['error']}")
        chains = [chain["instructions"] for chain in read["graph"]["instruction_chains"]]
        for instruction in (instruction for chain in chains for instruction in chain):
            if "error" in instruction:
                raise ValueError(f"delegate {len(delegates)}, an instruction: {instruction}")
        delegates.append([[instruction["op_name"] for instruction in chain] for chain in chains])
    return delegates


if __name__ == "__main__":
    with exporter():
        print(json.dumps({path: instructions(Path(path).read_bytes()) for path in sys.argv[1:]}))
