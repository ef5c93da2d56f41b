"""The delegate: what ExecuTorch's init and execute calls mean.

The two functions given to the trampoline never raise. An exception is kept for the calling thread, from which the
package's loader takes it and raises it again; under stock ``executorch.runtime`` it is logged, and ExecuTorch's own
RuntimeError carries the code only.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from executorch_mlx.extension.llm.cache.session import active_key

from ..program import Graph, ProgramError, SlotType, read_payload, verify_graph
from ..program.dtypes import SCALAR_TYPE_NAMES
from ..program.verify import static_shape
from .caches import MLXCache
from .compile import CompiledProgram, check_supported
from .device import DTYPES, MEMORY_BYTES, STREAM, dtype_name, exclusive, mx
from .execution import Signature, cache_of, run_step
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
        self._signature = Signature(graph)

    def cache(self) -> MLXCache[Any] | None:
        """Return the cache that a run started now attends over, or None where the program uses none.

        Raises:
            LookupError: the program needs a cache, and there was no session active, now or when it was loaded.
            TypeError: the active cache is no MLX cache.
        """
        return cache_of(self.program, active_key() or self._key_at_load)

    def execute(self, arguments: Any) -> None:
        """Run once on a delegate call's arguments: inputs, then outputs."""
        num_inputs, num_outputs = len(self._signature.inputs), len(self._signature.outputs)
        if len(arguments) != num_inputs + num_outputs:
            raise ValueError(
                f"the delegate takes {num_inputs} inputs and {num_outputs} outputs, got {len(arguments)} arguments"
            )

        def deliver(outputs: list[Any]) -> None:
            for index, out in enumerate(outputs):
                self._signature.check_output(f"delegate output {index}", index, out)
                arguments.set(num_inputs + index, out)

        with exclusive(), mx.stream(STREAM):
            inputs = [self._input(arguments, index) for index in range(num_inputs)]
            run_step(self.program, self._signature, inputs, self.cache(), deliver)

    def _input(self, arguments: Any, index: int) -> Any:
        value = arguments.get(index)
        if isinstance(value, (int, float)):
            return value
        if value is None:
            raise ValueError(f"delegate input {index} is missing")
        self._signature.check_input(f"delegate input {index}", index, value.scalar_type, value.shape)
        return _import(value)


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
