"""docs/cli.md says what the commands' --help says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from oracles.tools import ROOT, tool

PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_cli_page_is_what_the_parsers_say() -> None:
    assert tool("cli_docs").page() == PAGE, "run python tools/cli_docs.py"


@pytest.mark.parametrize("command", ["export_llm", "run_llm", "run_llm_batched", "bench_llm"])
def test_cli_page_names_every_flag_that_help_prints(command: str) -> None:
    name = f"executorch_mlx.examples.llm.{command}"
    result = subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, check=True)
    section = PAGE.split(f"`python -m {name}`")[1].split("\n## ")[0]
    # --help itself, and the other spelling of a switch, are the only ones that may be missing.
    flags = set(re.findall(r"--[a-z-]+", result.stdout)) - {"--help"}
    assert flags
    assert flags <= set(re.findall(r"--[a-z-]+", section))
