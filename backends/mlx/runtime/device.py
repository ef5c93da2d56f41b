"""MLX as this process uses it: one stream, one lock, its BLAS, and the names of dtypes."""

from __future__ import annotations

import os
import threading

from ..program.dtypes import SCALAR_TYPE_CODES
from .blas import install_blas

try:
    import mlx.core as mx
except ImportError as error:
    raise ImportError(
        "MLX's native library is missing. On Linux it comes with an extra: pip install 'executorch-mlx[cpu]', or"
        " 'executorch-mlx[cuda13]' for an NVIDIA GPU (one of the two, never both)"
    ) from error

__all__ = [
    "BLAS",
    "CLOSING",
    "DTYPES",
    "LOCK",
    "MEMORY_BYTES",
    "STREAM",
    "dtype_name",
    "exclusive",
    "is_cpu",
    "is_outermost",
    "mx",
]

# How many operations MLX hands to the device at once, at most: of CUDA's large ones 100, before which a decode step has
# not begun to compute. MLX reads it when the first stream is made.
if mx.cuda.is_available():
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "16")

# MLX's ordinary streams belong to the thread that made them: an array evaluated on one fails in another thread. This
# one may be used from any thread, by one at a time; the lock sees to that.
STREAM = mx.new_thread_unsafe_stream(mx.default_device())
LOCK = threading.RLock()
CLOSING = threading.Event()

# What the machine has, or the GPU if that says so: no single tensor can be larger.
MEMORY_BYTES = int(mx.device_info().get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def is_cpu() -> bool:
    """Whether MLX computes on a CPU."""
    return bool(mx.default_device().type == mx.cpu)


# What MLX multiplies matrices with on the CPU; none on a GPU.
BLAS = install_blas() if is_cpu() else ""

_held = threading.local()


class exclusive:  # noqa: N801  a context manager, used like a function
    """Take MLX for the calling thread; may be nested.

    Once the interpreter is exiting, another thread than the main one waits here for good: there are only daemon threads
    left then, and a call begun now would outlive the interpreter.
    """

    def __enter__(self) -> None:
        LOCK.acquire()
        depth = getattr(_held, "depth", 0)
        if depth == 0 and CLOSING.is_set() and threading.current_thread() is not threading.main_thread():
            LOCK.release()
            threading.Event().wait()
        _held.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        _held.depth -= 1
        LOCK.release()


def is_outermost() -> bool:
    """Whether the calling thread, which holds MLX, will let go of it at the end of its innermost ``exclusive()``."""
    return bool(_held.depth == 1)


DTYPES: dict[int, mx.Dtype] = {
    code: mx.bool_ if name == "bool" else getattr(mx, name) for name, code in SCALAR_TYPE_CODES.items()
}


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's plain name, such as "float32"."""
    return str(dtype).rsplit(".", 1)[-1]
