"""Gives MLX a fast BLAS on Linux CPUs.

MLX's Linux wheels multiply float32 and float64 matrices with the reference BLAS, ten to forty times slower than
OpenBLAS. Where the package ``scipy-openblas32`` is there (the extra ``cpu`` brings it), ``install_blas`` makes MLX call
that instead. Half precision and quantized products are MLX's own loops, which no BLAS changes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("executorch_mlx")

#: Set to "mlx" to leave MLX's own BLAS in place.
ENVIRONMENT_VARIABLE = "EXECUTORCH_MLX_BLAS"
_PREFIX = "scipy_"
# How long OpenBLAS's threads keep their cores busy when they have nothing to do, a power of two of cycles; read by the
# library when it is loaded. By default that is some 20 ms, in which nothing else gets at these cores.
_IDLE_VARIABLE, _IDLE_CYCLES = "OPENBLAS_THREAD_TIMEOUT", "18"
_FUNCTIONS = ("cblas_sgemm", "cblas_sgemv", "cblas_dgemm", "cblas_dgemv", "cblas_cgemm")


@functools.cache
def install_blas() -> str:
    """Redirect MLX's matrix products on the CPU, once in a process, whenever MLX was imported.

    Threads: as many as ``OPENBLAS_NUM_THREADS`` says, else one per core. They sleep soon after they have nothing to do,
    unless ``OPENBLAS_THREAD_TIMEOUT`` says otherwise.

    Returns:
        What MLX multiplies with on the CPU: "OpenBLAS 0.3.34 (Haswell, 2 threads)", "Accelerate" on macOS, or "MLX's
        own" where nothing was changed.
    """
    own = "Accelerate" if sys.platform == "darwin" else "MLX's own"
    if sys.platform != "linux" or os.environ.get(ENVIRONMENT_VARIABLE) == "mlx":
        return own
    try:
        import mlx.core  # noqa: F401  loads the library whose calls are redirected

        library = _openblas()
        from ._blas import install

        addresses = [ctypes.cast(library[_PREFIX + name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
        if install("/libmlx.so", *addresses):
            return _describe(library)
        logger.info("MLX's library imports no BLAS by name; its own is used")
    except (ImportError, OSError, AttributeError) as error:
        logger.info("no fast BLAS for MLX: %s", error)
    return own


def _openblas() -> ctypes.CDLL:
    is_set = _IDLE_VARIABLE in os.environ
    os.environ.setdefault(_IDLE_VARIABLE, _IDLE_CYCLES)
    try:
        import scipy_openblas32  # which loads the library

        path = Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True)
        return ctypes.CDLL(str(path))
    finally:
        if not is_set:
            del os.environ[_IDLE_VARIABLE]


def _describe(library: ctypes.CDLL) -> str:
    config, core = library[f"{_PREFIX}openblas_get_config"], library[f"{_PREFIX}openblas_get_corename"]
    config.restype = core.restype = ctypes.c_char_p
    threads = library[f"{_PREFIX}openblas_get_num_threads"]()
    name, version = config().decode().split()[:2]
    return f"{name} {version} ({core().decode()}, {threads} thread{'s' if threads != 1 else ''})"
