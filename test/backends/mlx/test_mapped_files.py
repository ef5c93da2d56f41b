"""Pages of mapped files are given back, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from executorch_mlx.backends.mlx.pages import release_pages

NUMBERS = 8 << 20


def resident_in_files() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssFile"].split()[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own account of memory")
def test_pages_of_a_mapped_file_are_released_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    torch.arange(NUMBERS, dtype=torch.int32).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=NUMBERS, dtype=torch.int32)
    total = int(mapped.sum())
    before = resident_in_files()
    release_pages(mapped)
    assert before - resident_in_files() > mapped.nbytes // 2
    assert int(mapped.sum()) == total


def test_other_tensors_stay_as_they_are() -> None:
    for tensor in (torch.arange(NUMBERS), torch.empty(0), torch.tensor(3)):
        copy = tensor.clone()
        release_pages(tensor)
        assert torch.equal(tensor, copy)
