"""``load_program``: ExecuTorch's runtime, with Python's errors as themselves and a whole execute under one lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

# Not through executorch.runtime, which imports ExecuTorch's whole exporter: seconds, on every start.
from executorch.extension.pybindings import _C

from ..identity import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID
from ..program.dtypes import SCALAR_TYPE_NAMES as _SCALAR_TYPES
from .backend import HELD_BACKEND_IDS
from .delegate import Delegate, Loading, current_loading, managed_calls, take_error
from .device import exclusive, is_cpu
from .direct import DirectMethod
from .pte import HEAD_BYTES, check_length, is_one_delegate, program_bytes, retag

CPU_WEIGHTS = ("stored", "float32")
"""How a program's quantized weights lie in a CPU's memory."""

_OLDEST_TORCH = (2, 13)


def check_torch(version: str) -> None:
    """Refuse a torch whose tensors ExecuTorch 1.5's bindings, built against a newer one, would misread.

    Raises:
        ImportError: naming the version needed.
    """
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < _OLDEST_TORCH:
        needed = ".".join(map(str, _OLDEST_TORCH))
        raise ImportError(
            f"ExecuTorch 1.5 runs with torch {needed} or newer, found {version}: pip install 'torch>={needed}'"
        )


check_torch(torch.__version__)


class Method:
    """A loaded method; as ``executorch.runtime.Method``.

    One step of the active KV cache spans a whole ``execute``, however many delegates it runs: an error leaves the
    cache where it was, and the same call may be made again.
    """

    def __init__(self, method: Any, delegates: list[Delegate], owner: Any, is_one_delegate: Callable[[], bool]) -> None:
        self._method = method
        self._owner = owner  # the method points into its program
        self._delegates = delegates
        self._is_one_delegate = is_one_delegate

    def execute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the method.

        Args:
            inputs: torch tensors and numbers, as the method was exported with.

        Returns:
            The outputs; tensors are torch tensors of their own memory.

        Raises:
            LookupError: the program attends over a KV cache, and no session is active.
            ValueError: an input of a delegated program is not contiguous.
            Exception: whatever the delegate or its cache raised, as it was raised.
            RuntimeError: ExecuTorch refused the call.
        """
        if self._delegates:
            _check_contiguous(inputs)
        with exclusive(), managed_calls():
            attending = [delegate.cache() for delegate in self._delegates if delegate.program.uses_cache]
            (cache,) = {id(cache): cache for cache in attending}.values() or (None,)
            with nullcontext() if cache is None or cache.in_step else cache.step():
                try:
                    outputs: Sequence[Any] = self._method(inputs, False)
                except RuntimeError as failure:
                    raise (take_error() or _explained(failure, self.metadata, inputs)) from failure
                owned = [_owned(value) for value in outputs]
                # Under the lock: a thread that drops torch tensors while the interpreter exits aborts the process.
                del outputs
                return owned

    def direct(self) -> DirectMethod:
        """Return the method as a function of MLX arrays, without ExecuTorch in between.

        Raises:
            OSError: the file that the program was loaded from is no longer there.
            ValueError: the method is not one MLX delegate.
        """
        if len(self._delegates) != 1 or not self._is_one_delegate():
            raise ValueError(
                f"the method has {len(self._delegates)} MLX delegates, or operators of its own: a direct method is one"
                " delegate, which a model exported with MLXPartitioner becomes where all of its operators are supported"
            )
        return DirectMethod(self._delegates[0].program)

    @property
    def metadata(self) -> Any:
        """ExecuTorch's description of the method's inputs and outputs."""
        return self._method.method_meta()


class Program:
    """A loaded program; as ``executorch.runtime.Program``."""

    def __init__(self, program: Any, source: str | Path | bytes, loading: Loading) -> None:
        self._program = program
        self._source = source  # a program from bytes points into them
        self._names = {program.get_method_name(index) for index in range(program.num_methods())}
        self._methods: dict[str, Method] = {}
        # Kept by the program, so that methods loaded one after the other share constants.
        self._loading = loading

    @property
    def method_names(self) -> set[str]:
        """Names of the program's methods, the constant ones (``get_max_ctx_len`` ...) included."""
        return set(self._names)

    def load_method(self, name: str) -> Method:
        """Load a method; the same one each time.

        Raises:
            ValueError: the program has no such method.
            ProgramError: a delegate's payload is damaged or needs what this runtime does not have.
        """
        self._check_name(name)
        with exclusive(), managed_calls():
            if name not in self._methods:
                self._methods[name] = self._load(name)
            return self._methods[name]

    def _load(self, name: str) -> Method:
        loaded_before = len(self._loading.delegates)
        token = current_loading.set(self._loading)
        try:
            method = self._program.load_method(name)
            return Method(
                method,
                self._loading.delegates[loaded_before:],
                (self._program, self._source),
                lambda: is_one_delegate(_without_segments(self._source), name),
            )
        except RuntimeError as failure:
            raise (take_error() or failure) from failure
        finally:
            del self._loading.delegates[loaded_before:]
            current_loading.reset(token)

    def metadata(self, method_name: str) -> Any:
        """ExecuTorch's description of a method, without loading it."""
        self._check_name(method_name)
        return self._program.method_meta(method_name)

    def constants(self) -> dict[str, Any]:
        """Return the values of the constant methods: those that are called ``get_...`` and take nothing.

        A list of one number comes back as the number: ExecuTorch cannot tell them apart.
        """
        names = [n for n in self._names if n.startswith("get_") and self._program.method_meta(n).num_inputs() == 0]
        return {name: _plain(self.load_method(name).execute([])) for name in sorted(names)}

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise ValueError(f"the program has no method {name!r}; it has {', '.join(sorted(self._names))}")


def load_program(
    source: str | Path | bytes, *, native: bool = False, allow_kernels: bool = False, cpu_weights: str = "stored"
) -> Program:
    """Load an ExecuTorch program.

    Args:
        source: a path (its weights are mapped, not read) or the program's bytes.
        native: leave programs for "MLXBackend" to whoever registered that id first, such as ExecuTorch's own runtime
            in Apple's wheel. By default this package runs them, whoever holds the id.
        allow_kernels: run kernels whose Metal source comes with the program, where there is Metal. Such a kernel reads
            and writes the GPU's memory as it likes: allow it for programs that you made.
        cpu_weights: "stored", or "float32": on a CPU, where MLX multiplies with quantized weights slowly, expand them
            as they are loaded, to four bytes per number. On a GPU there is no difference.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an ExecuTorch program, or a truncated one; or ``cpu_weights`` is something else.
        RuntimeError: ExecuTorch cannot load it.
    """
    if cpu_weights not in CPU_WEIGHTS:
        raise ValueError(f"cpu_weights: expected one of {', '.join(CPU_WEIGHTS)}, got {cpu_weights!r}")
    if isinstance(source, (str, Path)):
        path = Path(source)
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        check_length(head, path.stat().st_size)
    else:
        check_length(source[:HEAD_BYTES], len(source))
    if not native and UPSTREAM_BACKEND_ID not in HELD_BACKEND_IDS:
        data = Path(source).read_bytes() if isinstance(source, (str, Path)) else source
        source = retag(data, UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)
    options = {
        "enable_etdump": False,
        "debug_buffer_size": 0,
        "program_verification": _C.Verification.InternalConsistency,
        "data_path": None,
    }
    loading = Loading(allow_kernels=allow_kernels, expand_weights=cpu_weights == "float32" and is_cpu())
    if isinstance(source, (str, Path)):
        return Program(_C._load_program(str(source), **options), source, loading)
    return Program(_C._load_program_from_buffer(source, **options), source, loading)


def _without_segments(source: str | Path | bytes) -> bytes:
    """Return a program's own bytes, without the weights behind them."""
    if isinstance(source, bytes):
        return source
    with Path(source).open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        return file.read(program_bytes(head))


def _check_contiguous(inputs: Sequence[Any]) -> None:
    """Refuse what ExecuTorch would hand on as if its elements lay in row-major order."""
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            raise ValueError(
                f"input {index}: expected a contiguous tensor, got shape {list(value.shape)} with strides"
                f" {list(value.stride())}: call .contiguous()"
            )


def _owned(value: Any) -> Any:
    """Copy an output, which lies in memory that the method's next run overwrites.

    ``clone`` would wake torch's threads for a step's logits, which then compete with the BLAS's for the cores.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():
        return value.clone()
    copy = torch.empty_like(value)
    ctypes.memmove(copy.data_ptr(), value.data_ptr(), value.nbytes)
    return copy


def _plain(outputs: Sequence[Any]) -> Any:
    values = [value.tolist() if hasattr(value, "tolist") else value for value in outputs]
    return values[0] if len(values) == 1 else values


def _explained(failure: RuntimeError, metadata: Any, inputs: Sequence[Any]) -> Exception:
    """Say which input ExecuTorch refused, where it is one; its own message holds a code only."""
    expected = metadata.num_inputs()
    if len(inputs) != expected:
        return ValueError(f"the method takes {expected} inputs, got {len(inputs)}")
    for index, value in enumerate(inputs):
        try:
            info = metadata.input_tensor_meta(index)
        except (IndexError, RuntimeError):
            if hasattr(value, "dtype"):
                return TypeError(f"input {index}: expected a number, got a tensor")
            continue
        wanted = _SCALAR_TYPES.get(int(info.dtype()), str(info.dtype()))
        if not hasattr(value, "dtype"):
            return TypeError(f"input {index}: expected {wanted} {list(info.sizes())}, got {type(value).__name__}")
        name = str(value.dtype).rsplit(".", 1)[-1]
        if name != wanted:
            return TypeError(f"input {index}: expected {wanted}, got {name}")
        if len(value.shape) != len(info.sizes()):
            return ValueError(f"input {index}: expected {len(info.sizes())} dimensions, got shape {list(value.shape)}")
        if any(size > bound for size, bound in zip(value.shape, info.sizes(), strict=True)):
            return ValueError(
                f"input {index}: shape {list(value.shape)} exceeds the program's bound {list(info.sizes())}"
            )
    return failure
