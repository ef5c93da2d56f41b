"""What ExecuTorch's own MLX exporter writes runs here, and what is written here its own reader reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interop.cases import brings_metal, find_cases, graphs, kinds, read_case, run_case
from interop.upstream import missing_sources
from interop.without_executorch import Tensor, read, write
from oracles.small_programs import affine, num_delegates, pointwise, tiny_lm

HERE = Path(__file__).parent
SAMPLE = 40
# A sample that holds a program with a cache outside and one that brings Metal source.
SEED = 1
PATIENCE_S = 300

pytestmark = pytest.mark.skipif(
    bool(missing_sources()), reason=f"the installed executorch lacks {', '.join(missing_sources())}"
)


def in_a_process(script: str, *arguments: str | Path) -> str:
    """Return what a script of this folder prints; it must succeed."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{script}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def without_executorch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``without_executorch.py`` where neither ExecuTorch nor torch can be imported."""
    script = str(HERE / "without_executorch.py")
    code = (
        "import runpy, sys; sys.modules.update(executorch=None, torch=None);"
        f" sys.argv = {[script, *map(str, arguments)]!r}; runpy.run_path({script!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Upstream's operator tests, as its own exporter exports them: a few, spread over the operators."""
    folder = tmp_path_factory.mktemp("interop-cases")
    in_a_process("make_cases.py", folder, "--limit", str(SAMPLE), "--seed", str(SEED))
    return find_cases(folder)


def test_a_sample_of_upstreams_operator_tests_runs_as_upstream_expects(sample: list[Path]) -> None:
    assert len(sample) == SAMPLE
    outcomes, failures = set(), []
    for folder in sample:
        try:
            outcomes.add(run_case(folder))
        except AssertionError as error:
            failures.append(f"{folder.name}: {error}")
    assert not failures, "\n".join(failures)
    assert outcomes == {"ran", "refused"}
    assert any(read_case(folder).kv_cache for folder in sample)


@pytest.fixture(scope="session")
def packed(sample: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cases, packed: one with a cache outside, one in bfloat16 and another."""
    runnable = [folder for folder in sample if not brings_metal((folder / "model.pte").read_bytes())]
    cached = next(folder for folder in runnable if read_case(folder).kv_cache)
    bfloat16 = next(folder for folder in runnable if read_case(folder).expected[0].dtype == torch.bfloat16)
    other = next(folder for folder in runnable if folder not in (cached, bfloat16))
    path = tmp_path_factory.mktemp("packed") / "cases.npz"
    in_a_process("without_executorch.py", "pack", cached, bfloat16, other, "--out", path)
    return path


def test_packed_cases_run_without_executorch_and_torch(packed: Path) -> None:
    done = without_executorch("run", packed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 as expected" in done.stdout


def test_a_packed_case_with_an_altered_expectation_fails_by_its_name(packed: Path, tmp_path: Path) -> None:
    cases = read(packed)
    (cached,) = (case for case in cases if case.cache)
    altered = replace(cached, expected=[Tensor(value.dtype, value.data + 1) for value in cached.expected])
    write([altered if case is cached else case for case in cases], tmp_path / "altered.npz")
    done = without_executorch("run", tmp_path / "altered.npz")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{cached.name}: FAILED: output 0: " in done.stdout
    assert "2 of 3 as expected" in done.stdout


def test_upstreams_reader_finds_the_instructions_that_are_written_here(tmp_path: Path) -> None:
    programs: tuple[Callable[[], bytes], ...] = (affine, pointwise, tiny_lm)
    ours = {}
    for program in programs:
        path = tmp_path / f"{program.__name__}.pte"
        path.write_bytes(program())
        ours[str(path)] = [kinds(graph) for graph in graphs(program())]
        assert len(ours[str(path)]) == num_delegates(program())
        assert all(chain for delegate in ours[str(path)] for chain in delegate)
    assert json.loads(in_a_process("upstream.py", *ours)) == ours
