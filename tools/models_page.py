"""Writes docs/models.md from the reports of exports, one of each kind of model: ``python tools/models_page.py``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "test"))

from executorch_mlx.examples.llm.export import export_model  # noqa: E402
from executorch_mlx.examples.llm.report import Report, cache_lines  # noqa: E402
from oracles.language_models import KINDS, REFUSED, LanguageModelKind, small_model  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

Each row is the report of a small model of that kind, exported as `export_llm` does. The test suite compares its logits
with Hugging Face's, in float32 to 1e-4: a prompt in chunks of several sizes and token by token, alone and two sequences
in one step, on each kind of cache (`test/examples/llm/test_models.py`). These models have two or four layers, and most
windows are of 8 tokens; what a model of yours becomes, `export_llm --report` says. This page is written by
`tools/models_page.py`.

| models | type | delegates | instructions | KV caches | not delegated |
|---|---|---|---|---|---|
"""
REFUSALS = """
Refused, each with the module's name and the reason:

| models | type | because |
|---|---|---|
"""
TAIL = """
Also refused, in any model: attention that is written out instead of calling `scaled_dot_product_attention`, biases on
scores (ALiBi) and other masks than causal ones with or without a window, dropout, positions that only the masks follow,
a token axis of fixed size. Why soft-capped scores and sinks are refused:
[decision 0007](decisions/0007-softcap-and-sinks.md). Models without Hugging Face: [plain PyTorch](plain-torch.md).
"""


def row(kind: LanguageModelKind, report: Report) -> str:
    """Return a model's line."""
    left_out = ", ".join(sorted({call.operator for call in report.not_delegated})) or "nothing"
    caches = "<br>".join(cache_lines(report.layers))
    columns = (kind.known_as, f"`{kind.model_type}`", report.num_delegates, report.num_nodes, caches, left_out)
    return f"| {' | '.join(map(str, columns))} |"


def main() -> None:
    """Export all kinds and write the page."""
    rows = []
    for name, kind in KINDS.items():
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(kind, export_model(small_model(kind), folder, max_step_tokens=16)))
    refused = [f"| {known_as} | `{kind}` | {reason} |" for kind, (known_as, reason) in REFUSED.items()]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n" + REFUSALS + "\n".join(refused) + "\n" + TAIL)


if __name__ == "__main__":
    main()
