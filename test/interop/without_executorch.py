"""Run cases on a machine that has MLX and no ExecuTorch, such as one with a GPU: pack them here, run them there.

``pack`` takes a spread of the cases that ``make_cases.py`` made, of programs that are one delegate and pass here, and
keeps what the delegate is given: its payload, constants and inputs. ``run`` hands them to the delegate again. It needs
MLX, numpy, flatbuffers and this package's sources, the generated ``backends/mlx/program/_schema.py`` among them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from executorch_mlx.backends.mlx.program import Graph, SlotType, read_payload
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES, SCALAR_TYPE_NAMES
from executorch_mlx.backends.mlx.runtime import delegate
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.device import dtype_name
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build

FLOATS = ("float32", "float16", "bfloat16")
# Of all packed cases together, before compression.
MOST_BYTES = 20 << 20
# Cases of the same number of these are equally small.
SIZE_STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class Tensor:
    """A tensor without a library of its own, as the delegate takes it.

    Attributes:
        dtype: its plain name.
        data: its elements; those of bfloat16, which numpy lacks, as uint16.
    """

    dtype: str
    data: np.ndarray[Any, Any]

    @classmethod
    def of(cls, array: mx.array) -> Tensor:
        """Copy an MLX array."""
        plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        return cls(dtype_name(array.dtype), np.array(plain))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def scalar_type(self) -> int:
        return SCALAR_TYPE_CODES[self.dtype]

    def __mlx_array__(self) -> mx.array:
        array = mx.array(self.data)
        return array.view(mx.bfloat16) if self.dtype == "bfloat16" else array

    def numbers(self) -> np.ndarray[Any, Any]:
        """Return the elements in float64."""
        data = self.data
        if self.dtype == "bfloat16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float64)


# An argument of the delegate.
Value = Tensor | int | float


@dataclass(frozen=True)
class PackedCase:
    """A delegate's payload, what it is given, and what is expected of it.

    Attributes:
        name: of the case.
        payload: the delegate's.
        constants: what the program's named data holds for it.
        inputs: as the delegate gets them.
        expected: its outputs, as eager PyTorch computes them.
        rtol: by how much an output may differ, relatively.
        atol: and absolutely.
        skip: upstream only checks that the program runs.
        cache: the fields of the ``CacheConfig`` of the cache that it needs, None for none.
    """

    name: str
    payload: bytes
    constants: dict[str, Tensor]
    inputs: list[Value]
    expected: list[Tensor]
    rtol: float
    atol: float
    skip: bool
    cache: dict[str, Any] | None

    @cached_property
    def graph(self) -> Graph:
        return read_payload(self.payload)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its instructions."""
        return frozenset(node.kind for chain in self.graph.instruction_chains for node in chain.instructions)

    @cached_property
    def floats(self) -> frozenset[str]:
        """The floating-point dtypes of its constants, inputs, outputs and buffers."""
        names = {SCALAR_TYPE_NAMES[meta.scalar_type] for meta in self.graph.tensor_meta if meta is not None}
        return frozenset(names.intersection(FLOATS))

    @cached_property
    def num_bytes(self) -> int:
        values = [*self.constants.values(), *self.inputs, *self.expected]
        return len(self.payload) + sum(value.data.nbytes for value in values if isinstance(value, Tensor))


# -- running ----------------------------------------------------------------------


class _NamedData:
    """Stands for the trampoline's ``NamedData``."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        self._constants = constants

    def tensor(self, key: str, shape: tuple[int, ...], scalar_type: int) -> Tensor:
        found = self._constants[key]
        if (found.shape, found.scalar_type) != (shape, scalar_type):
            raise ValueError(f"constant {key!r} is {found.dtype} {found.shape}, not of type {scalar_type} {shape}")
        return found


class _Arguments:
    """Stands for the trampoline's ``Arguments``: inputs, then outputs."""

    def __init__(self, inputs: list[Value], num_outputs: int) -> None:
        self._inputs = inputs
        self.outputs: list[Any] = [None] * num_outputs

    def __len__(self) -> int:
        return len(self._inputs) + len(self.outputs)

    def get(self, index: int) -> Value:
        return self._inputs[index]

    def set(self, index: int, value: Any) -> None:
        self.outputs[index - len(self._inputs)] = Tensor.of(value) if isinstance(value, mx.array) else value


def run_packed(case: PackedCase) -> None:
    """Run a case on MLX's default device.

    Raises:
        AssertionError: what comes out is not what upstream expects, or nothing does.
    """
    arguments = _Arguments(case.inputs, len(case.expected))
    try:
        with nullcontext() if case.cache is None else CacheSession(_cache(case.cache)):
            delegate.Delegate(case.payload, _NamedData(case.constants), None).execute(arguments)
    except Exception as error:
        raise AssertionError(f"not run: {type(error).__name__}: {error}") from error
    if case.skip:
        return
    for index, (output, expected) in enumerate(zip(arguments.outputs, case.expected, strict=True)):
        difference = _difference(output, expected, case.rtol, case.atol)
        assert not difference, f"output {index}: {difference}"


def _cache(fields: dict[str, Any]) -> Any:
    layers = [LayerConfig(**layer) for layer in fields["layers"]]
    return build("MLXBackend", "sequence", CacheConfig(**{**fields, "layers": layers}))


def _difference(output: Any, expected: Tensor, rtol: float, atol: float) -> str:
    """Say in what an output differs from what is expected; empty where it does not."""
    if not isinstance(output, Tensor):
        return f"expected a tensor, got {output!r}"
    if (output.dtype, output.shape) != (expected.dtype, expected.shape):
        return f"expected {expected.dtype} {list(expected.shape)}, got {output.dtype} {list(output.shape)}"
    got, wanted = output.numbers(), expected.numbers()
    differs = ~np.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if not differs.any():
        return ""
    with np.errstate(invalid="ignore"):
        off = np.abs(got - wanted)[differs]
    return (
        f"{differs.sum()} of {differs.size} differ, by up to {off.max():g} (rtol {rtol:g}, atol {atol:g}); the first:"
        f" expected {wanted[differs][0]:g}, got {got[differs][0]:g}"
    )


# -- the file ---------------------------------------------------------------------


def write(cases: Iterable[PackedCase], path: Path) -> None:
    """Write cases to a file: an entry per array, and ``index``, JSON that names them."""
    arrays: dict[str, Any] = {}

    def kept(value: Value) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = f"array{len(arrays)}"
        arrays[key] = value.data
        return [value.dtype, key]

    index = [
        {
            "name": case.name,
            "payload": kept(Tensor("uint8", np.frombuffer(case.payload, np.uint8))),
            "constants": {name: kept(tensor) for name, tensor in case.constants.items()},
            "inputs": [kept(value) for value in case.inputs],
            "expected": [kept(tensor) for tensor in case.expected],
            "rtol": case.rtol,
            "atol": case.atol,
            "skip": case.skip,
            "cache": case.cache,
        }
        for case in cases
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, index=np.array(json.dumps(index)), **arrays)


def read(path: Path) -> list[PackedCase]:
    """Read the cases that ``write`` wrote."""
    with np.load(path, allow_pickle=False) as arrays:

        def found(value: Any) -> Any:
            return Tensor(value[0], arrays[value[1]]) if isinstance(value, list) else value

        return [
            PackedCase(
                **{
                    **row,
                    "payload": found(row["payload"]).data.tobytes(),
                    "constants": {name: found(value) for name, value in row["constants"].items()},
                    "inputs": [found(value) for value in row["inputs"]],
                    "expected": [found(value) for value in row["expected"]],
                }
            )
            for row in json.loads(str(arrays["index"]))
        ]


# -- packing ----------------------------------------------------------------------


class _Recorder(CompiledProgram):
    """A program that keeps what the delegate gives it."""

    def __init__(self, graph: Graph, constants: Any, *others: Any, **options: Any) -> None:
        super().__init__(graph, constants, *others, **options)
        self.constants = dict(constants)
        self.calls: list[list[Any]] = []

    def __call__(self, inputs: Sequence[Any], cache: Any = None, **options: Any) -> list[Any]:
        self.calls.append(list(inputs))
        return super().__call__(inputs, cache, **options)


@contextmanager
def recorded() -> Iterator[list[_Recorder]]:
    """Give the programs that delegates compile inside."""
    made: list[_Recorder] = []

    def record(*given: Any, **options: Any) -> _Recorder:
        made.append(_Recorder(*given, **options))
        return made[-1]

    with mock.patch.object(delegate, "CompiledProgram", record):
        yield made


def pack_case(folder: Path) -> PackedCase:
    """Run the case that a folder holds, and return it packed.

    Raises:
        AssertionError: it cannot be packed; the message says why.
    """
    # Here, since they need what the other machine lacks.
    import torch
    from cases import cache_config, payloads, read_case, run_case

    with recorded() as programs:
        assert run_case(folder) == "ran", "brings Metal source"
    assert [len(program.calls) for program in programs] == [1], "is not one delegate that runs once"
    (program,), case = programs, read_case(folder)
    (payload,), (inputs,) = payloads(case.program), program.calls
    names = {
        named.slot.idx: named.name
        for named in program.graph.named_slots
        if named.slot.slot_type == SlotType.TensorSlot and named.slot.idx in program.constants
    }

    def of_torch(tensor: torch.Tensor) -> Tensor:
        plain = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return Tensor(str(tensor.dtype).removeprefix("torch."), plain.contiguous().numpy())

    packed = PackedCase(
        name=folder.name,
        payload=payload,
        constants={names[index]: Tensor.of(array) for index, array in program.constants.items()},
        inputs=[Tensor.of(value) if isinstance(value, mx.array) else value for value in inputs],
        expected=[of_torch(tensor) for tensor in case.expected],
        rtol=case.rtol,
        atol=case.atol,
        skip=case.skip,
        cache=asdict(cache_config(case.kv_cache)) if case.kv_cache else None,
    )
    # Where more than the delegate makes the program's outputs, this tells.
    run_packed(packed)
    return packed


def spread(cases: list[PackedCase], count: int, seed: int) -> list[PackedCase]:
    """Return cases that together have as many kinds of instructions, and of those in as many dtypes, as can be had."""
    left, taken = cases.copy(), list[PackedCase]()
    random.Random(seed).shuffle(left)
    kinds, pairs, times, num_bytes = set[str](), set[tuple[str, str]](), Counter[str](), 0

    def dtypes_of(case: PackedCase) -> frozenset[str]:
        return case.floats or frozenset({"none"})

    def pairs_of(case: PackedCase) -> set[tuple[str, str]]:
        return {(kind, dtype) for kind in case.kinds for dtype in dtypes_of(case)}

    def worth(case: PackedCase) -> tuple[int, int, int, int]:
        rarest = min(times[dtype] for dtype in dtypes_of(case))
        return len(case.kinds - kinds), len(pairs_of(case) - pairs), -rarest, -(case.num_bytes // SIZE_STEP_BYTES)

    while len(taken) < count and (left := [case for case in left if num_bytes + case.num_bytes <= MOST_BYTES]):
        best = max(left, key=worth)
        left.remove(best)
        taken.append(best)
        kinds |= best.kinds
        pairs |= pairs_of(best)
        times.update(dtypes_of(best))
        num_bytes += best.num_bytes
    return sorted(taken, key=lambda case: case.name)


# -- the commands -----------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="pack a spread of cases")
    packing.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="where the folders of the cases are")
    packing.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write, an .npz")
    packing.add_argument("--count", type=int, default=60, metavar="N", help="at most N cases (default: %(default)s)")
    packing.add_argument("--seed", type=int, default=0, help="which of equally good cases (default: %(default)s)")
    packing.set_defaults(do=pack)
    running = commands.add_parser("run", help="run packed cases; the status is 1 where one fails")
    running.add_argument("file", type=Path, metavar="FILE", help="what `pack` wrote")
    running.add_argument("--match", default="*", metavar="PATTERN", help="only names like this: 'conv*' (default: all)")
    running.add_argument(
        "--names", action="store_true", help="print each name first, to see which one ends the process"
    )
    running.set_defaults(do=run)
    return parser.parse_args()


def pack(given: argparse.Namespace) -> int:
    """Pack cases."""
    from cases import find_cases

    folders = [case for folder in given.folders for case in find_cases(folder)]
    packed = []
    for folder in folders:
        try:
            packed.append(pack_case(folder))
        except AssertionError as error:
            print(f"{folder.name}: left out: {_line(error)}", flush=True)
    chosen = spread(packed, given.count, given.seed)
    if not chosen:
        print("no cases to pack", file=sys.stderr)
        return 1
    write(chosen, given.out)
    missing = sorted(_all(packed, lambda case: case.kinds) - _all(chosen, lambda case: case.kinds))
    print(
        f"{len(chosen)} of {len(folders)} cases in {given.out}, {given.out.stat().st_size:,} bytes: {coverage(chosen)}"
    )
    if missing:
        print(f"kinds that only cases left behind have: {', '.join(missing)}")
    return 0


def run(given: argparse.Namespace) -> int:
    """Run packed cases."""
    cases = [case for case in read(given.file) if fnmatch.fnmatch(case.name, given.match)]
    if not cases:
        print("no cases found", file=sys.stderr)
        return 1
    failures = 0
    began = time.perf_counter()
    for case in cases:
        if given.names:
            print(case.name, flush=True)
        try:
            run_packed(case)
        except AssertionError as error:
            failures += 1
            print(f"{case.name}: FAILED: {_line(error)}", flush=True)
    device = mx.default_device()
    print(
        f"{len(cases) - failures} of {len(cases)} as expected in {time.perf_counter() - began:.0f} s on {device},"
        f" {mx.device_info(device).get('device_name', 'unnamed')}, MLX {version('mlx')}: {coverage(cases)}"
    )
    return 1 if failures else 0


def coverage(cases: list[PackedCase]) -> str:
    """Say how many kinds of instructions cases have, and in how many of them each dtype is."""
    counts = Counter(dtype for case in cases for dtype in case.floats)
    dtypes = ", ".join(f"{dtype} in {counts[dtype]}" for dtype in FLOATS)
    return f"{len(_all(cases, lambda case: case.kinds))} kinds of instructions; {dtypes}"


def _all(cases: list[PackedCase], part: Callable[[PackedCase], frozenset[str]]) -> set[str]:
    return {item for case in cases for item in part(case)}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> int:
    given = arguments()
    return int(given.do(given))


if __name__ == "__main__":
    sys.exit(main())
