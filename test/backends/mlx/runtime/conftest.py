"""Fixtures of tests that call kernels."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Let MLX compute on the CPU, whose numbers the tests compare with torch's."""
    previous = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(previous)
