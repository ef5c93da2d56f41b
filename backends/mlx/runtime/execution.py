"""One call of a compiled program: its arguments compared, its cache found, its step taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from executorch_mlx.extension.llm.cache.session import installed_cache

from ..program import Graph, SlotType, TensorMeta
from ..program.dtypes import SCALAR_TYPE_NAMES
from .caches import MLXCache
from .compile import CompiledProgram
from .device import DTYPES, mx


class Signature:
    """What a program declares of its inputs and outputs; None for a number, or where it says nothing.

    Attributes:
        inputs: descriptions, in order.
        outputs: the same of the outputs.
    """

    def __init__(self, graph: Graph) -> None:
        self.inputs = [_description(graph, entry) for entry in graph.input_map]
        self.outputs = [_description(graph, entry) for entry in graph.output_map]

    def check_input(self, what: str, index: int, scalar_type: int, shape: Sequence[int]) -> None:
        """Compare a tensor with what the program declares.

        Raises:
            TypeError: another dtype.
            ValueError: another shape.
        """
        meta = self.inputs[index]
        if meta is not None and scalar_type != meta.scalar_type:
            raise TypeError(
                f"{what}: expected {SCALAR_TYPE_NAMES[meta.scalar_type]}, got {SCALAR_TYPE_NAMES[scalar_type]}"
            )
        _check_shape(what, meta, shape)

    def check_output(self, what: str, index: int, out: Any) -> None:
        """Raise ValueError for an array whose shape is not what the program declares."""
        if isinstance(out, mx.array):
            _check_shape(what, self.outputs[index], out.shape)

    def declared(self, index: int, out: Any) -> Any:
        """Give an output the dtype that the program declares (an exporter may compute in a wider one), row by row."""
        meta = self.outputs[index]
        if not isinstance(out, mx.array):
            return out
        return mx.contiguous(out if meta is None else out.astype(DTYPES[meta.scalar_type]))


def cache_of(program: CompiledProgram, key: str | None) -> MLXCache[Any] | None:
    """Return the cache that a run attends over, or None where the program uses none.

    Args:
        program: the program.
        key: the session's key; None where there is no session.

    Raises:
        LookupError: the program needs a cache, and no session is active.
        TypeError: the session's cache is no MLX cache.
    """
    if not program.uses_cache:
        return None
    cache = installed_cache(key)
    if cache is None:
        raise LookupError(
            "the program attends over a KV cache and no session is active: run it inside"
            ' `with CacheSession(build("MLXBackend", "sequence", config)) as session:`'
        )
    if not isinstance(cache, MLXCache):
        raise TypeError(
            f"the active cache is a {type(cache).__name__}, which holds no MLX arrays: build it for 'MLXBackend'"
        )
    return cache


def run_step(
    program: CompiledProgram,
    signature: Signature,
    inputs: Sequence[Any],
    cache: MLXCache[Any] | None,
    deliver: Callable[[list[Any]], None],
    *,
    numbers: Mapping[int, Any] | None = None,
    waits: bool = True,
) -> None:
    """Run a program once, in a step of its own unless the cache has one open. An error leaves the cache as it was.

    Args:
        program: the program.
        signature: what it declares.
        inputs: MLX arrays and numbers, which have been compared with that.
        cache: what it attends over.
        deliver: takes the outputs, once they are there if the run waits for them; what it raises aborts the step.
        numbers: see ``CompiledProgram``.
        waits: whether outputs and pools are evaluated before they are delivered, or only given to the device.
    """
    with nullcontext() if cache is None or cache.in_step else cache.step():
        try:
            outputs = program(inputs, cache, numbers=numbers, reads_inputs=waits)
            outputs = [signature.declared(index, out) for index, out in enumerate(outputs)]
            arrays = [out for out in outputs if isinstance(out, mx.array)]
            _evaluate([*arrays, *program.pending()], cache, mx.eval if waits else mx.async_eval)
            if waits:
                program.check()
            deliver(outputs)
            program.commit()
        except BaseException:
            if cache is not None:
                cache.fail_step()  # should the caller hold the step open, it cannot be committed
            raise


def _evaluate(arrays: list[mx.array], cache: MLXCache[Any] | None, how: Callable[..., Any]) -> None:
    pools = cache.release() if cache is not None else []
    try:
        how(arrays, pools)
    except Exception as error:
        if cache is not None:
            cache.mark_lost(f"{type(error).__name__}: {error}")
        raise


def _description(graph: Graph, entry: Any) -> TensorMeta | None:
    is_described = entry.slot_type == SlotType.TensorSlot and entry.idx < len(graph.tensor_meta)
    return graph.tensor_meta[entry.idx] if is_described else None


def _check_shape(what: str, meta: TensorMeta | None, shape: Sequence[int]) -> None:
    """Compare with what the program declares.

    Lower bounds are left out: they are the tracer's, to which 0 and 1 are special, not the model's.

    Raises:
        ValueError: another rank, another static size, or a dynamic one past its bound.
    """
    if meta is None:
        return
    fits = len(meta.shape) == len(shape) and all(
        size == dim.value if dim.value >= 0 else dim.max_value < 0 or size <= dim.max_value
        for size, dim in zip(shape, meta.shape, strict=True)
    )
    if not fits:
        expected = [
            str(dim.value) if dim.value >= 0 else f"up to {dim.max_value}" if dim.max_value >= 0 else "any"
            for dim in meta.shape
        ]
        raise ValueError(f"{what}: expected shape [{', '.join(expected)}], got {list(shape)}")
