"""Products of matrices by the BLAS that is installed, against numpy."""

from __future__ import annotations

import itertools
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executorch_mlx.backends.mlx.runtime.blas import install_blas
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
