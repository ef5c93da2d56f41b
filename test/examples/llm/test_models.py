"""Each kind of language model: one delegate, and Hugging Face's logits on every kind of cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executorch_mlx.examples.llm.export import export_model
from executorch_mlx.examples.llm.generation import LanguageModel
from executorch_mlx.examples.llm.supported import UnsupportedModelError
from executorch_mlx.extension.llm.cache import CacheSession
from oracles.language_models import KINDS, VOCABULARY, small_model
from oracles.language_models import REFUSED as REFUSED_KINDS
from oracles.tools import ROOT, tool

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_STEP = 16
LENGTHS = (40, 24)
# Steps of one sequence, as (from, to): a whole prompt in chunks of the largest size, of other sizes, token by token.
PREFILL = [(0, 16), (16, 32), (32, 40)]
CHUNKS = [(0, 5), (5, 21), (21, 24), (24, 40)]
DECODE = [(0, 3), *((at, at + 1) for at in range(3, 40))]
# Steps of two sequences on one axis: prompts beside each other, a prompt beside a decode, decodes, uneven ones.
TOGETHER = [
    ((0, 9), (0, 7)),
    ((9, 10), (7, 19)),
    *(((at, at + 1), (at + 9, at + 10)) for at in range(10, 15)),
    ((15, 27), None),
    ((27, 40), None),
]
TOLERANCE = {"rtol": 0, "atol": 1e-4}

PAGE = (ROOT / "docs" / "models.md").read_text()


def run_alone(model: LanguageModel, tokens: list[int], steps: list[tuple[int, int]]) -> torch.Tensor:
    rows = [model.step(tokens[a:b], list(range(a, b)), list(range(b - a))) for a, b in steps]
    return torch.cat(rows)


def run_together(model: LanguageModel, control: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Run both sequences in each step; their tokens lie in turn on the axis, first of one, then of the other."""
    ids = [control.seq_new() for _ in prompts]
    logits: list[list[torch.Tensor]] = [[], []]
    for step in TOGETHER:
        taken = [(index, at) for index, span in enumerate(step) if span is not None for at in range(*span)]
        # The order within a sequence must stay; between them any will do.
        taken.sort(key=lambda item: (item[1] - step[item[0]][0], item[0]))
        assert control.declare_step([ids[index] for index, _ in taken])
        tokens, positions = [prompts[index][at] for index, at in taken], [at for _, at in taken]
        for (index, _), row in zip(taken, model.step(tokens, positions, list(range(len(taken)))), strict=True):
            logits[index].append(row)
    return [torch.stack(rows) for rows in logits]


@pytest.mark.parametrize("name", KINDS)
def test_model_is_one_delegate_and_equals_hugging_face(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    reference = small_model(kind)
    report = export_model(reference, tmp_path, max_step_tokens=MAX_STEP)
    assert (report.num_delegates, report.not_delegated) == (1, ())
    assert tuple(layer.window for layer in report.layers) == kind.windows
    assert {(layer.head_dim, layer.v_head_dim) for layer in report.layers} == kind.head_dims
    assert tool("models_page").row(kind, report) in PAGE, "run python tools/models_page.py"

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        wanted = [reference(ids[None], attention_mask=torch.ones(1, len(ids))).logits[0] for ids in prompts]
    # A model that answers alike everywhere would prove nothing.
    assert len(set(wanted[0].argmax(-1).tolist())) > 5

    model = LanguageModel(report.path)
    for steps in (PREFILL, CHUNKS, DECODE):
        with CacheSession(model.new_cache(64)):
            logits = run_alone(model, prompts[0].tolist(), steps)
        torch.testing.assert_close(logits, wanted[0], **TOLERANCE)
    for layout in ("batched-cell", "batched-sequence", "batched-paged"):
        with CacheSession(model.new_cache(128, kind=layout, max_seqs=2)) as session:
            both = run_together(model, session.control, [ids.tolist() for ids in prompts])
        for logits, expected in zip(both, wanted, strict=True):
            torch.testing.assert_close(logits, expected[: len(logits)], **TOLERANCE)


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen3_moe", "deepseek_v3"])
def test_generation_is_that_of_hugging_face(tmp_path: Path, name: str) -> None:
    reference = small_model(KINDS[name])
    model = LanguageModel(export_model(reference, tmp_path, max_step_tokens=MAX_STEP).path)
    prompt = torch.arange(5, 25)[None]
    expected = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    with CacheSession(model.new_cache(64)) as session:
        generation = model.generate(prompt[0].tolist(), max_new_tokens=20, session=session)
    assert generation.tokens == expected[0, 20:].tolist()


# -- models that are refused ------------------------------------------------------

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
# Model type, options, and the module that is named.
REFUSED = {
    "softcap": ("gemma2", {}, "model.layers.0.self_attn"),
    "sinks": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "model.layers.0.self_attn"),
    "longrope": ("phi3", {"rope_parameters": _LONGROPE}, "model.rotary_emb"),
    "dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "model.rotary_emb",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_a_cache_would_change_is_refused_with_the_module(tmp_path: Path, name: str) -> None:
    model_type, options, module = REFUSED[name]
    _, reason = REFUSED_KINDS[model_type]
    assert reason in PAGE
    config = AutoConfig.for_model(model_type, **{**_SMALL, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # Some models say themselves that they cannot do this: whoever insists gets no answer that is silently another.
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(module)} cannot be exported: {reason}"):
        export_model(model, tmp_path)
    assert not list(tmp_path.iterdir())
