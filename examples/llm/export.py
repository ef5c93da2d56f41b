"""Exports a causal language model to a ``.pte`` whose KV cache lies outside the program."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram

from executorch_mlx.backends.mlx import UPSTREAM_BACKEND_ID, MLXPartitioner
from executorch_mlx.backends.mlx.passes import AttentionLayer, argmax_output, quantize_weights, rewrite_attention
from executorch_mlx.backends.mlx.program import Graph, read_payload
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_NAMES
from executorch_mlx.backends.mlx.program.types import WIDTHS
from executorch_mlx.backends.mlx.quantized import GROUP_SIZES

from .checkpoint import convert
from .folder import MODEL_FILE
from .report import Report
from .supported import refuse_modules

Progress = Callable[[str], None]

QUANTIZATIONS = {"4w": 4, "8w": 8}
"""Bits of a weight, by the names that ``export_model`` knows."""


class FlatCausalLM(torch.nn.Module):
    """A causal language model as a function of one flat step: tokens of any number of sequences on one axis."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Run one step.

        Args:
            input_ids: int64 [1, n].
            position: int64 [n], each token's position in its own sequence.
            logits_rows: int64 [m], the tokens whose logits are wanted.

        Returns:
            float32 [1, m, vocabulary].
        """
        out = self.model(input_ids, position_ids=position.unsqueeze(0), use_cache=False, logits_to_keep=logits_rows)
        logits: torch.Tensor = out.logits
        return logits.float()


def export_model(
    model: torch.nn.Module,
    output_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_context: int | None = None,
    max_step_tokens: int = 512,
    quantize: str | None = None,
    group_size: int = 64,
    backend_id: str = UPSTREAM_BACKEND_ID,
    progress: Progress = lambda stage: None,
) -> Report:
    """Export a Hugging Face causal language model.

    Args:
        model: in evaluation mode, loaded with ``attn_implementation="sdpa"``.
        output_dir: where ``model.pte`` is written.
        dtype: dtype of weights and activations; None is the model's own. Another one converts the model itself.
        max_context: longest sequence; None takes the model's own limit.
        max_step_tokens: most tokens in one step (a prompt is fed in chunks of this size).
        quantize: "4w" or "8w" stores the weights of linear layers and embeddings in 4 or 8 bits (see
            ``passes.quantize_weights``); None leaves them as the model has them.
        group_size: 32, 64 or 128 numbers of a row share a scale.
        backend_id: see ``MLXPartitioner``.
        progress: called with the name of each stage as it begins.

    Raises:
        UnsupportedModelError: a module of the model would compute something else, and its name.
        AttentionNotRewritableError: an attention of the model cannot be served by a cache outside the program.
        ValueError: an argument is out of range, or the model cannot be traced with a dynamic number of tokens.
    """
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ValueError(f"quantize: expected one of {', '.join(QUANTIZATIONS)}, got {quantize!r}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: expected one of {', '.join(map(str, sorted(GROUP_SIZES)))}, got {group_size}")
    refuse_modules(model)
    config: Any = model.config
    trained_context = int(getattr(config, "max_position_embeddings", 0) or max_context or 0)
    context = max_context or trained_context
    for name, value in (("max_context", context), ("max_step_tokens", max_step_tokens)):
        if value < 2:
            raise ValueError(f"{name}: expected 2 or more, got {value}")
    if trained_context and context > trained_context:
        raise ValueError(f"max_context: the model's own limit is {trained_context}, got {context}")
    step = min(max_step_tokens, context)
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        progress(name)
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    if dtype is not None:
        convert(model, dtype)
    with stage("trace"), torch.no_grad(), _traceable(model):
        traced = _trace(model, step)
    with stage("rewrite attention"):
        rewritten = rewrite_attention(traced, position="position")
    forward = rewritten.program
    if quantize is not None:
        with stage("quantize"):
            forward = quantize_weights(forward, QUANTIZATIONS[quantize], group_size)
    programs = {"forward": forward, "forward_greedy": argmax_output(forward)}
    partitioners = {name: MLXPartitioner(backend_id=backend_id) for name in programs}
    with stage("lower"):
        lowered = to_edge_transform_and_lower(
            programs,
            partitioner={name: [partitioner] for name, partitioner in partitioners.items()},
            constant_methods=_constant_methods(rewritten.layers, context, step, int(config.vocab_size)),
            # Where something stays outside the delegate, each pass of ExecuTorch re-traces the graph: seconds for a
            # model of 30 layers. Two are not needed here: its verifier (the delegate's own checks the result), and
            # memory formats (the delegate has none).
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
    path = Path(output_dir) / MODEL_FILE
    with stage("write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Inputs and outputs are used where they lie; planned ones would be copied in and out.
        planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
        program = lowered.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
        # Whole or not at all: a half-written program must not be taken for one.
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            program.write_to_file(file)
        part.replace(path)
    graphs = _delegates(lowered.exported_program("forward"))
    return Report(
        model=type(model).__name__,
        path=path,
        size_bytes=path.stat().st_size,
        layers=rewritten.layers,
        num_delegates=len(graphs),
        num_nodes=sum(len(chain.instructions) for graph in graphs for chain in graph.instruction_chains),
        weights=_weights(graphs),
        not_delegated=tuple(partitioners["forward"].not_delegated),
        seconds=seconds,
    )


@contextmanager
def _traceable(model: Any) -> Iterator[None]:
    """Let experts compute as a product over chosen weights: a loop over those that a step needs has no graph."""
    if not hasattr(model, "set_experts_implementation"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _delegates(program: ExportedProgram) -> list[Graph]:
    lowered = [getattr(program.graph_module, node.target) for node in program.graph.nodes if node.op == "get_attr"]
    return [read_payload(module.processed_bytes) for module in lowered]


def _weights(graphs: list[Graph]) -> dict[str, int]:
    """Return the bytes of constants by dtype."""
    sizes: Counter[str] = Counter()
    for graph in graphs:
        for meta in graph.tensor_meta[: graph.num_constant_tensors]:
            if meta is not None:
                name = SCALAR_TYPE_NAMES[meta.scalar_type]
                sizes[name] += math.prod(dim.value for dim in meta.shape) * WIDTHS[name]
    return dict(sizes)


def _trace(model: torch.nn.Module, step: int) -> ExportedProgram:
    # An example size of 1 would make the axis static.
    example = (torch.zeros(1, 3, dtype=torch.long), torch.arange(3), torch.arange(2))
    tokens, rows = torch.export.Dim("n", min=1, max=step), torch.export.Dim("m", min=1, max=step)
    shapes = {"input_ids": {1: tokens}, "position": {0: tokens}, "logits_rows": {0: rows}}
    try:
        return torch.export.export(FlatCausalLM(model), example, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises what the model's own code or its tracer raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ValueError(
            f"{type(model).__name__} cannot be traced with a dynamic number of tokens: {type(error).__name__}: {reason}"
        ) from error


def _constant_methods(
    layers: tuple[AttentionLayer, ...], max_context: int, step: int, vocab_size: int
) -> dict[str, Any]:
    """What a runner needs to know to build the caches; names as in ExecuTorch's own exporter, where it has them."""
    return {
        "get_n_caches": len(layers),
        "get_kv_heads": [layer.n_kv_heads for layer in layers],
        "get_head_dims": [layer.head_dim for layer in layers],
        "get_v_head_dims": [layer.v_head_dim for layer in layers],
        "get_windows": [layer.window or 0 for layer in layers],
        "get_prefill_chunk_size": step,
        "get_max_ctx_len": max_context,
        "get_vocab_size": vocab_size,
    }
