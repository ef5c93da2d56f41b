"""The rules of the verifier against what the kernels take and make."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
import torch
from hypothesis import settings

from executorch_mlx.backends.mlx.program import Facts, Graph, ProgramError, Tid, Vid, make_node, verify_graph
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES, SCALAR_TYPE_NAMES
from executorch_mlx.backends.mlx.program.rules import RULES
from executorch_mlx.backends.mlx.program.schema import FIELDS, NODE_KINDS
from executorch_mlx.backends.mlx.program.types import TensorType, Type
from executorch_mlx.backends.mlx.runtime import guard
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from executorch_mlx.backends.mlx.runtime.device import dtype_name
from executorch_mlx.backends.mlx.runtime.kernels import KERNELS, control
from oracles.hand_built import assembled, described, slot_variant
from oracles.mutations import Described, Mutation, mutations, with_literals
from oracles.sample_graphs import inferred, sample_graph
from oracles.written_calls import described_as, written_graph
from samples.nodes import EVERY, SAMPLES, SIZES, WITHOUT_DTYPE, WITHOUT_SAMPLE, Sample

pytestmark = pytest.mark.usefixtures("on_cpu")

# No mutation is run that takes more.
MAX_BYTES = 1 << 26

X, OUT, OTHER = Tid(0), Tid(1), Tid(2)
N = Vid(0)


def test_every_kind_of_the_format_has_a_rule_a_kernel_and_a_sample_and_no_other_kind_has() -> None:
    tables = {
        "RULES": set(RULES),
        "KERNELS": set(KERNELS),
        "SAMPLES, or WITHOUT_SAMPLE with a reason": {sample.kind for sample in SAMPLES} | WITHOUT_SAMPLE.keys(),
    }
    expected = set(NODE_KINDS)
    missing = {table: sorted(expected - kinds) for table, kinds in tables.items()}
    foreign = {table: sorted(kinds - expected) for table, kinds in tables.items()}
    assert missing == {table: [] for table in tables}
    assert foreign == {table: [] for table in tables}
    assert not WITHOUT_SAMPLE.keys() & {sample.kind for sample in SAMPLES}


def test_every_dtype_that_a_kind_takes_has_a_sample_where_torch_has_it() -> None:
    sampled, taken = defaultdict(set), defaultdict(set)
    for sample in SAMPLES:
        sampled[sample.kind] |= set(sample.dtypes)
    for sample in SAMPLES:
        for dtype in set(EVERY) - sampled[sample.kind]:
            try:
                operands = operands_of(sample, dtype, 3)
            except (RuntimeError, TypeError, ValueError):  # numbers that the dtype does not have
                continue
            graph = sample_graph(sample, [described(operand.shape, operand.dtype) for operand in operands])
            if str(dtype).removeprefix("torch.") in {operand.dtype for operand in operands} and accepted(graph):
                taken[sample.kind].add(dtype)
    assert taken == {kind: set(dtypes) for kind, dtypes in WITHOUT_DTYPE.items()}


def accepted(graph: Graph) -> bool:
    try:
        verify_graph(graph)
    except ProgramError:
        return False
    return True


def mlx_dtype(name: str) -> mx.Dtype:
    return mx.bool_ if name == "bool" else getattr(mx, name)


def operand(shape: Sequence[int], dtype: str) -> mx.array:
    """An array of ones, or of zeros where it might be indices."""
    kind = mlx_dtype(dtype)
    return (mx.ones if mx.issubdtype(kind, mx.floating) else mx.zeros)(shape, kind)


def operands_of(sample: Sample, dtype: torch.dtype, size: int) -> list[Described]:
    return [
        Described(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for tensor in sample.make_inputs(dtype, size)
    ]


def type_of(array: mx.array) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), dtype_name(array.dtype).removesuffix("_")


def holds(known: Type, result: Any) -> bool:
    """Whether a result is one of those that a type stands for."""
    if not isinstance(result, mx.array):
        return result in known
    shape, dtype = type_of(result)
    if not isinstance(known, TensorType) or known.dtype not in (None, dtype):
        return False
    return known.shape is None or (
        len(known.shape) == len(shape) and all(size in its for size, its in zip(shape, known.shape, strict=True))
    )


def is_exact(known: Type) -> bool:
    """Whether a type stands for one shape and dtype."""
    if not isinstance(known, TensorType):
        return True
    return known.dtype is not None and known.shape is not None and all(size.is_exact for size in known.shape)


def described_operands(operands: Sequence[Described], slack: int | None = None) -> list[Any]:
    return [described(shape, dtype, slack=slack) for shape, dtype in operands]


# -- samples ----------------------------------------------------------------------

CASES = [pytest.param(s, d, id=f"{s.kind}-{s.label}-{str(d)[6:]}") for s in SAMPLES for d in s.dtypes]


@pytest.mark.parametrize(("sample", "dtype"), CASES)
def test_types_are_inferred_as_the_kernels_make_them(sample: Sample, dtype: torch.dtype) -> None:
    compiled = CompiledProgram(sample_graph(sample), {})
    # With a number that is handed in, what is inferred may be a range.
    reads_values = any(
        isinstance(slot, Vid) and not node.writes(name)
        for node in compiled.graph.instruction_chains[0].instructions
        for name, slot in node.slots()
        if node.kind != "IfNode"
    )
    for size in SIZES:
        operands = operands_of(sample, dtype, size)
        # Arrays are lazy: their types are there without their numbers.
        results = compiled([*sample_arrays(sample, dtype, size), *sample.values])
        exactly_known = inferred(sample_graph(sample, described_operands(operands)))
        for meta in (described_operands(operands, slack=2), None):
            for known, result in zip(inferred(sample_graph(sample, meta)), results, strict=True):
                assert holds(known, result), f"{known} does not hold {result}"
        for known, result in zip(exactly_known, results, strict=True):
            assert holds(known, result), f"{known} is not the type of {result}"
            assert reads_values or is_exact(known)


def sample_arrays(sample: Sample, dtype: torch.dtype, size: int) -> list[mx.array]:
    """A sample's tensors: instructions that read numbers, such as indices, need them to be right."""
    arrays = []
    for tensor in sample.make_inputs(dtype, size):
        name = str(tensor.dtype).removeprefix("torch.")
        numbers = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        array = mx.array(numbers.numpy())
        arrays.append(array.view(mx.bfloat16) if name == "bfloat16" else array)
    return arrays


# -- mutations --------------------------------------------------------------------


@cache
def by_kind() -> dict[str, list[Mutation]]:
    """All mutations of all samples, in float32 where that is what they run in first."""
    found: dict[str, list[Mutation]] = defaultdict(list)
    for sample in map(with_literals, SAMPLES):
        found[sample.kind] += mutations(sample, operands_of(sample, sample.dtypes[0], SIZES[0]))
    return found


def run(sample: Sample, operands: Sequence[Described]) -> tuple[list[Type], list[Any]] | None:
    """Return what is known of a sample's results and what they are; None where the verifier refuses it."""
    try:
        known = inferred(sample_graph(sample, described_operands(operands)), MAX_BYTES)
    except ProgramError:
        return None
    return known, kernel_results(sample, operands)


def kernel_results(sample: Sample, operands: Sequence[Described]) -> list[Any]:
    """Run a sample's kernels, whatever the verifier says of these operands: they are not described."""
    graph = sample_graph(sample)
    results = CompiledProgram(graph, {}, Facts())([*[operand(*its) for its in operands], *sample.values])
    mx.eval([result for result in results if isinstance(result, mx.array)])
    return results


@pytest.mark.parametrize("kind", sorted({sample.kind for sample in SAMPLES}))
def test_what_the_verifier_accepts_runs_and_makes_what_was_inferred(kind: str) -> None:
    """Of each kind as many changes as a profile of hypothesis has examples, and a tenth as many pairs of them."""
    every, rng, count = by_kind()[kind], random.Random(kind), settings.default.max_examples
    chosen = rng.sample(every, min(len(every), count))
    for change, sample, operands in rng.sample(every, min(len(every), count // 10)):
        second = rng.choice(list(mutations(sample, operands)))
        chosen.append(second._replace(change=f"{change}, {second.change}"))
    accepted = 0
    for change, sample, operands in chosen:
        where = f"{kind} ({sample.label}), {change}"
        try:
            outcome = run(sample, operands)
        except IndexError as error:
            # An index has no place on an axis of no elements; no type says that there is an index.
            if "index" in str(error) and any(0 in shape for shape, _ in operands):
                continue
            raise AssertionError(f"{where}: accepted, and raises {error!r}") from error
        except Exception as error:
            raise AssertionError(f"{where}: accepted, and raises {error!r}") from error
        if outcome is None:
            continue
        accepted += 1
        for known, result in zip(*outcome, strict=True):
            assert holds(known, result), f"{where}: inferred {known}, got {type_of(result)}"
            # What a scan's rounds change is known no more.
            assert kind == "ScanNode" or is_exact(known), f"{where}: {known} for {type_of(result)}"
    assert accepted


# -- dtypes -----------------------------------------------------------------------

DTYPES = tuple(SCALAR_TYPE_CODES)
# Kinds whose rule asks for more than the kernel: it would compute what torch refuses.
STRICTER = {
    "SoftmaxNode": "softmax of integers, which MLX rounds along any axis but the last",
}


# Kinds of one or two tensors that need no other field.
PLAIN_KINDS = [
    kind
    for kind in NODE_KINDS
    if kind in KERNELS
    and not kind.endswith("IntNode")
    and {row.name for row in FIELDS[kind] if row.required}
    in ({"x", "out"}, {"x", "out", "approximate"}, {"a", "b", "out"})
]


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_dtypes_are_accepted_as_the_kernel_takes_them(kind: str) -> None:
    names = tuple(row.name for row in FIELDS[kind] if row.required and row.name in ("x", "a", "b"))
    fields: dict[str, Any] = {"GeluNode": {"approximate": "none"}, "ClipNode": {"a_max": X}}.get(kind, {})
    sample = Sample(kind, lambda: None, (lambda *_: None,) * len(names), names, fields)
    for dtypes in product(DTYPES, repeat=len(names)):
        operands = [Described((2, 3), dtype) for dtype in dtypes]
        outcome = run(sample, operands)
        if outcome is not None:
            (known,), (result,) = outcome
            assert is_exact(known)
            assert holds(known, result), f"{kind} of {dtypes}: inferred {known}, got {type_of(result)}"
        elif kind not in STRICTER:
            with pytest.raises((ValueError, RuntimeError)):
                kernel_results(sample, operands)


# -- sizes that are known only when it runs --------------------------------------------

MEGABYTE = 1 << 20
# (kind, fields, number handed in that is fine, number with which the result takes more than a megabyte)
GROWING = [
    ("ARangeNode", {"start": 0, "stop": N, "step": 1}, 9, 2**40),
    ("FullNode", {"shape": [N], "v": 0.0, "scalar_type": 0}, 9, 2**30),
    ("FullNode", {"shape": [N, N, N], "v": 0.0, "scalar_type": 0}, 9, 2**22),
    ("BroadcastToNode", {"x": X, "shape": [N, 4]}, 9, 2**30),
    ("RepeatNode", {"x": X, "repeats": N}, 9, 2**30),
    ("TileNode", {"x": X, "reps": [N, 2]}, 9, 2**30),
    ("PadNode", {"x": X, "pad_width": [0, N], "mode": "constant"}, 9, 2**30),
    ("TriNode", {"n": N, "m": N, "scalar_type": 0}, 9, 2**20),
    ("RandomBitsNode", {"shape": [N], "width": 1}, 9, 2**30),
]


def sized_program(
    monkeypatch: pytest.MonkeyPatch, chains: list[list[Any]], x: str, outputs: list[Tid]
) -> CompiledProgram:
    """Compile a graph of a tensor and a number, on a machine of one megabyte."""
    monkeypatch.setattr(guard, "MEMORY_BYTES", MEGABYTE)
    graph: Graph = assembled(chains, [X, N], outputs, meta=[described_as(x)])
    return CompiledProgram(graph, {}, verify_graph(graph, MEGABYTE))


class TestGuard:
    """Instructions whose results may be too large are looked at before they run."""

    @pytest.mark.parametrize(
        ("kind", "fields", "fine", "large"), [pytest.param(*row, id=f"{row[0]} {i}") for i, row in enumerate(GROWING)]
    )
    def test_a_number_that_makes_it_too_large_is_refused_before_it_is_made(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any], fine: int, large: int
    ) -> None:
        compiled = sized_program(monkeypatch, [[make_node(kind, **fields, out=OUT)]], "int8[4]", [OUT])
        x = mx.zeros(4, mx.int8)
        (result,) = compiled([x, fine])
        mx.eval(result)
        before = mx.get_active_memory()
        with pytest.raises(ValueError, match=rf"{kind}: its result .* takes \d+ bytes or more, there are {MEGABYTE}"):
            compiled([x, large])
        assert mx.get_active_memory() - before < MEGABYTE

    def test_a_negative_number_where_a_size_is_wanted_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = make_node("FullNode", shape=[N], v=0.0, scalar_type=0, out=OUT)
        compiled = sized_program(monkeypatch, [[node]], "int8[4]", [OUT])
        with pytest.raises(ValueError, match="FullNode: shape is -1, expected 0 or more"):
            compiled([mx.zeros(4, mx.int8), -1])

    def test_an_outer_product_of_inputs_that_are_too_long_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes = [make_node("ExpandDimsNode", x=X, axis=1, out=OTHER), make_node("AddNode", a=X, b=OTHER, out=OUT)]
        compiled = sized_program(monkeypatch, [nodes], "int8[0..]", [OUT])
        assert compiled([mx.zeros(1024, mx.int8), 0])[0].shape == (1024, 1024)
        with pytest.raises(ValueError, match=r"AddNode: its result int8\[1025, 1025\] takes 1050625 bytes"):
            compiled([mx.zeros(1025, mx.int8), 0])

    def test_a_scan_that_stacks_too_much_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sliced = Tid(3)
        scan = make_node(
            "ScanNode", originals=[X], sliced=[sliced], carry=[], outputs=[OUT], body_chain_idx=1, scan_axis=0
        )
        body = [make_node("BroadcastToNode", x=sliced, shape=[1024], out=OUT)]
        monkeypatch.setattr(control, "MEMORY_BYTES", MEGABYTE)
        compiled = sized_program(monkeypatch, [[scan], body], "int8[0..]", [OUT])
        assert compiled([mx.zeros(1024, mx.int8), 0])[0].shape == (1024, 1024)
        with pytest.raises(ValueError, match=r"1025 results of \[1024\] take 1049600 bytes"):
            compiled([mx.zeros(1025, mx.int8), 0])

    def test_an_instruction_in_a_branch_is_looked_at_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        branch = make_node("IfNode", cond=N, then_chain_idx=1, else_chain_idx=2)
        full = make_node("FullNode", shape=[N], v=0.0, scalar_type=0, out=OUT)
        copy = make_node("IdCopyNode", x=X, out=OUT)
        compiled = sized_program(monkeypatch, [[branch], [full], [copy]], "int8[4]", [OUT])
        assert compiled([mx.zeros(4, mx.int8), 0])[0].shape == (4,)
        with pytest.raises(ValueError, match="FullNode: its result"):
            compiled([mx.zeros(4, mx.int8), 2**30])


# What only a run shows, since sizes or numbers are the caller's: an instruction, its operands as they are described,
# the shapes that they have, numbers for its values, and what is said. MLX would crash, hang, or read elsewhere.
SHOWN_BY_A_RUN: list[tuple[str, dict[str, Any], list[tuple[int, ...]], list[int], str]] = [
    (
        "SdpaNode",
        {"q": "float32[1, 2, 3, 4]", "k": "float32[1, 0..2, 3, 4]", "v": "float32[1, 0..2, 3, 4]", "scale": 1.0},
        [(1, 2, 3, 4), (1, 0, 3, 4), (1, 0, 3, 4)],
        [],
        "without heads",
    ),
    (
        "Conv1DNode",
        {"x": "float32[1, 5, 2]", "w": "float32[3, 0..2, 2]"},
        [(1, 5, 2), (3, 0, 2)],
        [],
        "without elements",
    ),
    (
        "ConvTranspose1DNode",
        {"x": "float32[1, 0..5, 2]", "w": "float32[3, 2, 2]"},
        [(1, 0, 2), (3, 2, 2)],
        [],
        "places",
    ),
    (
        "QuantizedMatmulNode",
        {
            "x": "float32[0..2, 64]",
            "w": "uint32[3, 8]",
            "scales": "float32[3, 1]",
            "biases": "float32[3, 1]",
            "group_size": 64,
            "bits": 4,
            "mode": "affine",
        },
        [(0, 64), (3, 8), (3, 1), (3, 1)],
        [],
        "divides by its rows",
    ),
    (
        "QuantizedMatmulNode",
        {
            "x": "float32[2, 64]",
            "w": "uint32[3, 8]",
            "scales": "float32[0..3, 1]",
            "biases": "float32[0..3, 1]",
            "group_size": 64,
            "bits": 4,
            "mode": "affine",
        },
        [(2, 64), (3, 8), (1, 1), (1, 1)],
        [],
        "scales has shape",
    ),
    (
        "GatherNode",
        {"x": "float32[0..4]", "indices": ["int32[1]"], "axes": [0], "slice_sizes": [3]},
        [(2,), (1,)],
        [],
        "slices of",
    ),
    (
        "ScatterAddNode",
        {"x": "float32[2, 0..4]", "indices": "int32[2, 4]", "updates": "float32[2, 4]"},
        [(2, 1), (2, 4), (2, 4)],
        [],
        "ScatterAddNode: indices of shape",
    ),
    ("SplitNode", {"x": "float32[0..6]", "sizes": [1, 2]}, [(6,)], [], "SplitNode: sizes"),
    ("SliceNode", {"x": "float32[2]", "axis": N, "start": 0, "stop": 1}, [(2,)], [1], "SliceNode: axis 1"),
    ("TakeNode", {"x": "float32[2]", "index": N}, [(2,)], [2], "index 2 of an axis of 2"),
    ("FullNode", {"shape": [2], "v": N, "scalar_type": 0}, [], [256], "filled with 256"),
    ("MultiplyIntNode", {"a": N, "b": 2**40}, [], [2**40], "the result is 1208925819614629174706176"),
    ("RandomBitsNode", {"shape": [N]}, [], [-2], "shape is -2"),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row[0]} {i}") for i, row in enumerate(SHOWN_BY_A_RUN)])
def test_what_only_a_run_shows_is_an_error_of_that_run(
    row: tuple[str, dict[str, Any], list[tuple[int, ...]], list[int], str],
) -> None:
    kind, fields, shapes, numbers, message = row
    graph = written_graph(kind, 2, **fields)
    (node,) = graph.instruction_chains[0].instructions
    graph.output_map = [slot_variant(slot) for name, slot in node.slots() if node.writes(name)]
    dtypes = [SCALAR_TYPE_NAMES[meta.scalar_type] for meta in graph.tensor_meta if meta is not None]
    arrays = [mx.zeros(shape, mlx_dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises((ValueError, IndexError), match=message):
        mx.eval(CompiledProgram(graph, {})([*arrays, *numbers]))


def test_a_triangle_without_elements_takes_no_memory() -> None:
    graph = written_graph("TriNode", n=0, m=2**30, scalar_type=0)
    graph.output_map = [slot_variant(Tid(0))]
    before = mx.get_peak_memory()
    (result,) = CompiledProgram(graph, {})([])
    mx.eval(result)
    assert result.shape == (0, 2**30)
    assert mx.get_peak_memory() - before < 2**20
