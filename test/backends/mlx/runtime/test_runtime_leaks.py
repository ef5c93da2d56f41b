"""Memory that failing runs and dropped programs give back."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.backends.mlx.program import ProgramError
from executorch_mlx.backends.mlx.runtime.delegate import Loading
from executorch_mlx.extension.llm.cache import CacheFullError, CacheSession, build
from oracles.small_programs import affine, cache_config, pointwise, tiny_lm, with_damaged_payload

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")

MAX_GROWTH_BYTES = 5 << 20


def growth(work: Callable[[], None], times: int) -> int:
    """Return by how many bytes resident memory grows over so many calls, after some to warm up."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(times // 10):
        work()
    before = resident()
    for _ in range(times):
        work()
    return resident() - before


def test_failing_executes_keep_no_memory() -> None:
    program = load_program(pointwise())
    method = program.load_method("forward")
    too_wide = torch.ones(2, 4)

    def fail() -> None:
        with pytest.raises(ValueError, match=r"got \[2, 4\]"):
            method.execute([too_wide])

    assert growth(fail, 20_000) < MAX_GROWTH_BYTES


def test_failing_steps_keep_no_memory() -> None:
    program = load_program(tiny_lm())
    method = program.load_method("forward")
    tokens, positions = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)

    def fail() -> None:
        with pytest.raises(CacheFullError, match="full"):
            method.execute([tokens, positions])

    with CacheSession(build("MLXBackend", "sequence", cache_config(capacity=4))):
        assert growth(fail, 500) < MAX_GROWTH_BYTES


def test_programs_loaded_run_and_dropped_keep_no_memory() -> None:
    def cycle() -> None:
        program = load_program(affine())
        program.load_method("forward").execute([torch.ones(2, 4)])

    assert growth(cycle, 200) < MAX_GROWTH_BYTES


def test_programs_with_weights_loaded_from_a_file_and_dropped_keep_no_memory(tmp_path: Path) -> None:
    (tmp_path / "tiny.pte").write_bytes(tiny_lm())

    def cycle() -> None:
        program = load_program(tmp_path / "tiny.pte")
        program.load_method("forward")
        program.load_method("forward_greedy")

    assert growth(cycle, 100) < MAX_GROWTH_BYTES


def test_programs_that_cannot_be_loaded_keep_no_memory() -> None:
    damaged = with_damaged_payload(affine())

    def cycle() -> None:
        with pytest.raises(ProgramError, match="magic"):
            load_program(damaged).load_method("forward")

    assert growth(cycle, 500) < MAX_GROWTH_BYTES


def test_program_when_dropped_frees_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    loadings: list[Loading] = []
    original = Loading.__init__

    def remember(self: Loading, *arguments: object, **fields: object) -> None:
        original(self, *arguments, **fields)  # type: ignore[arg-type]
        loadings.append(self)

    monkeypatch.setattr(Loading, "__init__", remember)
    program = load_program(affine())
    method = program.load_method("forward")
    (loading,) = loadings
    assert len(loading.constants) == 2
    del program, method
    gc.collect()
    assert len(loading.constants) == 0
