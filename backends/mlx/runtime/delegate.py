"""The delegate: what ExecuTorch's init and execute calls mean.

The two functions given to the trampoline never raise. An exception is kept for the calling thread, from which the
package's loader takes it and raises it again; under stock ``executorch.runtime`` it is logged, and ExecuTorch's own
RuntimeError carries the code only.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from executorch_mlx.extension.llm.cache.session import active_key, installed_cache

from ..program import Graph, SlotType, read_payload, verify_graph
from ..program.dtypes import SCALAR_TYPE_NAMES
from ..program.verify import static_shape
from .caches import MLXCache
from .compile import CompiledProgram, check_supported
from .device import DTYPES, LOCK, STREAM, dtype_name, mx

logger = logging.getLogger("executorch_mlx")

# ExecuTorch error codes (runtime/core/error.h).
_OK = 0x00
_INTERNAL = 0x01
_INVALID_ARGUMENT = 0x12
_DELEGATE_INVALID_COMPATIBILITY = 0x30


@dataclass
class Loading:
    """One program's delegates as they are loaded, and the constants they share."""

    delegates: list[Delegate] = field(default_factory=list)
    constants: WeakValueDictionary[tuple[Any, ...], mx.array] = field(default_factory=WeakValueDictionary)


# Set by the package's loader around a load; None under stock executorch.runtime.
current_loading: ContextVar[Loading | None] = ContextVar("executorch_mlx_loading", default=None)

_raised = threading.local()


def take_error() -> BaseException | None:
    """Return the exception that the calling thread's last delegate call ended with, once."""
    error: BaseException | None = getattr(_raised, "error", None)
    _raised.error = None
    return error


class managed_calls:  # noqa: N801  a context manager, used like a function
    """Inside, the caller raises what delegate calls of this thread leave behind; outside, it is logged."""

    def __enter__(self) -> None:
        _raised.managed = getattr(_raised, "managed", 0) + 1
        _raised.error = None

    def __exit__(self, *_: object) -> None:
        _raised.managed -= 1


def _keep(error: BaseException, what: str) -> int:
    """Keep an exception for the calling thread and return the code that stands for it."""
    _raised.error = error
    if not getattr(_raised, "managed", 0):
        logger.error("%s failed: %s: %s", what, type(error).__name__, error, exc_info=error)
    return _INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError, LookupError)) else _INTERNAL


class Delegate:
    """One delegated subgraph of a loaded method."""

    def __init__(self, payload: bytes, named_data: Any, loading: Loading | None) -> None:
        graph = read_payload(payload)
        verify_graph(graph)
        check_supported(graph)
        shared = Loading() if loading is None else loading
        with LOCK, mx.stream(STREAM):
            self.program = CompiledProgram(graph, _import_constants(graph, named_data, shared))
        self._key_at_load = active_key()
        self._inputs = [_tensor_meta(graph, entry) for entry in graph.input_map]
        self._outputs = [_tensor_meta(graph, entry) for entry in graph.output_map]

    def cache(self) -> MLXCache | None:
        """Return the cache that a run started now attends over, or None where the program uses none.

        Raises:
            LookupError: the program needs a cache, and there was no session active, now or when it was loaded.
            TypeError: the active cache is no MLX cache.
        """
        if not self.program.uses_cache:
            return None
        cache = installed_cache(active_key() or self._key_at_load)
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

    def execute(self, arguments: Any) -> None:
        """Run once on a delegate call's arguments: inputs, then outputs."""
        num_inputs, num_outputs = len(self._inputs), len(self._outputs)
        if len(arguments) != num_inputs + num_outputs:
            raise ValueError(
                f"the delegate takes {num_inputs} inputs and {num_outputs} outputs, got {len(arguments)} arguments"
            )
        with LOCK, mx.stream(STREAM):
            inputs = [self._input(arguments, index) for index in range(num_inputs)]
            cache = self.cache()
            own_step = nullcontext() if cache is None or cache.in_step else cache.step()
            with own_step:
                outputs = self.program(inputs, cache)
                outputs = [self._as_declared(index, out) for index, out in enumerate(outputs)]
                self._evaluate(outputs, cache)
                for index, out in enumerate(outputs):
                    self._check_output(index, out)
                    arguments.set(num_inputs + index, out)

    def _input(self, arguments: Any, index: int) -> Any:
        value, meta = arguments.get(index), self._inputs[index]
        if isinstance(value, (int, float)):
            return value
        if value is None:
            raise ValueError(f"delegate input {index} is missing")
        if meta is not None and value.scalar_type != meta.scalar_type:
            raise TypeError(
                f"delegate input {index}: expected {SCALAR_TYPE_NAMES[meta.scalar_type]}, got"
                f" {SCALAR_TYPE_NAMES[value.scalar_type]}"
            )
        return _import(value)

    def _as_declared(self, index: int, out: Any) -> Any:
        """Give an output the dtype the program declares: an exporter may compute in a wider one."""
        meta = self._outputs[index]
        if not isinstance(out, mx.array):
            return out
        return mx.contiguous(out if meta is None else out.astype(DTYPES[meta.scalar_type]))

    def _check_output(self, index: int, out: Any) -> None:
        meta = self._outputs[index]
        if meta is None or not isinstance(out, mx.array):
            return
        # An unbounded or unset maximum admits any size.
        fits = len(meta.shape) == out.ndim and all(
            size == dim.value
            if dim.value >= 0
            else size >= min(dim.min_value, 1) and (dim.max_value < 0 or size <= dim.max_value)
            for size, dim in zip(out.shape, meta.shape, strict=False)
        )
        if not fits:
            shape = [dim.value if dim.value >= 0 else f"{dim.min_value}..{dim.max_value}" for dim in meta.shape]
            raise ValueError(f"delegate output {index}: expected shape {shape}, got {list(out.shape)}")

    @staticmethod
    def _evaluate(outputs: list[Any], cache: MLXCache | None) -> None:
        pools = cache.release() if cache is not None else []
        try:
            mx.eval([out for out in outputs if isinstance(out, mx.array)], pools)
        except Exception as error:
            if cache is not None:
                cache.mark_lost(f"{type(error).__name__}: {error}")
            raise


def init(payload: bytes, named_data: Any) -> Delegate | int:
    """The trampoline's init: a handle, or an error code."""
    try:
        loading = current_loading.get()
        delegate = Delegate(payload, named_data, loading)
        if loading is not None:
            loading.delegates.append(delegate)
    except BaseException as error:
        _keep(error, "loading an MLX delegate")
        return _DELEGATE_INVALID_COMPATIBILITY
    return delegate


def execute(delegate: Delegate, arguments: Any) -> int:
    """The trampoline's execute: an error code."""
    return _guarded(lambda: delegate.execute(arguments), "an MLX delegate")


def _guarded(call: Callable[[], None], what: str) -> int:
    try:
        call()
    except BaseException as error:
        return _keep(error, what)
    return _OK


def _tensor_meta(graph: Graph, entry: Any) -> Any:
    is_described = entry.slot_type == SlotType.TensorSlot and entry.idx < len(graph.tensor_meta)
    return graph.tensor_meta[entry.idx] if is_described else None


def _import(tensor: Any) -> mx.array:
    """Copy a trampoline tensor into MLX."""
    if math.prod(tensor.shape) == 0:
        return mx.zeros(tensor.shape, DTYPES[tensor.scalar_type])
    array = mx.array(tensor)
    if array.dtype != DTYPES[tensor.scalar_type]:
        raise TypeError(
            f"MLX imported {SCALAR_TYPE_NAMES[tensor.scalar_type]} as {dtype_name(array.dtype)}, which is not supported"
        )
    return array


def _import_constants(graph: Graph, named_data: Any, loading: Loading) -> dict[int, mx.array]:
    """Return an array per constant slot; one that another delegate of the program has imported is shared."""
    arrays: dict[int, mx.array] = {}
    for named in graph.named_slots:
        index = named.slot.idx
        if named.slot.slot_type != SlotType.TensorSlot or index >= graph.num_constant_tensors:
            continue
        meta = graph.tensor_meta[index]
        assert meta is not None, "the verifier has checked that constants are described"
        key = (named.name, static_shape(index, meta), meta.scalar_type)
        array = loading.constants.get(key)
        if array is None:
            array = loading.constants[key] = _import(named_data.tensor(*key))
        arrays[index] = array
    return arrays
