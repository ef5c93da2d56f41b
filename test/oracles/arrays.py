"""How a test hands numpy arrays to a backend's cache, and reads its answers: one entry per backend id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch


class Arrays(Protocol):
    """One array library."""

    def floats(self, values: npt.NDArray[Any], dtype: str) -> Any:
        """Return an array of a floating dtype."""

    def positions(self, values: Sequence[int], dtype: str = "int32", *, column: bool = False) -> Any:
        """Return positions as [n], or [n, 1] for a column."""

    def swapped(self, array: Any) -> Any:
        """Return axes 1 and 2 swapped, as a view where the library has views."""

    def numpy(self, array: Any) -> npt.NDArray[np.float32]:
        """Return an array's values."""

    def dtype_name(self, array: Any) -> str:
        """Return "float32", "float16" or "bfloat16"."""


class TorchArrays:
    """Torch tensors."""

    def floats(self, values: npt.NDArray[Any], dtype: str) -> torch.Tensor:
        return torch.tensor(values, dtype=getattr(torch, dtype))

    def positions(self, values: Sequence[int], dtype: str = "int32", *, column: bool = False) -> torch.Tensor:
        flat = torch.tensor(list(values), dtype=getattr(torch, dtype))
        return flat[:, None] if column else flat

    def swapped(self, array: torch.Tensor) -> torch.Tensor:
        return array.transpose(1, 2)

    def numpy(self, array: torch.Tensor) -> npt.NDArray[np.float32]:
        return array.to(torch.float32).numpy()

    def dtype_name(self, array: torch.Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")


class MLXArrays:
    """MLX arrays."""

    def floats(self, values: npt.NDArray[Any], dtype: str) -> mx.array:
        return mx.array(np.asarray(values, dtype=np.float32)).astype(getattr(mx, dtype))

    def positions(self, values: Sequence[int], dtype: str = "int32", *, column: bool = False) -> mx.array:
        flat = mx.array(list(values), dtype=getattr(mx, dtype))
        return flat[:, None] if column else flat

    def swapped(self, array: mx.array) -> mx.array:
        return mx.swapaxes(array, 1, 2)

    def numpy(self, array: mx.array) -> npt.NDArray[np.float32]:
        return np.array(array.astype(mx.float32))

    def dtype_name(self, array: mx.array) -> str:
        return str(array.dtype).removeprefix("mlx.core.")


ARRAYS: dict[str, Arrays] = {"eager": TorchArrays(), "MLXBackend": MLXArrays()}
