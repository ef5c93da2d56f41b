"""Memory of tensors that lie in mapped files, such as the shards of a checkpoint."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch

# Linux: reclaim pages; those of a mapped file are read again where they are touched again (madvise(2)).
_MADV_PAGEOUT = 21


def release_pages(tensor: torch.Tensor) -> None:
    """Let go of the memory that a tensor in a mapped file takes; its numbers stay. Nothing happens to others.

    Linux keeps such pages until memory is short; a model that is read once would be in memory twice, in two forms.
    """
    if sys.platform != "linux" or not _is_in_file(tensor.data_ptr()):
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length > 0:
        # A kernel that refuses leaves the pages where they are.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_PAGEOUT)


def _is_in_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return inode != "0"
    return False
