"""The pages whose Python needs an exported SmolLM2: it runs, and prints what its comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What is printed stands behind the call, up to a colon, or in the lines below it.
_EXPECTED = re.compile(r"^(?: *print\(.*\)  )?# (.*?)(?:: .*)?$", re.MULTILINE)


@pytest.mark.smollm2
@pytest.mark.parametrize("page", ["README.md", "docs/batching.md"])
def test_page_prints_what_it_says(smollm2: Any, tmp_path: Path, page: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "smollm2").symlink_to(smollm2.folder)
    code = "\n".join(_BLOCK.findall((ROOT / page).read_text()))
    expected = _EXPECTED.findall(code)
    assert expected
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
