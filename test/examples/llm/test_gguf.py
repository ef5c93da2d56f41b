"""GGUF files: blocks against the ``gguf`` package's own expansion, models against transformers' loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.constants import MODEL_ARCH_NAMES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from executorch_mlx.backends.mlx.quantized import dequantize
from executorch_mlx.examples.llm.checkpoint import load_checkpoint
from executorch_mlx.examples.llm.export import export_model
from executorch_mlx.examples.llm.generation import LanguageModel
from executorch_mlx.examples.llm.gguf_blocks import affine_of, is_affine, keeps_scales
from executorch_mlx.examples.llm.gguf_checkpoint import load_gguf
from executorch_mlx.examples.llm.supported import UnsupportedModelError
from executorch_mlx.extension.llm.cache import CacheSession

Kind = GGMLQuantizationType
KEPT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K)
# Kinds whose blocks hold an offset beside the scale.
_WITH_OFFSET = (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Blocks of random bytes, with scales and offsets that are ordinary numbers."""
    generator = np.random.default_rng(int(kind))
    count, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * columns // count, size), dtype=np.uint8)
    halves = generator.normal(size=(len(blocks), 2)).astype(np.float16).view(np.uint8)
    number = 4 if kind in _WITH_OFFSET else 2
    blocks[:, :number] = halves[:, :number]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_blocks_are_kept_number_for_number(kind: Kind) -> None:
    blocks = random_blocks(kind, 6, 512)
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    assert is_affine(kind)
    assert torch.equal(dequantize(*affine_of(blocks, kind, torch.float32)), expected)
    for dtype in (torch.float16, torch.bfloat16):
        scales = affine_of(blocks, kind, torch.float32).scales
        is_exact = torch.equal(affine_of(blocks, kind, dtype).scales.float(), scales)
        assert keeps_scales(kind, dtype) == is_exact


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_NL, Kind.F16], ids=lambda kind: kind.name)
def test_blocks_of_other_kinds_are_not_affine(kind: Kind) -> None:
    assert not is_affine(kind)


# -- whole files ------------------------------------------------------------------

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# Hugging Face's model type, the architecture's name in GGUF.
MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
# What transformers does not read from the file.
FIXED = {"qwen3": {"head_dim": 128}}


def write_model(
    path: Path,
    model_type: str,
    kind: Kind,
    *,
    tied: bool = False,
    more: dict[str, np.ndarray] | None = None,
    without: str = "",
) -> None:
    """Write a file of random blocks in the form of llama.cpp's converter; nothing in it is a model's own weights."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **FIXED.get(model_type, {})}, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    name = MODELS[model_type]
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    writer.add_sliding_window(8)
    generator = np.random.default_rng(1)
    for target, parameter in model.named_parameters():
        tensor = names.get_name(target, try_suffixes=(".weight", ".bias"))
        if tensor == without:
            continue
        shape = tuple(parameter.shape)
        block, _ = GGML_QUANT_SIZES[kind]
        floats = generator.normal(size=shape).astype(np.float32) * (0.1 if len(shape) > 1 else 1.0)
        if len(shape) > 1 and shape[1] % block == 0:
            data = gguf.quantize(floats, kind)
            writer.add_tensor(tensor, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor, floats)
    for tensor, data in (more or {}).items():
        writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_transformers(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel | None:
    return load_gguf(path, AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name), dtype)


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        result: torch.Tensor = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    return result


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_is_that_of_transformers(tmp_path: Path, model_type: str, tied: bool) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, model_type, Kind.Q4_0, tied=tied)
    model = loaded(path)
    assert model is not None
    assert torch.equal(logits(model), logits(by_transformers(path)))
    packed = {name for name, tensor in model.named_parameters() if tensor.dtype == torch.int32}
    assert len(packed) == 2 * 7 + (1 if tied else 2)


def test_llama_3_frequency_factors_are_applied(tmp_path: Path) -> None:
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    write_model(plain, "llama", Kind.Q8_0)
    factors = np.linspace(1, 8, SIZES["head_dim"] // 2, dtype=np.float32)
    write_model(scaled, "llama", Kind.Q8_0, more={"rope_freqs.weight": factors})
    expected, model = by_transformers(plain), loaded(scaled)
    expected.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    assert model is not None
    assert torch.equal(logits(model), logits(expected))
    assert not torch.equal(logits(model), logits(by_transformers(plain)))


def test_blocks_that_cannot_be_kept_are_expanded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "qwen3", Kind.Q5_0)
    monkeypatch.setattr("executorch_mlx.examples.llm.gguf_checkpoint.is_affine", lambda kind: kind != Kind.Q5_0)
    model = loaded(path)
    assert model is not None
    assert "tensors expanded, as MLX's form cannot hold their blocks: 16 of Q5_0" in caplog.text
    assert torch.equal(logits(model), logits(by_transformers(path)))


def test_scales_that_are_rounded_are_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", Kind.Q4_0)
    assert loaded(path, torch.float16) is not None
    assert "rounded" not in caplog.text
    assert loaded(path, torch.bfloat16) is not None
    assert "the scales of its blocks are rounded to bfloat16" in caplog.text


def test_an_architecture_that_is_not_known_is_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_gguf(path, None, torch.float32) is None
    assert "the blocks of architecture 'falcon' are expanded; kept are those of llama" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"without": "blk.1.attn_q.weight"}, "it has no tensor for model.layers.1.self_attn.q_proj.weight"),
        ({"more": {"blk.0.attn_sinks": np.zeros(4, np.float32)}}, "the model has no place for blk.0.attn_sinks"),
    ],
    ids=["missing", "too many"],
)
def test_a_file_of_other_tensors_is_refused(tmp_path: Path, options: Any, reason: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", Kind.Q8_0, **options)
    with pytest.raises(ValueError, match=reason):
        loaded(path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_checkpoint(str(path), torch.float32, keep_blocks=True)


@pytest.mark.smollm2
@pytest.mark.usefixtures("one_torch_thread")
def test_smollm2_keeps_its_blocks(smollm2: Any, tmp_path: Path) -> None:
    model = load_checkpoint("smollm2", torch.float32, keep_blocks=True).model
    report = export_model(model, tmp_path, max_step_tokens=32)
    assert report.size_bytes <= 115_000_000
    assert report.num_delegates == 1
    tokens = [504, 3575, 282, 4649, 314, 7042, 30]
    with torch.no_grad():
        wanted = smollm2.model(torch.tensor([tokens])).logits[0]
    for cpu_weights in ("stored", "float32"):
        program = LanguageModel(report.path, cpu_weights=cpu_weights)
        with CacheSession(program.new_cache(32)):
            rows = list(range(len(tokens)))
            torch.testing.assert_close(program.step(tokens, rows, rows), wanted, rtol=0, atol=1e-3)
