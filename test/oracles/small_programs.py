"""Small programs for the runtime's tests, each exported once per test run, and processes to run them in."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

from executorch_mlx.backends.mlx import UPSTREAM_BACKEND_ID, MLXPartitioner
from executorch_mlx.backends.mlx.passes import rewrite_attention
from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig

MAX_ROWS = 16
"""The upper bound of every dynamic axis here."""

VOCABULARY = 11
CAPACITY = 24
"""Tokens that a cache of ``cache_config`` holds."""

# How long a test waits for a process that should be done soon.
_PATIENCE_S = 120

# Module, example inputs, dynamic shapes.
Method = tuple[torch.nn.Module, tuple[Any, ...], Any]


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class Affine(torch.nn.Module):
    """A linear layer on [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class Attention(torch.nn.Module):
    """Causal attention over [1, n, 16] with grouped queries and rotary positions."""

    heads, kv_heads, head_dim = 4, 2, 8

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(16, self.heads * self.head_dim, bias=False)
        self.kv = torch.nn.Linear(16, 2 * self.kv_heads * self.head_dim, bias=False)
        self.out = torch.nn.Linear(self.heads * self.head_dim, 16, bias=False)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(0.0, 1.0, 2 / self.head_dim))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        q = self.q(x).view(1, n, self.heads, self.head_dim).transpose(1, 2)
        kv = self.kv(x).view(1, n, 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
        q, k = self._rotated(q, position), self._rotated(k, position)
        group = self.heads // self.kv_heads
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(1, n, -1))
        return out

    def _rotated(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angles = position[:, None].float() * self.frequencies[None]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class TinyLM(torch.nn.Module):
    """Two layers of attention between an embedding and logits.

    Args:
        split: put an operator between the layers that stays outside the delegate, so that there are two.
    """

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.layers = torch.nn.ModuleList([Attention(), Attention()])
        self.head = torch.nn.Linear(16, VOCABULARY, bias=False)
        self._split = split

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, position)
            if self._split:
                x = x + outside_the_delegate(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Greedy(TinyLM):
    """The most likely token at each position; shares all weights with the model it is given."""

    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = model.embedding, model.layers, model.head

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position).argmax(-1)


def outside_the_delegate(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, by an operator that has no lowering but a portable kernel."""
    return torch.cdist(x, torch.zeros(1, x.shape[-1]), p=math.inf)


def export(
    methods: Mapping[str, Method],
    *,
    backend_id: str = UPSTREAM_BACKEND_ID,
    attention: bool = False,
    constant_methods: dict[str, Any] | None = None,
) -> bytes:
    """Export methods to one program; with ``attention``, its caches lie outside."""
    programs = {}
    for name, (module, inputs, dynamic) in methods.items():
        shapes = {"inputs": dynamic} if isinstance(module, Function) and dynamic is not None else dynamic
        with torch.no_grad():
            traced = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
        programs[name] = rewrite_attention(traced).program if attention else traced
    lowered = to_edge_transform_and_lower(
        programs,
        partitioner={name: [MLXPartitioner(backend_id=backend_id)] for name in methods},
        constant_methods=constant_methods,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return bytes(lowered.to_executorch().buffer)


def export_function(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> bytes:
    """Export a function as ``forward``; if dynamic, the first axis of its one input is."""
    shapes = ({0: rows()},) if dynamic else None
    return export({"forward": (Function(function), inputs, shapes)})


def rows(least: int = 1) -> Any:
    """Return a fresh dynamic axis."""
    return torch.export.Dim("n", min=least, max=MAX_ROWS)


def language_model(module: torch.nn.Module) -> Method:
    """Return a method of tokens [1, n] and positions [n]."""
    n = rows()
    shapes = {"input_ids": {1: n}, "position": {0: n}}
    return module, (torch.zeros(1, 3, dtype=torch.long), torch.arange(3)), shapes


@cache
def affine(backend_id: str = UPSTREAM_BACKEND_ID) -> bytes:
    """``Affine`` on [1..16, 4], with constant methods."""
    return export(
        {"forward": (Affine(), (torch.zeros(2, 4),), ({0: rows()},))},
        backend_id=backend_id,
        constant_methods={"get_max_ctx_len": 32, "get_windows": [0, 4, 0], "get_heads": [5], "other": 7},
    )


@cache
def pointwise() -> bytes:
    """``x * 2`` on [1..16, 3]: a program without constants of its own shape."""
    return export_function(lambda x: x * 2, torch.zeros(2, 3), dynamic=True)


@cache
def tiny_lm() -> bytes:
    """``TinyLM`` as ``forward`` and its ``Greedy`` as ``forward_greedy``."""
    model = TinyLM()
    methods = {"forward": language_model(model), "forward_greedy": language_model(Greedy(model))}
    return export(methods, attention=True)


@cache
def split_lm() -> bytes:
    """``TinyLM`` in several delegates, each layer's attention in another."""
    return export({"forward": language_model(TinyLM(split=True))}, attention=True)


def cache_config(capacity: int = CAPACITY) -> CacheConfig:
    """Return what a cache for ``TinyLM`` is built from."""
    layer = LayerConfig(n_kv_heads=Attention.kv_heads, head_dim=Attention.head_dim)
    return CacheConfig(capacity=capacity, layers=[layer, layer], kv_dtype="float32")


# -- programs as bytes ---------------------------------------------------------

# Four zero bytes and the format's magic begin each delegate's payload.
_PAYLOAD_MARK = b"\0\0\0\0MLX0"


def num_delegates(program: bytes) -> int:
    """Return how many delegates a program has, over all methods."""
    return program.count(_PAYLOAD_MARK)


def with_damaged_payload(program: bytes) -> bytes:
    """Return a program whose first payload lacks its magic; everything around it is as it was."""
    return program.replace(_PAYLOAD_MARK, b"\0\0\0\0MLXx", 1)


def payload_range(program: bytes) -> range:
    """Return the positions of the first payload's bytes."""
    start = program.index(_PAYLOAD_MARK)
    size, _ = struct.unpack_from("<QQ", program, start + 8)
    return range(start, start + size)


# -- processes of their own ----------------------------------------------------

# ExecuTorch's runtime imports its exporter for one decorator, which is most of a process's start; no script
# here needs it.
_PREAMBLE = """
import importlib.util, sys, types
exir = types.ModuleType("executorch.exir")
exir.__path__ = [importlib.util.find_spec("executorch").submodule_search_locations[0] + "/exir"]
sys.modules["executorch.exir"] = exir
"""


def start_process(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a Python process that runs a script; ``finish_process`` waits for it."""
    command = [sys.executable, "-c", _PREAMBLE + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish_process(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return a process's exit status, standard output and standard error."""
    try:
        output, errors = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def run_process(script: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run a script in a Python process of its own."""
    return finish_process(start_process(script, *arguments))
