"""docs/cli.md says what the commands' --help says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_cli_page_is_what_the_parsers_say() -> None:
    spec = importlib.util.spec_from_file_location("cli_docs", ROOT / "tools" / "cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == PAGE, "run python tools/cli_docs.py"


@pytest.mark.parametrize("command", ["export_llm", "run_llm", "run_llm_batched", "bench_llm"])
def test_cli_page_names_every_flag_that_help_prints(command: str) -> None:
    name = f"executorch_mlx.examples.llm.{command}"
    result = subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, check=True)
    section = PAGE.split(f"`python -m {name}`")[1].split("\n## ")[0]
    # --help itself, and the other spelling of a switch, are the only ones that may be missing.
    flags = set(re.findall(r"--[a-z-]+", result.stdout)) - {"--help"}
    assert flags
    assert flags <= set(re.findall(r"--[a-z-]+", section))
