"""Runs cases in a child process, as the delegate runs a program: a crash or a hang ends the child, not the fuzzer.

The child's ``main`` answers one pickled ``Case`` after the other with a pickled ``Answer``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import math
import mmap
import os
import pickle
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_NAMES

# What one tensor may take, as the verifier is told, and all there is.
_TENSOR_BYTES = 32 << 20
_LIMIT_BYTES = 8 << 30
# How many instructions one run may take; one by one they are slower than in a run.
_STEPS = 1 << 16
_HASHED_BYTES = 1 << 20
_MARK_BYTES = 64
# glibc then looks, with each free, whether something has written past the end.
_CHECKED_MEMORY = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"} if sys.platform == "linux" else {}
# By its name, which is the one that pickles have its classes under.
_START = "import sys; sys.path.insert(0, sys.argv[1]); from fuzz import runner; runner.main(sys.argv[2])"
_M_PERTURB = -6  # malloc.h
# What fresh memory is filled with in the first and in the second run: results that show it differ.
_FILLS = (0x2B, 0xD4)


# Scalar type -> how numpy has it; bfloat16 as the words that stand for its numbers.
NUMPY_DTYPES = {
    scalar_type: np.dtype("uint16" if name == "bfloat16" else name) for scalar_type, name in SCALAR_TYPE_NAMES.items()
}


@dataclass(frozen=True)
class Data:
    """A tensor as the delegate gets it: ExecuTorch's scalar type, and the bytes in row-major order."""

    shape: tuple[int, ...]
    scalar_type: int
    raw: bytes

    def numbers(self) -> np.ndarray[Any, Any]:
        """Return the tensor's elements, in one dimension and not to be written."""
        return np.frombuffer(self.raw, NUMPY_DTYPES[self.scalar_type])


@dataclass(frozen=True)
class Case:
    """A program and one call of it.

    Attributes:
        payload: what the delegate is given.
        constants: by name.
        inputs: in the order of the graph's input map.
    """

    payload: bytes
    constants: dict[str, Data]
    inputs: tuple[Data | int | float, ...]


@dataclass
class Answer:
    """What became of a case.

    Attributes:
        outcome: "refused" (ProgramError at load), "raised" (any other exception), "ran", "died" or "hung".
        stage: "load" or "run".
        kind: the node kind that was compiled or run last; for ``differs`` and ``unforeseen`` the one that is about.
        error: the exception's type, or the signal.
        message: the exception's.
        frame: the innermost Python frame, as file, line and function.
        kinds: the node kinds whose instructions ran to their end.
        outputs: shape and dtype of each output, or its type.
        digest: of all outputs.
        differs: whether two runs gave different outputs.
        unforeseen: how a result is not what the verifier said it would be.
        peak_bytes: of MLX's memory.
    """

    outcome: str
    stage: str = "load"
    kind: str = ""
    error: str = ""
    message: str = ""
    frame: str = ""
    kinds: frozenset[str] = frozenset()
    outputs: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    digest: str = ""
    differs: bool = False
    unforeseen: str = ""
    peak_bytes: int = 0


# -- the parent's side ----------------------------------------------------------


class Runner:
    """A child that runs cases, started anew once one has ended it; the next one is started ahead of time."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s
        self._spare: _Child | None = None
        self._child = _Child()
        #: The cases that the present child, or the one that ended last, was given.
        self.history: list[Case] = []
        self._is_fresh = True

    def run(self, case: Case) -> Answer:
        """Run a case; "died" and "hung" are answers too."""
        self.send(case)
        return self.receive()

    def send(self, case: Case) -> None:
        """Give the child a case, whose answer ``receive`` waits for."""
        if self._is_fresh:
            self.history = []
            self._is_fresh = False
        self.history = [*self.history[-99:], case]
        self._child.send(case)
        if self._spare is None:
            self._spare = _Child()

    def receive(self) -> Answer:
        """Wait for the answer to the case sent."""
        answer = self._child.receive(self._timeout_s)
        if answer.outcome in ("died", "hung"):
            self.restart()
        return answer

    @property
    def pid(self) -> int:
        """The child's process."""
        return self._child.pid

    def restart(self) -> None:
        """Go on with a fresh child."""
        self._child.close()
        self._child, self._spare, self._is_fresh = self._spare or _Child(), None, True

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        if self._spare is not None:
            self._spare.close()


class _Child:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the child
        self._marks = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._marks.write(bytes(_MARK_BYTES))
        self._marks.flush()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **_CHECKED_MEMORY}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).parents[1]), self._marks.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, case: Case) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which receive() tells
            _write(self._process.stdin, case)

    def receive(self, timeout_s: float) -> Answer:
        assert self._process.stdout is not None
        deadline, data = time.monotonic() + timeout_s, b""
        while len(data) < 8 or len(data) < 8 + struct.unpack_from("<Q", data)[0]:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                self._process.kill()
                return Answer("hung", "run", self._mark(), error=f"no answer in {timeout_s:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                status = self._process.wait()
                self._errors.seek(0)
                text = self._errors.read().decode(errors="replace")[-3000:]
                name = f"signal {-status}" if status < 0 else f"status {status}"
                return Answer("died", "run", self._mark(), error=name, message=text)
            data += part
        answer: Answer = pickle.loads(data[8:])
        return answer

    def _mark(self) -> str:
        with open(self._marks.name, "rb") as file:
            return file.read().rstrip(b"\0").decode()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._marks.close()


def _write(pipe: Any, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


# -- the child's side -----------------------------------------------------------


class _Trace:
    """Names the instruction at work in memory that outlives the process; evaluates each one's results at once."""

    def __init__(self, path: str) -> None:
        from executorch_mlx.backends.mlx.runtime import kernels
        from executorch_mlx.backends.mlx.runtime.device import mx

        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _MARK_BYTES)
        self._mx = mx
        self.is_on = False
        self.kind = ""
        self.kinds: set[str] = set()
        #: What the verifier said of the program, and the first result that is something else, with its node's kind.
        self.facts: Any = None
        self.unforeseen: tuple[str, str] | None = None
        for kind, row in list(kernels.KERNELS.items()):
            kernels.KERNELS[kind] = self._traced(kind, row)

    def mark(self, kind: str) -> None:
        """Name what is at work."""
        self.kind = kind
        self._memory[:] = kind.encode()[:_MARK_BYTES].ljust(_MARK_BYTES, b"\0")

    def _traced(self, kind: str, row: Callable[..., Any]) -> Callable[..., Any]:
        def traced_row(node: Any, at: Any) -> Callable[[list[Any]], None]:
            self.mark(kind)
            step = row(node, at)
            written = [at(slot) for name, slot in node.slots() if node.writes(name)]

            def traced_step(env: list[Any]) -> None:
                if not self.is_on:
                    step(env)
                    return
                self.mark(kind)
                step(env)
                self.mark(kind)
                self._mx.eval([env[place] for place in written if isinstance(env[place], self._mx.array)])
                self.kinds.add(kind)
                foreseen = self.facts.results.get(id(node), [])
                # Of a slot that it writes twice, the last result is left.
                for place, known in dict(zip(written, foreseen, strict=bool(foreseen))).items():
                    surprise = _surprise(env[place], known)
                    if surprise and self.unforeseen is None:
                        self.unforeseen = kind, surprise

            return traced_step

        return traced_row


def _surprise(result: Any, known: Any) -> str:
    """Return in what a result is none of those that the verifier knew it would be, "" if it is one."""
    from executorch_mlx.backends.mlx.program.types import Range
    from executorch_mlx.backends.mlx.runtime.device import dtype_name

    is_tensor = hasattr(result, "shape")
    if isinstance(known, Range) or not is_tensor:
        as_expected = isinstance(known, Range) and not is_tensor and (result != result or result in known)
        return "" if as_expected else f"number: expected {known}, got {result}"
    form = f"expected {known}, got {dtype_name(result.dtype)} {list(result.shape)}"
    if known.dtype not in (None, dtype_name(result.dtype).removesuffix("_")):
        return f"dtype: {form}"
    is_shape = known.shape is None or (
        len(known.shape) == result.ndim and all(map(Range.__contains__, known.shape, result.shape))
    )
    return "" if is_shape else f"shape: {form}"


class _Tensor:
    """What the trampoline's tensors offer."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self.shape, self.scalar_type = data.shape, data.scalar_type

    def __mlx_array__(self) -> Any:
        from executorch_mlx.backends.mlx.runtime.device import mx

        array = mx.array(self._data.numbers().reshape(self.shape))
        return array.view(mx.bfloat16) if SCALAR_TYPE_NAMES[self.scalar_type] == "bfloat16" else array


class _NamedData:
    def __init__(self, constants: dict[str, Data]) -> None:
        self._constants = constants

    def tensor(self, name: str, shape: tuple[int, ...], scalar_type: int) -> _Tensor:
        data = self._constants.get(name)
        if data is None:
            raise LookupError(f"no constant {name!r}")
        if math.prod(shape) * NUMPY_DTYPES[scalar_type].itemsize != len(data.raw):
            raise ValueError(f"the constant {name!r} has {len(data.raw)} bytes, not those of {shape}")
        return _Tensor(Data(shape, scalar_type, data.raw))


class _Arguments:
    """The arguments of a call; it keeps what the outputs are set to."""

    def __init__(self, inputs: Sequence[Any], num_outputs: int) -> None:
        self._inputs = inputs
        self.outputs: list[Any] = [None] * num_outputs

    def __len__(self) -> int:
        return len(self._inputs) + len(self.outputs)

    def get(self, index: int) -> Any:
        value = self._inputs[index]
        return _Tensor(value) if isinstance(value, Data) else value

    def set(self, index: int, value: Any) -> None:
        self.outputs[index - len(self._inputs)] = value


def _described(outputs: list[Any]) -> tuple[list[tuple[tuple[int, ...], str]], list[str]]:
    """Return the outputs' shapes and dtypes, and a digest of each."""
    from executorch_mlx.backends.mlx.runtime.device import dtype_name, mx

    shapes, digests = [], []
    for out in outputs:
        if not isinstance(out, mx.array):
            shapes.append(((), type(out).__name__))
            digests.append(repr(out))
            continue
        shapes.append((tuple(out.shape), dtype_name(out.dtype)))
        wide = out.astype(mx.float32) if out.dtype == mx.bfloat16 and out.size < 1 << 24 else out
        flat = np.array(wide.view(mx.uint16) if wide.dtype == mx.bfloat16 else wide, copy=False).reshape(-1)
        ends = [flat[:_HASHED_BYTES], flat[-_HASHED_BYTES:]]
        # A NaN's sign and payload are nobody's promise.
        plain = [np.where(end == end, end, np.nan) if end.dtype.kind == "f" else end for end in ends]
        digests.append(hashlib.sha1(b"".join(end.tobytes() for end in plain)).hexdigest())
    return shapes, digests


class _Runs:
    """Runs cases in this process."""

    def __init__(self, marks_path: str) -> None:
        from executorch_mlx.backends.mlx.program import ProgramError, flow
        from executorch_mlx.backends.mlx.runtime import device

        device.MEMORY_BYTES = _TENSOR_BYTES
        flow.MAX_STEPS = _STEPS
        from executorch_mlx.backends.mlx.runtime import delegate

        mx = device.mx
        self._delegate, self._mx, self._refusal = delegate, mx, ProgramError
        self._trace = _Trace(marks_path)
        self._fill = _fill_of_fresh_memory()
        verify = delegate.verify_graph

        def keeping_facts(*arguments: Any, **options: Any) -> Any:
            self._trace.facts = verify(*arguments, **options)
            return self._trace.facts

        delegate.verify_graph = keeping_facts

    def answer(self, case: Case) -> Answer:
        """Run twice: first instruction by instruction, then as a program is run."""
        self._mx.reset_peak_memory()
        self._trace.kinds, self._trace.unforeseen, answer = set(), None, Answer("raised")
        self._trace.mark("")
        try:
            self._run(case, answer)
            answer.outcome = "ran"
        except Exception as error:
            is_refusal = answer.stage == "load" and isinstance(error, self._refusal)
            answer.outcome = "refused" if is_refusal else "raised"
            cause = error.__cause__ or error
            answer.error, answer.message = type(error).__name__, str(error)[:2000]
            frames = traceback.extract_tb(cause.__traceback__)
            if frames:
                last = frames[-1]
                answer.frame = f"{os.path.basename(last.filename)}:{last.lineno} {last.name}"
            answer.kind = self._trace.kind
        if self._trace.unforeseen is not None:
            answer.kind, answer.unforeseen = self._trace.unforeseen
        answer.kinds = frozenset(self._trace.kinds)
        answer.peak_bytes = self._mx.get_peak_memory()
        return answer

    def _run(self, case: Case, answer: Answer) -> None:
        digests: list[list[str]] = []
        program: Any = None
        for fill, is_traced in zip(_FILLS, (True, False), strict=True):
            self._fill(fill)
            # Without buffers a program starts each run in the same state.
            if program is None or program.program.graph.num_mutable_buffer_tensors:
                answer.stage = "load"
                program = self._delegate.Delegate(case.payload, _NamedData(case.constants), None)
            answer.stage = "run"
            graph = program.program.graph
            arguments = _Arguments(case.inputs, len(graph.output_map))
            self._trace.is_on = is_traced
            try:
                with self._session() if program.program.uses_cache else contextlib.nullcontext():
                    program.execute(arguments)
            finally:
                self._trace.is_on = False
            answer.outputs, digest = _described(arguments.outputs)
            digests.append(digest)
        if not _draws_at_random(graph) and digests[0] != digests[1]:
            places = [place for place, pair in enumerate(zip(*digests, strict=True)) if pair[0] != pair[1]]
            answer.differs, answer.kind = True, _writer(graph, graph.output_map[places[0]].slot)
        answer.digest = hashlib.sha1("".join(digests[0]).encode()).hexdigest()

    def _session(self) -> Any:
        """Return a session of a cache of two layers; the second one has a window."""
        from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build

        layers = [LayerConfig(2, 8, v_head_dim=4), LayerConfig(2, 8, window=4)]
        return CacheSession(build("MLXBackend", "sequence", CacheConfig(32, layers, "float32")))


def _nodes(graph: Any) -> Iterator[Any]:
    for chain in graph.instruction_chains:
        yield from chain.instructions


def _draws_at_random(graph: Any) -> bool:
    return any(node.kind == "RandomBitsNode" and node.seed is None for node in _nodes(graph))


def _writer(graph: Any, slot: Any) -> str:
    kinds = [node.kind for node in _nodes(graph) for name, it in node.slots() if it == slot and node.writes(name)]
    return kinds[-1] if kinds else ""


def _fill_of_fresh_memory() -> Callable[[int], object]:
    """Return what makes malloc fill what it hands out with a byte; on other systems than glibc's, nothing does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return lambda fill: None
    return lambda fill: mallopt(_M_PERTURB, fill)


def main(marks_path: str) -> None:
    """Answer cases until the parent closes the pipe."""
    answers, requests = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    runs = _Runs(marks_path)
    while head := requests.read(8):
        case: Case = pickle.loads(requests.read(*struct.unpack("<Q", head)))
        _write(answers, runs.answer(case))
