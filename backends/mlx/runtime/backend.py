"""Registers the delegate with ExecuTorch's runtime, on import."""

from __future__ import annotations

import atexit
import ctypes
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..identity import BACKEND_IDS, UPSTREAM_BACKEND_ID
from . import delegate
from .device import BLAS, CLOSING, LOCK, is_cpu

_SUPPORTED_EXECUTORCH = (1, 5)
_ALREADY_REGISTERED = 0x16
_INVALID_ARGUMENT = 0x12
# How long interpreter exit waits for a run in another thread.
_EXIT_TIMEOUT_S = 30.0


def _load_library() -> None:
    """Load the runtime that ``executorch.runtime`` uses, so that the trampoline binds to the same registry."""
    import executorch

    number = version("executorch")
    if tuple(int(part) for part in number.split("+")[0].split(".")[:2]) != _SUPPORTED_EXECUTORCH:
        raise ImportError(
            f"executorch-mlx was built for ExecuTorch {'.'.join(map(str, _SUPPORTED_EXECUTORCH))}.x, found {number}:"
            " pip install 'executorch>=1.5.1,<1.6'"
        )
    name = "libexecutorch.dylib" if sys.platform == "darwin" else "libexecutorch.so"
    for root in executorch.__path__:
        library = Path(root) / "lib" / name
        if library.is_file():
            ctypes.CDLL(str(library))
            return
    raise ImportError(f"{name} is missing from ExecuTorch in {list(executorch.__path__)}: reinstall executorch")


_load_library()

from . import _trampoline  # noqa: E402  the library must be loaded first


def _register() -> tuple[str, ...]:
    """Register under every id that nobody holds; return those that are ours."""
    held = []
    for backend_id in BACKEND_IDS:
        code = _trampoline.register_backend(backend_id, delegate.init, delegate.execute)
        if code == 0:
            held.append(backend_id)
        elif code not in (_ALREADY_REGISTERED, _INVALID_ARGUMENT) or backend_id != UPSTREAM_BACKEND_ID:
            raise RuntimeError(
                f"ExecuTorch refused to register the backend {backend_id!r} (error 0x{code:x}): its registry is full or"
                " holds another backend of this name"
            )
    return tuple(held)


HELD_BACKEND_IDS = _register()


@atexit.register
def _close() -> None:
    """Let a run in another thread finish, and let no other begin: it would outlive the interpreter."""
    CLOSING.set()
    LOCK.acquire(timeout=_EXIT_TIMEOUT_S)
    _trampoline.close()


@dataclass(frozen=True)
class BackendInfo:
    """What this process runs on.

    Attributes:
        device: MLX's default device, such as "cpu" or "gpu".
        blas: what MLX multiplies float32 matrices with on the CPU, such as "OpenBLAS 0.3.34 (Haswell, 2 threads)" or
            "MLX's own"; empty where the device is a GPU.
        backend_ids: the ids under which this package's delegate is registered.
        mlx_version: version of MLX.
        executorch_version: version of ExecuTorch.
        platform: operating system and machine.
    """

    device: str
    blas: str
    backend_ids: tuple[str, ...]
    mlx_version: str
    executorch_version: str
    platform: str


def backend_info() -> BackendInfo:
    """Describe the delegate as it is registered in this process."""
    return BackendInfo(
        device="cpu" if is_cpu() else "gpu",
        blas=BLAS,
        backend_ids=HELD_BACKEND_IDS,
        mlx_version=version("mlx"),
        executorch_version=version("executorch"),
        platform=f"{platform.system()} {platform.machine()}",
    )
