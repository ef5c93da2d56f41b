"""What the inspector says of programs, against what their exporters and the runtime know of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from executorch_mlx.backends.mlx import inspect_pte, load_program
from executorch_mlx.backends.mlx.program import ProgramError
from interop.cases import graphs, kinds
from oracles.small_programs import affine, pointwise, split_lm, tiny_lm, with_damaged_payload


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "model.pte"
    path.write_bytes(request.param())
    return path


@pytest.mark.parametrize("written", [affine, pointwise, tiny_lm, split_lm], indirect=True)
def test_json_tells_of_every_delegate_what_lies_in_its_payload(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_pte.main([str(written), "--json"])
    report = json.loads(capsys.readouterr().out)
    program = load_program(written)
    assert report["bytes"] == written.stat().st_size
    assert report["methods"].keys() | report["constants"].keys() == set(program.method_names)
    named = {name: value for name, value in report["constants"].items() if name.startswith("get_")}
    assert named == program.constants()
    delegates = [delegate for method in report["methods"].values() for delegate in method["delegates"]]
    said = [
        (
            [[row["kind"] for row in chain] for chain in delegate["chains"]],
            len(delegate["inputs"]),
            len(delegate["constants"]),
        )
        for delegate in delegates
    ]
    found = list(graphs(written.read_bytes()))
    assert sorted(said) == sorted((kinds(graph), len(graph.input_map), graph.num_constant_tensors) for graph in found)
    attends = [any("UpdateAndAttendNode" in chain for chain in chains) for chains, *_ in said]
    assert [bool(delegate["caches"]) for delegate in delegates] == attends


@pytest.mark.parametrize("written", [tiny_lm], indirect=True)
def test_text_lists_shapes_constants_and_instructions(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_pte.main([str(written)])
    short = capsys.readouterr().out
    assert re.search(r"inputs: t\d+ int64\[1, \d+\.\.16\]", short)
    assert re.search(r"constants: \d+, [\d,]+ bytes", short)
    assert "UpdateAndAttendNode" in short
    assert "layer_id=0" not in short
    inspect_pte.main([str(written), "--instructions"])
    assert "layer_id=0" in capsys.readouterr().out


@pytest.mark.parametrize("written", [pointwise], indirect=True)
def test_dot_draws_each_instruction_and_a_way_from_input_to_output(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_pte.main([str(written), "--json"])
    report = json.loads(capsys.readouterr().out)
    inspect_pte.main([str(written), "--dot", "forward"])
    drawn = capsys.readouterr().out
    (chain,) = report["methods"]["forward"]["delegates"][0]["chains"]
    assert drawn.startswith("digraph") and drawn.endswith("}\n")  # noqa: PT018
    assert len(re.findall(r"^  n\d+ \[", drawn, re.MULTILINE)) == len(chain)
    edges: dict[str, set[str]] = {}
    for source, target in re.findall(r"^  (\w+) -> (\w+);", drawn, re.MULTILINE):
        edges.setdefault(source, set()).add(target)
    reached, front = set(), {"input0"}
    while front:
        reached |= front
        front = set().union(*(edges.get(node, set()) for node in front)) - reached
    assert "output0" in reached


@pytest.mark.parametrize("written", [affine], indirect=True)
def test_delegate_that_is_not_there_is_an_error_that_names_those_that_are(written: Path) -> None:
    with pytest.raises(LookupError, match=r"no MLX delegate 'backward' in .*; there are: forward:0"):
        inspect_pte.main([str(written), "--dot", "backward"])


def test_other_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        inspect_pte.main([str(tmp_path / "none.pte")])
    path = tmp_path / "other.pte"
    path.write_bytes(b"something else entirely, and no program")
    with pytest.raises(ValueError, match="no ExecuTorch program"):
        inspect_pte.main([str(path)])
    path.write_bytes(with_damaged_payload(affine()))
    with pytest.raises(ProgramError):
        inspect_pte.main([str(path)])
