"""The benchmark command: what it measures, writes and refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from executorch_mlx.examples.llm import bench_llm, command

PNG = b"\x89PNG\r\n"
LISTS = ("--batch-sizes", "1,3", "--prompt-tokens", "4", "9", "--new-tokens", "2", "--turns", "2")


def test_every_case_is_measured_and_written_as_table_csv_json_and_plot(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "here"
    bench_llm.main(["--model-dir", str(tiny.folder), *LISTS, "--output-dir", str(folder)])
    content = json.loads((folder / "bench.json").read_text())
    rows = content["rows"]
    keys = ("prompt_tokens", "new_tokens", "batch_size", "cache_kind")
    kinds = ("batched-sequence", "batched-paged", "batched-cell")
    expected = [(prompt, 2, batch, kind) for prompt in (4, 9) for batch in (1, 3) for kind in kinds]
    assert [tuple(row[key] for key in keys) for row in rows] == expected
    assert content["device"] == command.device()
    for row in rows:
        prompt, new = row["batch_size"] * row["prompt_tokens"], row["batch_size"] * row["new_tokens"]
        for tokens, name in ((prompt, "prefill"), (new, "decode"), (prompt + new, "total")):
            assert row[f"{name}_tokens_per_s"] == pytest.approx(tokens / row[f"{name}_s"], rel=1e-9)
    for index, row in enumerate(rows):
        first = rows[index - index % len(kinds)]
        assert row["decode_ratio"] == pytest.approx(first["decode_s"] / row["decode_s"], rel=1e-9)
    with (folder / "bench.csv").open() as file:
        assert [{key: str(value) for key, value in row.items()} for row in rows] == list(csv.DictReader(file))
    assert (folder / "bench.png").read_bytes().startswith(PNG)
    captured = capsys.readouterr()
    assert captured.out.count("batched-cell") == 4
    assert "turn 2 of 2: batched-cell, 3 x 9 tokens" in captured.err


def test_first_turn_is_not_counted(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100.0, 100.0), (1.0, 4.0), (3.0, 2.0), (2.0, 3.0)])
    monkeypatch.setattr(bench_llm, "_run", lambda *_: next(times))
    case = bench_llm.Case("batched", 6, 3, 2)
    (figures,) = bench_llm.measure(None, [case], 3, "float32", lambda stage: None).values()  # type: ignore[arg-type]
    assert (figures.prefill_s, figures.decode_s, figures.total_s) == (2, 3, 5)
    assert (figures.prefill_tokens_per_s, figures.decode_tokens_per_s, figures.total_tokens_per_s) == (6, 2, 3.6)


def test_model_of_a_configuration_gets_random_weights(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny.source / "config.json"
    bench_llm.main(["--config", str(config), "--batch-sizes", "2", "--prompt-tokens", "3", "--new-tokens", "1"])
    captured = capsys.readouterr()
    assert "make random weights" in captured.err
    assert captured.out.count("batched-cell") == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--batch-sizes", "1,x"), ValueError, "--batch-sizes: expected integers, got 1,x"),
        (("--batch-sizes", "4,0"), ValueError, "--batch-sizes: expected 1 or more, got 0"),
        (("--prompt-tokens", "-3"), ValueError, "--prompt-tokens: expected 1 or more, got -3"),
        (("--new-tokens", "0"), ValueError, "--new-tokens: expected 1 or more, got 0"),
        (("--turns", "0"), ValueError, "--turns: expected 1 or more, got 0"),
        (("--cache-kinds", "batched,paged"), LookupError, "no cache kind 'paged'"),
        (("--cache-kinds", "sequence"), ValueError, "'sequence' holds one sequence"),
        (
            ("--prompt-tokens", "90", "--new-tokens", "7"),
            ValueError,
            "97 tokens of prompt and answer: .* is 96",
        ),
        (("--batch-sizes", "17", "--prompt-tokens", "4", "--new-tokens", "1"), ValueError, "17: .* take at most 16"),
    ],
)
def test_wrong_input_is_one_error(tiny: Any, arguments: tuple[str, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench_llm.main(["--model-dir", str(tiny.folder), *arguments])


@pytest.mark.parametrize("given", [(), ("--model-dir", "a", "--config", "b")], ids=("neither", "both"))
def test_model_is_given_once(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_llm.main(list(given))
    assert "--config" in capsys.readouterr().err


def test_configuration_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none"):
        bench_llm.main(["--config", str(tmp_path / "none")])
