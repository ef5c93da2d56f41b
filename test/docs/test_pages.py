"""The pages' Python runs, and prints what its comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/cache.md",
    "docs/add-a-layout.md",
    "docs/plain-torch.md",
    "docs/quantization.md",
    "extension/llm/cache/README.md",
)

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXPECTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_page_prints_what_it_says(page: str) -> None:
    code = "\n".join(_BLOCK.findall((ROOT / page).read_text()))
    expected = [line.split(":")[0] if ": the step" in line else line for line in _EXPECTED.findall(code)]
    assert expected
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=os.sep)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_pages_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("extension/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
