"""What ExecuTorch's own MLX exporter writes runs here, and what is written here its own reader reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interop.cases import find_cases, graphs, kinds, read_case, run_case
from interop.upstream import missing_sources
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
