"""What ``load_program`` accepts, what it tells about a program, and how it refuses what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.backends.mlx.program import ProgramError
from executorch_mlx.backends.mlx.runtime.pte import HEAD_BYTES, check_length
from oracles.small_programs import (
    Affine,
    affine,
    export_function,
    payload_range,
    pointwise,
    run_process,
    with_damaged_payload,
)

X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture
def affine_path(tmp_path: Path) -> Path:
    path = tmp_path / "affine.pte"
    path.write_bytes(affine())
    return path


def assert_runs(program: Any) -> None:
    (out,) = program.load_method("forward").execute([X])
    torch.testing.assert_close(out, Affine()(X).detach())


# -- sources and what is known of a program --------------------------------------


@pytest.mark.parametrize("form", [str, Path, Path.read_bytes])
def test_load_program_from_a_path_or_bytes_runs(form: Any, affine_path: Path) -> None:
    assert_runs(load_program(form(affine_path)))


def test_load_program_with_its_file_removed_afterwards_runs(affine_path: Path) -> None:
    program = load_program(affine_path)
    program.load_method("forward")
    affine_path.unlink()
    assert_runs(program)


def test_program_names_all_methods() -> None:
    assert load_program(affine()).method_names == {
        "forward",
        "get_heads",
        "get_max_ctx_len",
        "get_windows",
        "other",
    }


def test_program_constants_are_the_values_of_its_get_methods() -> None:
    constants = load_program(affine()).constants()
    assert constants.keys() == {"get_heads", "get_max_ctx_len", "get_windows"}
    assert constants["get_max_ctx_len"] == 32
    assert constants["get_windows"] == [0, 4, 0]


def test_program_without_constant_methods_has_no_constants() -> None:
    assert load_program(pointwise()).constants() == {}


def test_program_metadata_describes_a_method_that_is_not_loaded() -> None:
    metadata = load_program(affine()).metadata("forward")
    assert (metadata.num_inputs(), metadata.num_outputs()) == (1, 1)
    assert tuple(metadata.input_tensor_meta(0).sizes()) == (16, 4)


def test_method_metadata_equals_the_programs() -> None:
    program = load_program(affine())
    assert str(program.load_method("forward").metadata) == str(program.metadata("forward"))


def test_load_method_twice_returns_the_same_method() -> None:
    program = load_program(affine())
    assert program.load_method("forward") is program.load_method("forward")


@pytest.mark.parametrize("name", ["backward", "", "forward\0"])
def test_load_method_of_an_unknown_name_raises_naming_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"no method .*it has forward, get_heads, get_max_ctx_len, get_windows"):
        load_program(affine()).load_method(name)


def test_method_whose_program_is_no_longer_held_runs(tmp_path: Path) -> None:
    """In a process of its own: the program's bytes go back to the system when nothing holds them."""
    (tmp_path / "padded.pte").write_bytes(affine() + bytes(1 << 20))
    script = """
        from pathlib import Path
        import torch
        from executorch_mlx.backends.mlx import load_program

        method = load_program(Path(sys.argv[1]).read_bytes()).load_method("forward")
        print([out.shape[0] for n in (1, 3) for out in method.execute([torch.zeros(n, 4)])])
    """
    status, output, errors = run_process(script, tmp_path / "padded.pte")
    assert (status, output) == (0, "[1, 3]\n"), errors


# -- refusals --------------------------------------------------------------------


@pytest.mark.parametrize("form", [str, Path])
def test_load_program_of_a_missing_file_raises_file_not_found(form: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.pte"):
        load_program(form(tmp_path / "missing.pte"))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\x1c\0\0\0PK12" + bytes(100), b"%PDF-1.7 and so on"])
@pytest.mark.parametrize("in_a_file", [False, True])
def test_load_program_of_something_else_raises_naming_the_mark(content: bytes, in_a_file: bool, tmp_path: Path) -> None:
    (tmp_path / "other.pte").write_bytes(content)
    with pytest.raises(ValueError, match=r"not an ExecuTorch program: expected the mark b'ET\.\.'"):
        load_program(tmp_path / "other.pte" if in_a_file else content)


def test_load_program_of_a_truncated_file_says_how_many_bytes_are_due(tmp_path: Path) -> None:
    (tmp_path / "cut.pte").write_bytes(affine()[:-100])
    with pytest.raises(ValueError, match=rf"truncated: its header promises \d+ bytes, got {len(affine()) - 100}"):
        load_program(str(tmp_path / "cut.pte"))


def test_check_length_of_a_whole_program_passes() -> None:
    check_length(affine()[:HEAD_BYTES], len(affine()))


@pytest.fixture(scope="module")
def damage_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What came of loading and running damaged programs: by sort of damage, how often which exception.

    In a process of its own, whose end by a signal would show as its status.
    """
    folder = tmp_path_factory.mktemp("damage")
    (folder / "affine.pte").write_bytes(affine())
    positions = payload_range(affine())
    script = """
        import json, logging, random
        from collections import Counter
        from pathlib import Path
        import torch
        from executorch_mlx.backends.mlx import load_program

        folder, start, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
        whole = (folder / "affine.pte").read_bytes()
        random.seed(3)
        outcomes = {}

        def attempt(sort, content, *, in_a_file=False):
            source = content
            if in_a_file:
                source = folder / "damaged.pte"
                source.write_bytes(content)
            outcome = "ran"
            try:
                program = load_program(source)
                method = program.load_method("forward")
            except Exception as error:
                outcome = type(error).__name__
            else:
                try:
                    method.execute([torch.ones(2, 4)])
                except Exception:
                    outcome = "failed when run"
            outcomes.setdefault(sort, Counter())[outcome] += 1

        cuts = sorted({*range(0, 128), *range(128, len(whole), 13), *range(len(whole) - 16, len(whole))})
        for cut in cuts:
            attempt("truncated", whole[:cut])
        for cut in cuts[::4]:
            attempt("truncated file", whole[:cut], in_a_file=True)
        for size in (1, 8, 64, 1000, 5000):
            for _ in range(10):
                attempt("random", random.randbytes(size))
                attempt("random behind the mark", whole[:8] + random.randbytes(size))
                attempt("random behind the header", whole[:64] + random.randbytes(len(whole)))
        for mark in (b"ET99", b"et12", b"\\0\\0\\0\\0"):
            attempt("mark", whole[:4] + mark + whole[8:])
        for at in range(start, stop):
            attempt("payload", whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:])
        attempt("whole", whole)
        print(json.dumps(outcomes))
    """
    status, output, errors = run_process(script, folder, positions.start, positions.stop)
    assert status == 0, errors[-2000:]
    outcomes: dict[str, dict[str, int]] = json.loads(output)
    return outcomes


@pytest.mark.parametrize(
    "damage",
    ["truncated", "truncated file", "random", "random behind the mark", "random behind the header", "mark"],
)
def test_load_program_of_a_damaged_program_raises(damage: str, damage_outcomes: dict[str, dict[str, int]]) -> None:
    assert damage_outcomes[damage].keys() <= {"ValueError", "RuntimeError"}


def test_load_program_after_many_damaged_ones_runs_a_whole_one(
    damage_outcomes: dict[str, dict[str, int]],
) -> None:
    assert damage_outcomes["whole"] == {"ran": 1}


def test_load_method_with_any_byte_of_a_payload_inverted_raises_or_loads(
    damage_outcomes: dict[str, dict[str, int]],
) -> None:
    """Some bytes are padding or unused, some make another program; all others are refused when it is loaded."""
    found = damage_outcomes["payload"]
    assert found.keys() <= {"ran", "failed when run", "ProgramError", "ValueError", "RuntimeError"}
    assert found["ProgramError"] > sum(found.values()) / 4


def test_load_method_with_a_damaged_payload_raises_its_error_as_itself() -> None:
    program = load_program(with_damaged_payload(affine()))
    for _ in range(2):
        with pytest.raises(ProgramError, match="expected magic b'MLX0', got b'MLXx'") as raised:
            program.load_method("forward")
        assert type(raised.value.__cause__) is RuntimeError


def test_load_program_after_a_damaged_payload_loads_another() -> None:
    damaged = load_program(with_damaged_payload(affine()))
    with pytest.raises(ProgramError, match="magic"):
        damaged.load_method("forward")
    assert_runs(load_program(affine()))
    assert damaged.constants()["get_max_ctx_len"] == 32


@pytest.mark.parametrize(
    "rearranged",
    [lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(2, 3), lambda x: x[:, ::2]],
    ids=["channels_last", "transposed", "strided"],
)
def test_input_that_is_not_contiguous_is_an_error(rearranged: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(1, 4, 3, 3)
    given = rearranged(x)
    program = export_function(lambda a: a.reshape(-1) * 2, given.contiguous())
    method = load_program(program).load_method("forward")
    with pytest.raises(ValueError, match=r"input 0: expected a contiguous tensor.*call .contiguous\(\)"):
        method.execute([given])
    torch.testing.assert_close(method.execute([given.contiguous()])[0], given.reshape(-1) * 2)
