"""What an export says of itself, and quantized exports through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executorch_mlx.backends.mlx.inspect_pte import inspect
from executorch_mlx.backends.mlx.passes import AttentionLayer
from executorch_mlx.examples.llm import export_llm, run_llm
from executorch_mlx.examples.llm.export import export_model
from executorch_mlx.examples.llm.report import cache_lines
from oracles.language_models import KINDS, small_model


class Undelegated(torch.nn.Module):
    """An operator without a lowering."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.fmod(1e6)


def test_report_names_what_is_left_out_with_its_module_line_and_reason(tmp_path: Path) -> None:
    model = small_model(KINDS["qwen2"])
    model.model.norm = torch.nn.Sequential(model.model.norm, Undelegated())
    report = export_model(model, tmp_path, max_step_tokens=16)
    (call,) = report.not_delegated
    assert (call.operator, call.module) == ("aten.fmod.Scalar", "model.model.norm.1")
    assert report.num_delegates == 2
    (line,) = [line for line in report.details() if line.startswith("not delegated")]
    assert "aten.fmod.Scalar in model.model.norm.1: there is no lowering for this operator" in line
    assert Path(__file__).name in line
    assert line in list(report.summary())


def test_report_counts_what_is_in_the_program(tmp_path: Path) -> None:
    report = export_model(small_model(KINDS["olmo3"]), tmp_path, max_step_tokens=16)
    (delegate,) = inspect(report.path)["methods"]["forward"]["delegates"]
    assert report.num_nodes == sum(len(chain) for chain in delegate["chains"])
    assert sum(report.weights.values()) == delegate["constant_bytes"]
    assert report.size_bytes == report.path.stat().st_size
    details = "\n".join(report.details())
    assert f"delegates: 1, with {report.num_nodes} instructions" in details
    assert "0 to 2: 2 head(s) of 16, a sliding window of 8" in details
    assert "3: 2 head(s) of 16, full attention" in details
    assert "not delegated: nothing" in details


def test_caches_that_are_alike_share_a_line() -> None:
    forms = [(None, 16), (None, 16), (8, 16), (None, 24), (8, 16)]
    layers = tuple(AttentionLayer(i, f"m{i}", 2, dim, 16, window) for i, (window, dim) in enumerate(forms))
    assert list(cache_lines(layers)) == [
        "0 to 1: 2 head(s) of 16, full attention",
        "2: 2 head(s) of 16, a sliding window of 8",
        "3: 2 head(s) of 24, values of 16, full attention",
        "4: 2 head(s) of 16, a sliding window of 8",
    ]


@pytest.mark.parametrize("quantize", ["4w", "8w"])
def test_quantized_export_by_the_command_answers_alike_stored_and_expanded(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    flags = ["--model", str(tiny.source), "--output-dir", str(tmp_path), "--max-step-tokens", "16"]
    export_llm.main([*flags, "--quantize", quantize, "--group-size", "32", "--report"])
    report = capsys.readouterr().out
    assert " uint32" in report
    assert "not delegated: nothing" in report
    answers = []
    for cpu_weights in ("stored", "float32"):
        run_llm.main(
            [
                *("--model-dir", str(tmp_path), "--prompt", "ab", "--max-new-tokens", "12", "--json"),
                *("--cpu-weights", cpu_weights),
            ]
        )
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1]
    assert answers[0]
