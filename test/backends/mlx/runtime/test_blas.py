"""Products of matrices by the BLAS that is installed, and rotations, against numpy and MLX's own."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.program import (
    Graph,
    InstructionChain,
    NamedSlot,
    Node,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    verify_graph,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.runtime.blas import install_blas
from executorch_mlx.backends.mlx.runtime.compile import CompiledProgram
from oracles.small_programs import run_process

needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("scipy_openblas32") is None or mx.default_device().type != mx.cpu,
    reason="only MLX for Linux CPUs is given another BLAS, where scipy-openblas32 is installed",
)

MLX_DTYPES = {"float32": mx.float32, "float64": mx.float64, "complex64": mx.complex64}
Array = np.ndarray[Any, np.dtype[Any]]


# -- products ----------------------------------------------------------------------------


def numbers(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Array:
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else real).astype(dtype)


def given(array: Array) -> mx.array:
    return mx.array(array, dtype=MLX_DTYPES[str(array.dtype)])


def layouts(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> dict[str, tuple[mx.array, Array]]:
    """The same kind of matrix in each layout that MLX knows, lazily made, and what numpy says it holds."""
    plain, turned = numbers(rng, rows, columns, dtype=dtype), numbers(rng, columns, rows, dtype=dtype)
    wide, tall = numbers(rng, rows, columns + 3, dtype=dtype), numbers(rng, columns, rows + 3, dtype=dtype)
    many = numbers(rng, 2 * rows, 3 * columns, dtype=dtype)
    row, one = numbers(rng, 1, columns, dtype=dtype), numbers(rng, 1, 1, dtype=dtype)
    return {
        "plain": (given(plain), plain),
        "transposed": (given(turned).T, turned.T),
        "part_of_rows": (given(wide)[:, 2 : columns + 2], wide[:, 2 : columns + 2]),
        "transposed_part": (given(tall)[:, 1 : rows + 1].T, tall[:, 1 : rows + 1].T),
        "steps": (given(many)[::2, ::3], many[::2, ::3]),
        "backwards": (given(plain)[::-1, ::-1], plain[::-1, ::-1]),
        "repeated_row": (mx.broadcast_to(given(row), (rows, columns)), np.broadcast_to(row, (rows, columns))),
        "repeated_number": (mx.broadcast_to(given(one), (rows, columns)), np.broadcast_to(one, (rows, columns))),
    }


def assert_product(got: mx.array, a: Array, b: Array, *, scale: float = 1.0, bias: Any = 0.0, what: Any = None) -> None:
    """Each sum of k products is within the bound for any order of summation."""
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    expected = scale * (a.astype(wide) @ b.astype(wide)) + np.asarray(bias).astype(wide)
    sizes = abs(scale) * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)) + np.abs(bias)
    bound = 4 * (a.shape[-1] + 3) * np.finfo(a.dtype).eps * sizes
    value = np.array(got)
    assert (value.dtype, value.shape) == (a.dtype, expected.shape), what
    # Written so that NaN does not pass.
    assert np.all(np.abs(value - expected) <= bound), what


SHAPES = [
    (1, 1, 1),
    (1, 7, 9),
    (5, 1, 9),
    (5, 7, 1),
    (1, 1, 9),
    (1, 7, 1),
    (5, 1, 1),
    (5, 7, 9),
    (1, 130, 257),
    (130, 1, 257),
    (33, 65, 129),
]


@needs_openblas
@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_product_of_matrices_in_all_layouts_is_numpy_s(shape: tuple[int, int, int], dtype: str) -> None:
    m, n, k = shape
    rng = np.random.default_rng([*shape])
    with mx.stream(mx.cpu):
        left, right = layouts(rng, m, k, dtype), layouts(rng, k, n, dtype)
        for (how_a, (a, a_host)), (how_b, (b, b_host)) in itertools.product(left.items(), right.items()):
            assert_product(mx.matmul(a, b), a_host, b_host, what=(how_a, how_b))


@needs_openblas
@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, 3, 5), (4, 5, 6)),
        ((2, 3, 1, 5), (2, 3, 5, 6)),
        ((2, 3, 4, 5), (2, 3, 5, 1)),
        ((2, 1, 3, 1), (1, 4, 1, 6)),
        ((3, 1, 5), (5, 6)),
        ((4, 5), (3, 5, 1)),
        ((5,), (5, 6)),
        ((4, 5), (5,)),
        ((5,), (5,)),
        ((1,), (3, 1, 1)),
    ],
    ids=str,
)
def test_product_of_batches_and_vectors_is_numpy_s(first: tuple[int, ...], second: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(3)
    a, b = numbers(rng, *first, dtype=dtype), numbers(rng, *second, dtype=dtype)
    with mx.stream(mx.cpu):
        assert_product(mx.matmul(given(a), given(b)), a, b)
        if a.ndim > 1 and b.ndim > 1:
            # Stored the other way round, and as every other matrix of a longer batch.
            turned_a, turned_b = (np.ascontiguousarray(x.swapaxes(-1, -2)) for x in (a, b))
            assert_product(mx.matmul(given(turned_a).swapaxes(-1, -2), given(turned_b).swapaxes(-1, -2)), a, b)
            longer = np.repeat(a, 2, axis=0)
            if a.ndim > 2:
                assert_product(mx.matmul(given(longer)[::2], given(b)), a, b)


@needs_openblas
@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_product_with_a_bias_is_numpy_s(shape: tuple[int, int, int], dtype: str) -> None:
    m, n, k = shape
    rng = np.random.default_rng([*shape, 1])
    a, b = numbers(rng, m, k, dtype=dtype), numbers(rng, n, k, dtype=dtype).T
    with mx.stream(mx.cpu):
        for bias_shape in ((m, n), (n,), (1, n), (m, 1), (1,)):
            bias = numbers(rng, *bias_shape, dtype=dtype)
            for alpha, beta in ((1.0, 1.0), (0.5, -2.0)):
                got = mx.addmm(given(bias), given(np.ascontiguousarray(a)), given(b.T).T, alpha=alpha, beta=beta)
                assert_product(got, a, b, scale=alpha, bias=beta * bias, what=(bias_shape, alpha))
        turned = numbers(rng, n, m, dtype=dtype)
        assert_product(mx.addmm(given(turned).T, given(a), given(b.T).T), a, b, bias=turned.T)


@needs_openblas
@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (1, 1)], ids=str)
def test_product_over_nothing_is_zero(shape: tuple[int, int], dtype: str) -> None:
    m, n = shape
    with mx.stream(mx.cpu):
        got = mx.matmul(mx.zeros((m, 0), MLX_DTYPES[dtype]), mx.zeros((0, n), MLX_DTYPES[dtype]))
        assert np.array_equal(np.array(got), np.zeros((m, n), dtype))


@needs_openblas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 40, 3), (40, 1, 3), (1, 1, 3), (1, 40, 1), (8, 5, 3)], ids=str)
def test_product_into_memory_that_held_nan_is_clean(shape: tuple[int, int, int], dtype: str) -> None:
    m, n, k = shape
    rng = np.random.default_rng(4)
    a, b = numbers(rng, m, k, dtype=dtype), numbers(rng, k, n, dtype=dtype)
    with mx.stream(mx.cpu):
        for _ in range(50):
            left, right = given(a), given(b)
            mx.eval(left, right)
            # Freed at once, they are what the allocator hands out next.
            spoiled = [mx.full((m, n), float("nan"), dtype=MLX_DTYPES[dtype]) for _ in range(8)]
            mx.eval(spoiled)
            del spoiled
            products = [mx.matmul(left, right) for _ in range(8)]
            mx.eval(products)
            for product in products:
                assert_product(product, a, b)


@needs_openblas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("special", [float("nan"), float("inf")], ids=str)
def test_product_with_an_operand_that_is_not_finite_says_so(
    special: float, shape: tuple[int, int, int], dtype: str
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(5)
    # No zeros and no sign changes: an infinity stays one.
    a, b = np.abs(numbers(rng, m, k, dtype=dtype)) + 1, np.abs(numbers(rng, k, n, dtype=dtype)) + 1
    a[m // 2, k // 2] = special
    expected = np.full((m, n), False)
    expected[m // 2] = True
    with mx.stream(mx.cpu):
        got = np.array(mx.matmul(given(a), given(b)))
        turned = np.array(mx.matmul(given(np.ascontiguousarray(b.T)), given(np.ascontiguousarray(a.T))))
    assert np.array_equal(~np.isfinite(got), expected)
    assert np.array_equal(~np.isfinite(turned), expected.T)
    assert np.array_equal(np.isnan(got), expected & np.isnan(special))


# -- which BLAS -----------------------------------------------------------------------------

# Prints what MLX multiplies with, and products with a matrix and with vectors, whose operands are whole numbers.
DESCRIBE = """
import json
from executorch_mlx.backends.mlx import backend_info
import mlx.core as mx
a = mx.arange(35, dtype=mx.float32).reshape(5, 7)
b = mx.arange(21, dtype=mx.float32).reshape(7, 3) - 10
products = [(x @ y).tolist() for x, y in ((a, b), (a[:1], b), (a, b[:, :1]), (b.T, a.T))]
print(json.dumps({"blas": backend_info().blas, "products": products}))
"""
MLX_FIRST = """
import mlx.core as mx
mx.eval(mx.ones((5, 5)) @ mx.ones((5, 5)), mx.ones((1, 5)) @ mx.ones((5, 5)))
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of the processes that a test starts; nothing in it chooses a BLAS."""
    for name in ("EXECUTORCH_MLX_BLAS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def described(script: str = DESCRIBE) -> str:
    """Run a script, check its products and that it says nothing else, and return its BLAS."""
    status, output, errors = run_process(script)
    assert (status, errors) == (0, "")
    result = json.loads(output)
    a, b = np.arange(35.0).reshape(5, 7), np.arange(21.0).reshape(7, 3) - 10
    expected = [a @ b, a[:1] @ b, a @ b[:, :1], b.T @ a.T]
    # Sums of whole numbers below 2**24 are exact in any order.
    assert result["products"] == [product.tolist() for product in expected]
    return str(result["blas"])


@needs_openblas
def test_mlx_imported_first_or_last_gets_the_same_blas(environment: pytest.MonkeyPatch) -> None:
    last, first = described(), described(MLX_FIRST + DESCRIBE)
    assert first == last
    assert last.startswith("OpenBLAS ")


@needs_openblas
def test_number_of_threads_is_what_openblas_is_told(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENBLAS_NUM_THREADS", "1")
    assert described().endswith(", 1 thread)")


@needs_openblas
def test_mlx_s_own_blas_stays_where_it_is_asked_for(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("EXECUTORCH_MLX_BLAS", "mlx")
    assert described() == "MLX's own"


UNUSABLE = {
    "cannot_be_imported": "raise ImportError('hidden')",
    "has_no_library": """
def get_lib_dir():
    return "/no-such-folder"

def get_library(fullname=False):
    return "libscipy_openblas.so"
""",
    "has_another_library": """
def get_lib_dir():
    return ""

def get_library(fullname=False):
    return "libc.so.6"
""",
    "is_something_else": "",
}


@needs_openblas
@pytest.mark.parametrize("name", UNUSABLE)
def test_openblas_that_is_unusable_leaves_mlx_s_own_without_a_word(
    name: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scipy_openblas32.py").write_text(UNUSABLE[name])
    environment.setenv("PYTHONPATH", str(tmp_path))
    assert described() == "MLX's own"


@needs_openblas
@pytest.mark.parametrize("library", ["/no-such-library.so", "/libc.so.6", "/libmlx.so.9"])
def test_install_into_a_library_that_makes_no_such_calls_changes_nothing(library: str) -> None:
    from executorch_mlx.backends.mlx.runtime import _blas

    before = install_blas()
    assert _blas.install(library, 1, 1, 1, 1, 1) is False
    assert install_blas() == before
    rng = np.random.default_rng(6)
    a, b = numbers(rng, 3, 4), numbers(rng, 4, 5)
    with mx.stream(mx.cpu):
        assert_product(mx.matmul(given(a), given(b)), a, b)
        assert_product(mx.matmul(given(a[:1]), given(b)), a[:1], b)


@needs_openblas
@pytest.mark.parametrize("arguments", [(), ("/x.so",), ("/x.so", 1, 1, 1, 1), ("/x.so", 1, 1, 1, 1, "1"), (1,) * 6])
def test_install_with_other_arguments_raises(arguments: tuple[Any, ...]) -> None:
    from executorch_mlx.backends.mlx.runtime import _blas

    with pytest.raises(TypeError):
        _blas.install(*arguments)


# -- rotations --------------------------------------------------------------------------------

# Angles may differ by so much, for positions below 64: frequencies are computed in another order.
ANGLE_ERROR = 5e-5
# What rounding a number to a dtype once may change of it.
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


@pytest.fixture
def on_cpu() -> Iterator[None]:
    previous = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(previous)


def run(nodes: list[Node], inputs: list[Any], outputs: list[int], constants: Sequence[mx.array] = ()) -> list[mx.array]:
    """Run instructions. Tensor slots are the constants, then the array inputs, then all others; values are numbers."""
    slots, num_arrays, num_values = [], 0, 0
    for value in inputs:
        if isinstance(value, mx.array):
            slots.append(SlotVariant(len(constants) + num_arrays, SlotType.TensorSlot))
            num_arrays += 1
        else:
            slots.append(SlotVariant(num_values, SlotType.IntValueSlot))
            num_values += 1
    used = max(slot.idx for node in nodes for _, slot in node.slots() if isinstance(slot, Tid))
    meta = TensorMeta(shape=[ShapeDim(4)], scalar_type=SCALAR_TYPE_CODES["float32"])
    graph = Graph(
        version="1",
        num_constant_tensors=len(constants),
        num_input_tensors=num_arrays,
        num_temp_tensors=used + 1 - len(constants) - num_arrays,
        num_values=num_values,
        instruction_chains=[InstructionChain(nodes)],
        input_map=slots,
        output_map=[SlotVariant(index, SlotType.TensorSlot) for index in outputs],
        named_slots=[
            NamedSlot(f"c{index}", SlotVariant(index, SlotType.TensorSlot)) for index in range(len(constants))
        ],
        tensor_meta=[*[meta] * len(constants), *[None] * num_arrays],
    )
    verify_graph(graph)
    results: list[mx.array] = CompiledProgram(graph, dict(enumerate(constants)))(inputs)
    mx.eval(results)
    return results


def rope_node(x: int, out: int, offset: Tid | Vid, **fields: Any) -> Node:
    return make_node("RopeNode", x=Tid(x), out=Tid(out), offset=offset, **fields)


def assert_rotated(
    got: mx.array, x: mx.array, dims: int, *, offset: Any, freqs: mx.array | None = None, **how: Any
) -> None:
    """What MLX computes in float32, rounded once to the dtype of x; the entries past ``dims`` are those of x."""
    base = None if freqs is not None else how.get("base", 10000.0)
    expected = mx.fast.rope(
        x.astype(mx.float32),
        dims,
        traditional=how.get("traditional", False),
        base=base,
        scale=how.get("scale", 1.0),
        offset=offset,
        freqs=freqs,
    )
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    value, wanted = (np.array(array.astype(mx.float32), dtype=np.float64) for array in (got, expected))
    # A pair of entries of at most 1 moves by at most sqrt(2) times the angle's error.
    bound = np.sqrt(2) * ANGLE_ERROR
    assert np.all(np.abs(value - wanted) <= ROUNDING[x.dtype] * (np.abs(wanted) + bound) + bound)
    assert np.array_equal(value[..., dims:], np.array(x.astype(mx.float32))[..., dims:])


def entries(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Numbers between -1 and 1."""
    return mx.array(np.random.default_rng([*shape, seed]).uniform(-1, 1, shape).astype(np.float32)).astype(dtype)


FREQS = {4: [1.0, 7.5], 6: [1.0, 3.0, 50.0], 8: [1.0, 2.5, 20.0, 1000.0]}
OFFSETS = {
    "zero": lambda batch: 0,
    "number": lambda batch: 37,
    "array_without_axes": lambda batch: mx.array(11),
    "array_of_one": lambda batch: mx.array([5], dtype=mx.int32),
    "array_per_entry": lambda batch: mx.array([(17 * entry + 3) % 60 for entry in range(batch)], dtype=mx.int32),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("dims", "width"), [(8, 8), (8, 10), (4, 8), (6, 6)], ids=str)
def test_rotation_is_mlx_s(on_cpu: None, dims: int, width: int, offset: str, dtype: mx.Dtype) -> None:
    freqs = mx.array(FREQS[dims])
    for batch, heads, length, scale, base in itertools.product((1, 3), (1, 2), (1, 4), (1.0, 0.25), (None, 100.0, 5e5)):
        x, start = entries(batch, heads, length, width, dtype=dtype), OFFSETS[offset](batch)
        how = {"scale": scale} if base is None else {"scale": scale, "base": base}
        constants = [freqs] if base is None else []
        first = len(constants)
        # Slots: frequencies, x, the offset where it is an array, the result.
        at = Tid(first + 1) if isinstance(start, mx.array) else Vid(0)
        out = first + 2 if isinstance(start, mx.array) else first + 1
        node = rope_node(first, out, at, dims=dims, freqs=Tid(0) if constants else None, **how)
        (got,) = run([node], [x, start], [out], constants)
        assert_rotated(got, x, dims, offset=start, freqs=freqs if base is None else None, **how)


@pytest.mark.parametrize(
    ("shape", "traditional"), [((2, 3, 4, 8), True), ((3, 4, 8), False), ((2, 2, 3, 4, 8), False)], ids=str
)
def test_rotation_of_neighbours_or_of_other_ranks_is_mlx_s(
    on_cpu: None, shape: tuple[int, ...], traditional: bool
) -> None:
    x = entries(*shape)
    (got,) = run([rope_node(0, 1, Vid(0), dims=8, base=100.0, traditional=traditional)], [x, 9], [1])
    assert_rotated(got, x, 8, offset=9, base=100.0, traditional=traditional)


@pytest.mark.parametrize("is_array", [True, False])
def test_layers_with_different_offsets_are_each_rotated_by_their_own(on_cpu: None, is_array: bool) -> None:
    q, k = entries(1, 2, 3, 8), entries(1, 1, 3, 8, seed=1)
    first, second = (mx.array([4]), mx.array([50])) if is_array else (4, 50)
    # Slots: q, k, the offsets where they are arrays, the results.
    offsets: list[Any] = [Tid(2), Tid(3)] if is_array else [Vid(0), Vid(1)]
    outs = [4, 5, 6, 7] if is_array else [2, 3, 4, 5]
    nodes = [
        rope_node(0, outs[0], offsets[0], dims=8, base=100.0),
        rope_node(1, outs[1], offsets[0], dims=8, base=100.0),
        rope_node(0, outs[2], offsets[1], dims=8, base=100.0),
        rope_node(1, outs[3], offsets[1], dims=8, base=100.0),
    ]
    results = run(nodes, [q, k, first, second], outs)
    for got, x, offset in zip(results, (q, k, q, k), (first, first, second, second), strict=True):
        assert_rotated(got, x, 8, offset=offset, base=100.0)


def test_layers_with_one_offset_and_other_parameters_are_each_rotated_by_their_own(on_cpu: None) -> None:
    x, longer, offset = entries(1, 2, 3, 8), entries(1, 2, 5, 8), mx.array([13])
    constants = [mx.array([1.0, 2.5, 20.0, 1000.0]), mx.array([2.0, 3.0, 5.0, 7.0]), mx.array([1.0, 9.0])]
    # Slots: 0, 1 and 2 are frequencies, 3 is x, 4 the longer one, 5 the offset.
    layers: list[tuple[int, int, dict[str, Any]]] = [
        (3, 8, {"freqs": 0}),
        (3, 8, {"freqs": 1}),
        (3, 4, {"freqs": 2}),
        (3, 8, {"freqs": 0, "scale": 0.5}),
        (4, 8, {"freqs": 0}),
        (3, 8, {"base": 100.0}),
        (3, 8, {"base": 1000.0}),
        (3, 8, {"base": 100.0, "scale": 0.5}),
        (3, 4, {"base": 100.0}),
        (4, 4, {"base": 100.0}),
    ]
    nodes = [
        rope_node(slot, 6 + index, Tid(5), dims=dims, **{**how, "freqs": Tid(how["freqs"]) if "freqs" in how else None})
        for index, (slot, dims, how) in enumerate(layers)
    ]
    results = run(nodes, [x, longer, offset], [6 + index for index in range(len(layers))], constants)
    for got, (slot, dims, how) in zip(results, layers, strict=True):
        freqs = constants[how["freqs"]] if "freqs" in how else None
        assert_rotated(got, x if slot == 3 else longer, dims, offset=offset, **{**how, "freqs": freqs})


def test_offsets_computed_into_the_same_slots_are_never_taken_for_each_other(on_cpu: None) -> None:
    x, num_layers = entries(1, 1, 2, 8), 40
    # Slots: 0 is zero, 1 is one, 2 is x, 3 the first offset, then the same offset in slots that each layer writes anew.
    slots, nodes = range(4, 16), []
    for layer in range(num_layers):
        for slot in slots:
            before, step = (slot - 1, 0) if slot > slots.start else (slots.start if layer else 3, 1)
            nodes.append(make_node("AddNode", a=Tid(before), b=Tid(step), out=Tid(slot)))
        nodes.append(rope_node(2, slots.stop + layer, Tid(slots[layer % len(slots)]), dims=8, base=100.0))
    outs = [slots.stop + layer for layer in range(num_layers)]
    results = run(nodes, [x, mx.array([10])], outs, [mx.array([0]), mx.array([1])])
    for layer, got in enumerate(results):
        assert_rotated(got, x, 8, offset=11 + layer, base=100.0)


def test_runs_of_one_program_do_not_share_their_rotations(on_cpu: None) -> None:
    x = entries(1, 2, 3, 8)
    graph = Graph(
        version="1",
        num_input_tensors=2,
        num_temp_tensors=1,
        instruction_chains=[InstructionChain([rope_node(0, 2, Tid(1), dims=8, base=100.0)])],
        input_map=[SlotVariant(0, SlotType.TensorSlot), SlotVariant(1, SlotType.TensorSlot)],
        output_map=[SlotVariant(2, SlotType.TensorSlot)],
        tensor_meta=[None, None],
    )
    verify_graph(graph)
    program = CompiledProgram(graph, {})
    for start in range(30):
        (got,) = program([x, mx.array([start])])
        assert_rotated(got, x, 8, offset=start, base=100.0)
