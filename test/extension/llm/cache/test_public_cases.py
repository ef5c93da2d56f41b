"""Each public case on each backend and layout that it applies to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from public_cases import CASES


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Threads only cost time on tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("row", "kind", "backend"),
    [
        pytest.param(row, kind, backend, id=f"{row:02}-{case.check.__name__}-{kind}-{backend}")
        for row, case in CASES.items()
        for backend in ("eager", "MLXBackend")
        for kind in case.kinds_on(backend)
    ],
)
def test_public_case(row: int, kind: str, backend: str) -> None:
    CASES[row].check(backend, kind)


def test_public_cases_are_all_rows_in_order() -> None:
    assert list(CASES) == list(range(1, 28))
