"""The native part, csrc/trampoline.cpp: ExecuTorch's delegate calls as Python calls."""

from collections.abc import Callable
from typing import Any

class Tensor:
    """A read-only DLPack exporter: a constant, which owns its bytes, or an argument, closed when the call returns."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def scalar_type(self) -> int: ...
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class NamedData:
    """The program's named data while a delegate is loaded."""

    def tensor(self, key: str, shape: tuple[int, ...], scalar_type: int) -> Tensor:
        """Return a constant. ValueError where there is none of this key and size."""

class Arguments:
    """One execute call's inputs and outputs, while it runs."""

    def __len__(self) -> int: ...
    def get(self, index: int) -> Tensor | int | float | bool | None:
        """Return an argument."""
    def set(self, index: int, value: Any) -> None:
        """Copy a contiguous DLPack array, or a number, into an output; ValueError where it does not fit."""

def register_backend(
    name: str,
    init: Callable[[bytes, NamedData], object | int],
    execute: Callable[[Any, Arguments], int],
) -> int:
    """Register a backend for the life of the process; returns ExecuTorch's error code, 0 for success.

    Both callables return an error code instead of raising; ``init`` returns a handle on success.
    """

def close() -> None:
    """Leak all handles from now on: the interpreter is about to exit."""
