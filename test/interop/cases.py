"""Programs from ExecuTorch's own MLX exporter, and what this project's runtime should make of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.backends.mlx.program import Graph, ProgramError, read_payload
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build

# Four zero bytes and the format's magic begin each delegate's payload.
_PAYLOAD_MARK = b"\0\0\0\0MLX0"
# The numbers are ExecuTorch's scalar types.
_KV_DTYPES = {
    "5": "float16",
    "6": "float32",
    "15": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "BFloat16": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """A program, inputs for it, and what upstream expects of them.

    Args:
        program: the `.pte`.
        inputs: of its method ``forward``.
        expected: its outputs, as eager PyTorch computes them.
        rtol: by how much an output may differ, relatively.
        atol: and absolutely.
        kv_cache: the cache that its ``update_and_attend`` needs, None for none:
            "capacity,n_layers,n_kv_heads,head_dim[,ScalarType]".
        skip: upstream only checks that the program runs.
    """

    program: bytes
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor]
    rtol: float
    atol: float
    kv_cache: str | None
    skip: bool


def find_cases(folder: Path) -> list[Path]:
    """Return the folders of all cases in a folder, at any depth."""
    return sorted(path.parent for path in folder.rglob("case.pt") if (path.parent / "model.pte").is_file())


def read_case(folder: Path) -> Case:
    """Read the case that a folder holds: ``model.pte`` and ``case.pt``."""
    given: dict[str, Any] = torch.load(folder / "case.pt", weights_only=True)
    fields = {name: given[name] for name in ("rtol", "atol", "kv_cache", "skip")}
    program = (folder / "model.pte").read_bytes()
    return Case(program, list(given["inputs"]), list(given["expected"]), **fields)


def payloads(program: bytes) -> Iterator[bytes]:
    """Yield the payload of each delegate of a program, in their order."""
    start = program.find(_PAYLOAD_MARK)
    while start >= 0:
        size, constants = struct.unpack_from("<QQ", program, start + len(_PAYLOAD_MARK))
        yield program[start : start + size + constants]
        start = program.find(_PAYLOAD_MARK, start + size + constants)


def graphs(program: bytes) -> Iterator[Graph]:
    """Yield what this project reads in each delegate of a program, in the order of their payloads."""
    return map(read_payload, payloads(program))


def kinds(graph: Graph) -> list[list[str]]:
    """Return the kinds of a graph's instructions, per chain."""
    return [[node.kind for node in chain.instructions] for chain in graph.instruction_chains]


def brings_metal(program: bytes) -> bool:
    """Whether a program carries Metal source of its own."""
    return any("MetalKernelNode" in chain for graph in graphs(program) for chain in kinds(graph))


def cache_config(spec: str) -> CacheConfig:
    """Return what the cache is built from that a case asks for."""
    capacity, layers, kv_heads, head_dim, *dtype = spec.split(",")
    return CacheConfig(
        capacity=int(capacity),
        layers=[LayerConfig(n_kv_heads=int(kv_heads), head_dim=int(head_dim))] * int(layers),
        kv_dtype=_KV_DTYPES[dtype[0]] if dtype else "float32",
    )


def run_case(folder: Path) -> str:
    """Run the case that a folder holds.

    Returns:
        "ran", or "refused" for a program that brings Metal source of its own.

    Raises:
        AssertionError: what comes out is not what upstream expects, or nothing does.
    """
    case = read_case(folder)
    method, refusal = _load(case.program)
    if brings_metal(case.program):
        assert refusal is not None, "loaded, though the program brings Metal source of its own"
        assert isinstance(refusal, ProgramError), f"expected a ProgramError, got {_described(refusal)}"
        assert "Metal" in str(refusal), f"the refusal does not name Metal: {refusal}"
        return "refused"
    if refusal is not None:
        raise AssertionError(f"not loaded: {_described(refusal)}") from refusal
    cache = build("MLXBackend", "sequence", cache_config(case.kv_cache)) if case.kv_cache else None
    try:
        with nullcontext() if cache is None else CacheSession(cache):
            outputs = list(method.execute(case.inputs))
    except Exception as error:
        raise AssertionError(f"not run: {_described(error)}") from error
    if not case.skip:
        _compare(outputs, case)
    return "ran"


def _load(program: bytes) -> tuple[Any, Exception | None]:
    try:
        return load_program(program).load_method("forward"), None
    except Exception as error:
        return None, error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _compare(outputs: list[Any], case: Case) -> None:
    # Stricter than upstream, which compares outputs of different dtypes as float32.
    assert len(outputs) == len(case.expected), f"expected {len(case.expected)} outputs, got {len(outputs)}"
    for index, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        torch.testing.assert_close(
            output,
            expected,
            rtol=case.rtol,
            atol=case.atol,
            equal_nan=True,
            msg=lambda message, index=index: f"output {index}: {message}",
        )
