"""Who may import whom: the layout's rules, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "executorch_mlx"
CACHE, ENGINE = f"{PACKAGE}.extension.llm.cache", f"{PACKAGE}.extension.llm.engine"
MLX, LLM = f"{PACKAGE}.backends.mlx", f"{PACKAGE}.examples.llm"
STANDARD_LIBRARY = set(sys.stdlib_module_names)

# A package or module -> what it may import besides itself and the standard library. Longer names win.
RULES: dict[str, set[str]] = {
    CACHE: set(),
    f"{CACHE}.op": {CACHE, "torch"},
    f"{CACHE}.reference": {CACHE, "torch"},
    ENGINE: {CACHE, "numpy"},
    MLX: {MLX},
    f"{MLX}.identity": set(),
    f"{MLX}.graph": {"torch"},
    f"{MLX}.pages": {"torch"},
    f"{MLX}.quantized": {"torch"},
    f"{MLX}.program": {"flatbuffers"},
    f"{MLX}.passes": {f"{MLX}.graph", f"{MLX}.pages", f"{MLX}.quantized", f"{CACHE}.op", "torch", "torchao"},
    f"{MLX}.lowering": {f"{MLX}.graph", f"{MLX}.program", "torch"},
    f"{MLX}.partitioner": {
        f"{MLX}.graph",
        f"{MLX}.identity",
        f"{MLX}.lowering",
        f"{MLX}.outline",
        f"{MLX}.passes",
        f"{MLX}.preprocess",
        "executorch.exir",
        "torch",
    },
    f"{MLX}.preprocess": {
        f"{MLX}.graph",
        f"{MLX}.identity",
        f"{MLX}.lowering",
        f"{MLX}.outline",
        f"{MLX}.passes",
        f"{MLX}.program",
        f"{MLX}.weights",
        "executorch.exir",
        "torch",
    },
    f"{MLX}.inspect_pte": {f"{MLX}.identity", f"{MLX}.program", "executorch.exir"},
    f"{MLX}.outline": {f"{MLX}.graph", f"{MLX}.passes", "torch"},
    f"{MLX}.weights": {"executorch.exir", "torch"},
    f"{MLX}.runtime": {f"{MLX}.identity", f"{MLX}.program", CACHE, "executorch", "flatbuffers", "mlx", "numpy"},
    f"{MLX}.runtime.blas": {f"{MLX}.runtime", "mlx", "scipy_openblas32"},
    f"{MLX}.runtime.loader": {f"{MLX}.runtime", f"{MLX}.identity", f"{MLX}.program", "executorch", "torch"},
    LLM: {
        CACHE,
        ENGINE,
        MLX,
        "accelerate",
        "executorch",
        "gguf",
        "jinja2",
        "matplotlib",
        "numpy",
        "rich",
        "tokenizers",
        "torch",
        "transformers",
    },
}


def modules() -> dict[str, Path]:
    found = {}
    for top in ("backends", "extension", "examples"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join([PACKAGE, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> set[str]:
    """Return the full names that a module imports, type-checking imports included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            source = f"{base}.{node.module}" if node.level and node.module else base if node.level else node.module
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else source for member in members}
    return found


def rule_of(name: str) -> str:
    return max((rule for rule in RULES if name == rule or name.startswith(f"{rule}.")), key=len)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_imports_only_what_its_layer_may(name: str) -> None:
    rule = rule_of(name)
    allowed = {rule, *RULES[rule]}
    for imported in imports(name, MODULES[name]):
        if imported.split(".")[0] in STANDARD_LIBRARY:
            continue
        assert any(imported == prefix or imported.startswith(f"{prefix}.") for prefix in allowed), imported


def test_modules_import_each_other_without_cycles() -> None:
    graph = {name: {other for other in imports(name, path) if other in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*path, name))
            done.add(name)

    # The lazy facade names its parts for type checkers only.
    graph[MLX] = set()
    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import executorch_mlx.extension.llm.cache", ("torch", "mlx", "numpy")),
        ("import executorch_mlx.backends.mlx", ("torch", "mlx", "executorch.exir")),
        ("from executorch_mlx.backends.mlx import load_program", ("executorch.exir", "transformers")),
        ("from executorch_mlx.backends.mlx import MLXPartitioner", ("mlx.core", "transformers")),
        ("import executorch_mlx.examples.llm.run_llm", ("executorch.exir", "transformers")),
        ("from executorch_mlx.backends.mlx.runtime import compile", ("torch", "executorch.exir")),
    ],
)
def test_importing_brings_in_no_more_than_it_needs(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
