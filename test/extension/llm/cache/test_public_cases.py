"""Each public case on each backend and layout that it applies to."""

from __future__ import annotations

import pytest
from public_cases import CASES


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
