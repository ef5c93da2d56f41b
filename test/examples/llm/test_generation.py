"""Exported models against Hugging Face's eager ones: logits, greedy tokens, windows, limits."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch

from executorch_mlx.backends.mlx import load_program
from executorch_mlx.examples.llm.export import export_model
from executorch_mlx.examples.llm.folder import MODEL_FILE
from executorch_mlx.examples.llm.generation import LanguageModel
from executorch_mlx.examples.llm.tokenizer import Tokenizer
from executorch_mlx.extension.llm.cache import CacheFullError, CacheSession
from executorch_mlx.extension.llm.engine import Sampling

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "List three prime numbers and say why they are prime.",
)


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids])
    return model(tokens, attention_mask=torch.ones_like(tokens)).logits[0]


def reference_tokens(model: Any, ids: list[int], count: int) -> list[int]:
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def stepped_logits(model: LanguageModel, ids: list[int], sizes: list[int], capacity: int = 96) -> torch.Tensor:
    """Feed tokens in steps of the given sizes, then one by one."""
    with CacheSession(model.new_cache(capacity)):
        outputs, start = [], 0
        for size in sizes + [1] * (len(ids) - sum(sizes)):
            outputs.append(model.step(ids[start : start + size], range(start, start + size), range(size)))
            start += size
    return torch.cat(outputs)


@pytest.fixture(scope="session")
def small_ids() -> list[int]:
    return torch.randint(1, 257, (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("sizes", [[16, 16, 16], [1], [3, 11, 16, 2]], ids=str)
def test_exported_llama_in_any_chunks_has_the_eager_logits(tiny: Any, small_ids: list[int], sizes: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    expected = reference_logits(tiny.model, small_ids)
    torch.testing.assert_close(stepped_logits(model, small_ids, sizes), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [[5, 5, 5], [1], [2, 5, 3]], ids=str)
def test_exported_sliding_window_far_past_it_has_the_eager_logits(
    windowed: Any, small_ids: list[int], sizes: list[int]
) -> None:
    model = LanguageModel(windowed.folder / MODEL_FILE)
    expected = reference_logits(windowed.model, small_ids)
    torch.testing.assert_close(stepped_logits(model, small_ids, sizes), expected, rtol=1e-4, atol=1e-4)


def test_sliding_window_cache_holds_the_window_only(windowed: Any, small_ids: list[int]) -> None:
    model = LanguageModel(windowed.folder / MODEL_FILE)
    cache = model.new_cache(96)
    with CacheSession(cache):
        for start in range(0, 90, 5):
            model.step(small_ids[start : start + 5], range(start, start + 5), [0])
    # Two layers, keys and values, 2 heads of 8 floats, window 8 and steps of up to 5: 12 slots.
    assert cache.pool_bytes == 2 * 2 * 2 * 8 * 4 * (8 + 5 - 1)


def test_rows_not_asked_for_are_not_computed_and_any_order_may_be_asked(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(32)):
        all_rows = model.step(small_ids[:10], range(10), range(10))
    with CacheSession(model.new_cache(32)):
        some = model.step(small_ids[:10], range(10), [9, 0, 4])
    torch.testing.assert_close(some, all_rows[[9, 0, 4]])


def test_greedy_step_gives_the_likeliest_token_of_each_row(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(32)):
        greedy = model.step_greedy(small_ids[:10], range(10), [9, 0, 4])
    assert greedy == reference_logits(tiny.model, small_ids[:10]).argmax(-1)[[9, 0, 4]].tolist()


def test_both_methods_share_their_weights_in_the_file_and_in_memory(tiny: Any) -> None:
    weights = sum(p.numel() * 4 for p in tiny.model.parameters())
    path = tiny.folder / MODEL_FILE
    assert path.stat().st_size < 1.5 * weights
    program = load_program(path)
    gc.collect()
    before = mx.get_active_memory()
    kept = [program.load_method("forward")]
    one = mx.get_active_memory() - before
    kept.append(program.load_method("forward_greedy"))
    assert one >= weights
    # What the second adds: its scalars.
    assert mx.get_active_memory() - before - one < 4096


def test_generate_continues_what_the_cache_holds(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    prompt, more = small_ids[:20], small_ids[20:30]
    with CacheSession(model.new_cache(90)) as session:
        first = model.generate(prompt, max_new_tokens=6, session=session)
        # The last new token was never fed.
        second = model.generate([first.tokens[-1], *more], max_new_tokens=6, session=session)
    assert first.tokens == reference_tokens(tiny.model, prompt, 6)
    assert second.tokens == reference_tokens(tiny.model, prompt + first.tokens + more, 6)


def test_generate_stops_at_a_stop_token_and_leaves_it_out(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    expected = reference_tokens(tiny.model, small_ids[:20], 8)
    stop = expected[3]
    with CacheSession(model.new_cache(90)) as session:
        result = model.generate(small_ids[:20], max_new_tokens=8, stop_ids=frozenset([stop]), session=session)
    assert result.finish_reason == "stop"
    assert result.tokens == expected[: expected.index(stop)]


def test_generate_at_the_end_of_the_room_ends_with_length(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(22)) as session:
        result = model.generate(small_ids[:20], max_new_tokens=50, session=session)
        assert session.control.position == 22
    assert result.finish_reason == "length"
    assert result.tokens == reference_tokens(tiny.model, small_ids[:20], 3)


def test_prompt_longer_than_the_cache_is_refused_before_anything_changed(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(16)) as session:
        with pytest.raises(ValueError, match="20 tokens and there is room for 16"):
            model.generate(small_ids[:20], max_new_tokens=1, session=session)
        assert session.control.position == 0
        with pytest.raises(ValueError, match="no tokens"):
            model.generate([], max_new_tokens=1, session=session)


def test_full_cache_is_refused_and_can_be_rewound(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(16)) as session:
        model.step(small_ids[:16], range(16), [0])
        with pytest.raises(CacheFullError, match="holds 16 of 16 tokens"):
            model.step([1], [16], [0])
        assert session.control.rewind(15)
        logits = model.step([small_ids[15]], [15], [0])[0]
    torch.testing.assert_close(logits, reference_logits(tiny.model, small_ids[:16])[-1], rtol=1e-4, atol=1e-4)


def test_step_longer_than_the_program_allows_is_an_error_that_says_so(tiny: Any) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(32)), pytest.raises(ValueError, match="exceeds the program's bound"):
        model.step(list(range(1, 18)), range(17), [0])


@pytest.mark.parametrize(("tokens", "rows"), [([1, 300], [0]), ([10**12], [0]), ([1, 2], [2]), ([-301], [0])])
def test_token_or_row_out_of_range_is_an_error_and_changes_nothing(
    tiny: Any, tokens: list[int], rows: list[int]
) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(8)) as session:
        with pytest.raises(IndexError, match="index outside"):
            model.step(tokens, range(len(tokens)), rows)
        assert session.control.position == 0


def test_program_without_a_session_is_an_error_that_says_so(tiny: Any) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with pytest.raises(LookupError, match="no session is active"):
        model.step([1], [0], [0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_exported_half_precision_is_as_close_to_float32_as_eager_is(
    tiny: Any, tmp_path: Path, small_ids: list[int], dtype: torch.dtype
) -> None:
    half = copy.deepcopy(tiny.model).to(dtype)
    report = export_model(half, tmp_path, max_step_tokens=16)
    assert report.num_delegates == 1
    model = LanguageModel(report.path)
    with CacheSession(model.new_cache(32, str(dtype).removeprefix("torch."))):
        got = model.step(small_ids[:16], range(16), range(16))
    exact = reference_logits(tiny.model, small_ids[:16])
    eager_error = (reference_logits(half, small_ids[:16]).float() - exact).abs().mean()
    assert (got - exact).abs().mean() < 1.5 * eager_error


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_cache_stays_close(tiny: Any, small_ids: list[int], kv_dtype: str) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)
    with CacheSession(model.new_cache(32, kv_dtype)):
        logits = model.step(small_ids[:16], range(16), [15])[0]
    expected = reference_logits(tiny.model, small_ids[:16])[-1]
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_export_model_past_the_models_own_limit_is_an_error(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_context: the model's own limit is 96, got 97"):
        export_model(tiny.model, tmp_path, max_context=97)


def test_export_model_that_cannot_be_traced_is_one_error(tiny: Any, tmp_path: Path) -> None:
    class Counts(torch.nn.Module):
        config = tiny.model.config

        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            return input_ids if input_ids.sum() > 3 else input_ids + 1

    with pytest.raises(ValueError, match="Counts cannot be traced with a dynamic number of tokens"):
        export_model(Counts(), tmp_path)


@pytest.mark.parametrize(("option", "value"), [("quantize", "3w"), ("group_size", 48)])
def test_export_model_form_of_weights_that_is_not_known_is_an_error(
    tiny: Any, tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected one of .*, got '?{value}'?"):
        export_model(tiny.model, tmp_path, dtype=torch.float16, **{option: value})
    assert not list(tmp_path.iterdir())
    assert tiny.model.dtype is torch.float32


@pytest.mark.parametrize(("option", "value"), [("max_context", 1), ("max_step_tokens", 0)])
def test_export_model_limit_out_of_range_is_an_error(tiny: Any, tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected 2 or more, got {value}"):
        export_model(tiny.model, tmp_path, **{option: value})
    assert not list(tmp_path.iterdir())


# -- SmolLM2 --------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_is_one_delegate_with_a_cache_per_layer(smollm2: Any) -> None:
    constants = load_program(smollm2.folder / MODEL_FILE).constants()
    assert constants["get_n_caches"] == 30
    assert constants["get_kv_heads"] == [3] * 30
    assert constants["get_head_dims"] == constants["get_v_head_dims"] == [64] * 30
    assert constants["get_windows"] == [0] * 30
    assert constants["get_max_ctx_len"] == 8192
    assert constants["get_vocab_size"] == 49152


@pytest.mark.smollm2
@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_greedy_tokens_and_logits_equal_hugging_face(smollm2: Any, prompt: str) -> None:
    model, tokenizer = LanguageModel(smollm2.folder / MODEL_FILE), Tokenizer(smollm2.folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    with CacheSession(model.new_cache(len(ids) + 40)) as session:
        result = model.generate(ids, max_new_tokens=40, stop_ids=tokenizer.stop_ids, session=session)
    expected = reference_tokens(smollm2.model, ids, 40)
    assert len(expected) == 40
    assert result.tokens == expected
    whole = ids + result.tokens
    sizes = [32] * (len(ids) // 32)
    got = stepped_logits(model, whole[: len(ids) + 4], sizes, capacity=len(whole))
    torch.testing.assert_close(got, reference_logits(smollm2.model, whole[: len(ids) + 4]), rtol=0, atol=1e-3)


@pytest.mark.smollm2
def test_smollm2_knows_the_capital_of_france(smollm2: Any) -> None:
    model, tokenizer = LanguageModel(smollm2.folder / MODEL_FILE), Tokenizer(smollm2.folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with CacheSession(model.new_cache(64)) as session:
        result = model.generate(ids, max_new_tokens=20, stop_ids=tokenizer.stop_ids, session=session)
    assert tokenizer.decode(result.tokens) == "The capital of France is Paris."


def test_a_seed_gives_the_same_tokens_in_any_chunks(tiny: Any, small_ids: list[int]) -> None:
    model = LanguageModel(tiny.folder / MODEL_FILE)

    def sampled(max_step: int) -> list[int]:
        model.max_step = max_step
        with CacheSession(model.new_cache(64)) as session:
            result = model.generate(small_ids[:20], max_new_tokens=8, sampling=Sampling(1.0, seed=1), session=session)
        return result.tokens

    assert sampled(16) == sampled(3)
