"""Weights as ExecuTorch's named data: stored from where they lie, each hashed once per lowering."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from executorch.exir._serialize._cord import FileBackedData


class TensorBytes(FileBackedData):
    """A tensor's bytes as an entry of ``NamedDataStore``, which otherwise copies them.

    ExecuTorch has one kind of entry that is not ``bytes``, data in a file; this has its interface, over memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._view = memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        self._digest: bytes | None = None

    def __len__(self) -> int:
        return self._view.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorBytes:
        return self

    def prefix(self, size: int) -> bytes:
        """Return the first bytes."""
        return bytes(self._view[:size])

    def sha256(self) -> bytes:
        """Return the digest of the bytes."""
        if self._digest is None:
            self._digest = hashlib.sha256(self._view).digest()
        return self._digest

    def to_bytes(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            RuntimeError: the tensor has been changed since it was lowered.
        """
        return bytes(self._unchanged())

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        """Write the bytes; raises as ``to_bytes``."""
        outfile.write(self._unchanged())

    def _unchanged(self) -> memoryview:
        if self._digest not in (None, hashlib.sha256(self._view).digest()):
            raise RuntimeError("a weight was changed after it was lowered and before it was written: lower again")
        return self._view

    def close(self) -> None:
        """Do nothing: memory needs no closing."""


class Weights:
    """The weights of one lowering, by tensor: methods that share a tensor share its bytes and their digest."""

    def __init__(self) -> None:
        # By where their bytes lie: views of a tensor have its bytes. The tensors are kept, so that these stay theirs.
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, TensorBytes]] = {}

    def bytes_of(self, tensor: torch.Tensor) -> TensorBytes:
        """Return a tensor's bytes."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (tensor, TensorBytes(tensor))
        return known[1]

    def digest(self, tensor: torch.Tensor) -> str:
        """Return 16 hexadecimal digits that tell a tensor's bytes from others."""
        return self.bytes_of(tensor).sha256().hex()[:16]
