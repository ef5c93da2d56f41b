"""The delegate: what ExecuTorch's init and execute calls mean.

The two functions given to the trampoline never raise. An exception is kept for the calling thread, from which the
package's loader takes it and raises it again; under stock ``executorch.runtime`` it is logged, and ExecuTorch's own
RuntimeError carries the code only.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from executorch_mlx.extension.llm.cache.session import active_key, installed_cache

from ..program import Graph, ProgramError, SlotType, TensorMeta, read_payload, verify_graph
from ..program.dtypes import SCALAR_TYPE_NAMES
from ..program.verify import static_shape
from .caches import MLXCache
from .compile import CompiledProgram, check_supported
from .device import DTYPES, MEMORY_BYTES, STREAM, dtype_name, exclusive, mx
from .expand import expand
from .fuse import fuse

logger = logging.getLogger("executorch_mlx")

# ExecuTorch error codes (runtime/core/error.h).
_OK = 0x00
_INTERNAL = 0x01
_INVALID_ARGUMENT = 0x12
_DELEGATE_INVALID_COMPATIBILITY = 0x30


@dataclass
class Loading:
    """One program's delegates as they are loaded, the constants they share, and how they are to run."""

    allow_kernels: bool = False
    expand_weights: bool = False
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
    """Keep an exception for whoever raises it again, or log it, and return the code that stands for it."""
    if getattr(_raised, "managed", 0):
        _raised.error = error
    else:
        logger.error("%s failed: %s: %s", what, type(error).__name__, error, exc_info=error)
    return _INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError, LookupError)) else _INTERNAL


class Delegate:
    """One delegated subgraph of a loaded method."""

    def __init__(self, payload: bytes, named_data: Any, loading: Loading | None) -> None:
        graph = read_payload(payload)
        facts = verify_graph(graph, MEMORY_BYTES)
        shared = Loading() if loading is None else loading
        check_supported(graph, allow_kernels=shared.allow_kernels)
        with exclusive(), mx.stream(STREAM):
            constants: MutableMapping[int, mx.array] = _constants(graph, named_data, shared)
            expansion = expand(graph, constants, shared.constants) if shared.expand_weights else None
            constants = constants if expansion is None else expansion.constants
            fusion = fuse(graph, constants, expansion, shared.constants)
            try:
                self.program = CompiledProgram(
                    graph,
                    constants,
                    facts,
                    allow_kernels=shared.allow_kernels,
                    expansion=expansion,
                    fusion=fusion,
                )
            except (IndexError, TypeError, ValueError) as error:
                raise ProgramError(f"an instruction cannot be compiled: {error}") from error
        self._key_at_load = active_key()
        self._inputs = [_tensor_meta(graph, entry) for entry in graph.input_map]
        self._outputs = [_tensor_meta(graph, entry) for entry in graph.output_map]

    def cache(self) -> MLXCache[Any] | None:
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
        with exclusive(), mx.stream(STREAM):
            inputs = [self._input(arguments, index) for index in range(num_inputs)]
            cache = self.cache()
            own_step = nullcontext() if cache is None or cache.in_step else cache.step()
            with own_step:
                self._run(inputs, cache, arguments)

    def _run(self, inputs: list[Any], cache: MLXCache[Any] | None, arguments: Any) -> None:
        try:
            outputs = self.program(inputs, cache)
            outputs = [self._as_declared(index, out) for index, out in enumerate(outputs)]
            self._evaluate(outputs, self.program.pending(), cache)
            self.program.check()
            for index, out in enumerate(outputs):
                if isinstance(out, mx.array):
                    _check_shape(f"delegate output {index}", self._outputs[index], out.shape)
                arguments.set(len(self._inputs) + index, out)
            self.program.commit()
        except BaseException:
            if cache is not None:
                cache.fail_step()  # should the caller hold the step open, it cannot be committed
            raise

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
        _check_shape(f"delegate input {index}", meta, value.shape)
        return _import(value)

    def _as_declared(self, index: int, out: Any) -> Any:
        """Give an output the dtype the program declares: an exporter may compute in a wider one."""
        meta = self._outputs[index]
        if not isinstance(out, mx.array):
            return out
        return mx.contiguous(out if meta is None else out.astype(DTYPES[meta.scalar_type]))

    @staticmethod
    def _evaluate(outputs: list[Any], pending: list[mx.array], cache: MLXCache[Any] | None) -> None:
        pools = cache.release() if cache is not None else []
        try:
            mx.eval([out for out in outputs if isinstance(out, mx.array)], pending, pools)
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


class _Constants(MutableMapping[int, mx.array]):
    """An array per constant slot, imported when it is asked for; what other delegates have imported is shared.

    The largest come first: a constant is in memory twice while it is copied, and most of the others are not there yet.
    """

    def __init__(self, keys: Mapping[int, tuple[Any, ...]], named_data: Any, loading: Loading) -> None:
        self._keys = dict(sorted(keys.items(), key=lambda item: -math.prod(item[1][1])))
        self._named_data, self._loading = named_data, loading
        self._held: dict[int, mx.array] = {}

    def __getitem__(self, index: int) -> mx.array:
        if index not in self._held:
            key = self._keys[index]
            array = self._loading.constants.get(key)
            if array is None:
                array = self._loading.constants[key] = _import(self._named_data.tensor(*key))
            self._held[index] = array
        return self._held[index]

    def __setitem__(self, index: int, array: mx.array) -> None:
        raise TypeError("constants are the program's")

    def __delitem__(self, index: int) -> None:
        del self._keys[index]
        self._held.pop(index, None)

    def __contains__(self, index: object) -> bool:
        return index in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _constants(graph: Graph, named_data: Any, loading: Loading) -> _Constants:
    """Return a program's constants."""
    keys: dict[int, tuple[Any, ...]] = {}
    for named in graph.named_slots:
        index = named.slot.idx
        if named.slot.slot_type != SlotType.TensorSlot or index >= graph.num_constant_tensors:
            continue
        meta = graph.tensor_meta[index]
        assert meta is not None, "the verifier has checked that constants are described"
        keys[index] = (named.name, static_shape(index, meta), meta.scalar_type)
    return _Constants(keys, named_data, loading)
