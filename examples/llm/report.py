"""What an export has produced, in numbers and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from executorch_mlx.backends.mlx.partitioner import NotDelegated
from executorch_mlx.backends.mlx.passes import AttentionLayer


@dataclass(frozen=True)
class Report:
    """What an export has produced.

    Attributes:
        model: the model's class.
        path: the program.
        size_bytes: its size.
        layers: the caches it needs, by layer id.
        num_delegates: delegated subgraphs of a step; one where everything runs on MLX.
        num_nodes: instructions of these.
        weights: bytes of the delegates' constants by dtype; quantized numbers are packed into uint32.
        not_delegated: calls left to ExecuTorch's own kernels, and why.
        seconds: time per stage.
    """

    model: str
    path: Path
    size_bytes: int
    layers: tuple[AttentionLayer, ...]
    num_delegates: int
    num_nodes: int
    weights: Mapping[str, int]
    not_delegated: tuple[NotDelegated, ...]
    seconds: Mapping[str, float]

    def summary(self) -> Iterator[str]:
        """Yield a few lines."""
        windows = sum(layer.window is not None for layer in self.layers)
        yield f"{self.path}: {self.size_bytes / 1e6:.0f} MB, {self.num_delegates} MLX delegate(s)"
        yield f"KV caches: {len(self.layers)}, of which {windows} with a sliding window"
        yield "time: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        yield from self._left_out()

    def details(self) -> Iterator[str]:
        """Yield all there is to say."""
        yield f"{self.model}: {self.path}, {self.size_bytes / 1e6:.1f} MB"
        yield f"delegates: {self.num_delegates}, with {self.num_nodes} instructions"
        yield "weights: " + (
            ", ".join(f"{size / 1e6:.1f} MB {dtype}" for dtype, size in self.weights.items()) or "none"
        )
        yield f"KV caches: {len(self.layers)}"
        yield from (f"  {line}" for line in cache_lines(self.layers))
        yield "time: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        yield from self._left_out() if self.not_delegated else ["not delegated: nothing"]

    def _left_out(self) -> Iterator[str]:
        for call in self.not_delegated:
            yield f"not delegated: {call.operator} in {call.module}: {call.reason} {call.source}".rstrip()


def cache_lines(layers: tuple[AttentionLayer, ...]) -> Iterator[str]:
    """Describe caches, those that are alike in one line."""
    for form, alike in groupby(layers, key=_form):
        ids = [layer.layer_id for layer in alike]
        yield f"{ids[0]}{'' if len(ids) == 1 else f' to {ids[-1]}'}: {form}"


def _form(layer: AttentionLayer) -> str:
    values = "" if layer.v_head_dim == layer.head_dim else f", values of {layer.v_head_dim}"
    window = "full attention" if layer.window is None else f"a sliding window of {layer.window}"
    return f"{layer.n_kv_heads} head(s) of {layer.head_dim}{values}, {window}"
