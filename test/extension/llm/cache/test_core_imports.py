"""The core needs the standard library only."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("library", ["torch", "numpy", "mlx", "executorch"])
def test_core_when_imported_leaves_the_library_unloaded(library: str) -> None:
    code = f"import sys, executorch_mlx.extension.llm.cache; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_build_on_eager_without_importing_the_op_finds_the_builder() -> None:
    code = (
        "from executorch_mlx.extension.llm.cache import *;"
        "c = build('eager', 'sequence', CacheConfig(4, [LayerConfig(1, 4)], 'float32')); print(c.capacity)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "4\n"


def test_build_on_an_unknown_backend_in_a_fresh_process_names_those_that_could_be_loaded() -> None:
    code = (
        "from executorch_mlx.extension.llm.cache import *;"
        "build('Eager', 'sequence', CacheConfig(4, [LayerConfig(1, 4)], 'float32'))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "LookupError" in done.stderr
    assert "'eager'" in done.stderr.splitlines()[-1]
