"""Hugging Face's language models as small random ones, each with what its program needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_WINDOW = {"sliding_window": 8}
_FOUR_LAYERS = {"num_hidden_layers": 4}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class LanguageModelKind:
    """A kind of model.

    Attributes:
        model_type: Hugging Face's name of it.
        known_as: names of models that people have.
        windows: of each cache, None for full attention.
        options: of the small configuration, beside sizes.
        head_dims: of keys and values, all that occur.
    """

    model_type: str
    known_as: str
    windows: tuple[int | None, ...] = (None, None)
    options: dict[str, Any] = field(default_factory=dict)
    head_dims: frozenset[tuple[int, int]] = frozenset({(16, 16)})


KINDS: dict[str, LanguageModelKind] = {
    "llama2": LanguageModelKind("llama", "Llama 2, SmolLM2, TinyLlama", options={"num_key_value_heads": 4}),
    "llama3": LanguageModelKind(
        "llama",
        "Llama 3, 3.1, 3.2, 3.3",
        options={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": LanguageModelKind(
        "llama",
        "any of these with YaRN",
        options={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": LanguageModelKind("qwen2", "Qwen 2, 2.5"),
    "qwen3": LanguageModelKind("qwen3", "Qwen 3", options=_HEADS),
    "smollm3": LanguageModelKind("smollm3", "SmolLM 3", (None,) * 4, _FOUR_LAYERS),
    "mistral": LanguageModelKind("mistral", "Mistral 7B v0.1", (8, 8), _WINDOW),
    "mistral_long": LanguageModelKind("mistral", "the same, its window as wide as it is", (4096, 4096)),
    "phi3": LanguageModelKind("phi3", "Phi 3, 3.5, 4 (not those with longrope)"),
    "granite": LanguageModelKind(
        "granite",
        "Granite 3",
        options={
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "embedding_multiplier": 6.0,
        },
    ),
    "olmo2": LanguageModelKind("olmo2", "OLMo 2"),
    "olmo3": LanguageModelKind("olmo3", "OLMo 3", (8, 8, 8, None), {**_WINDOW, **_FOUR_LAYERS}),
    "gemma3": LanguageModelKind(
        "gemma3_text", "Gemma 3 (text)", (8, None, 8, None), {**_HEADS, **_WINDOW, **_FOUR_LAYERS, **_TWO_KINDS}
    ),
    "gemma3n": LanguageModelKind(
        "gemma3n_text",
        "Gemma 3n (text): its last layers share the caches of others",
        (8, None),
        {
            **_HEADS,
            **_WINDOW,
            **_FOUR_LAYERS,
            **_TWO_KINDS,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4": LanguageModelKind(
        "gemma4_text",
        "Gemma 4 (text): its last layers share the caches of others",
        (8, None),
        {
            **_HEADS,
            **_WINDOW,
            **_FOUR_LAYERS,
            **_TWO_KINDS,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 32,
        },
        frozenset({(16, 16), (32, 32)}),
    ),
    "cohere2": LanguageModelKind(
        "cohere2", "Command R7B, Command A", (8, 8, 8, None), {**_HEADS, **_WINDOW, **_FOUR_LAYERS}
    ),
    "exaone4": LanguageModelKind("exaone4", "EXAONE 4", (8, 8, 8, None), {**_WINDOW, **_FOUR_LAYERS}),
    "qwen3_moe": LanguageModelKind(
        "qwen3_moe", "Qwen 3 30B-A3B, 235B-A22B", options={**_HEADS, **_EXPERTS, "num_experts": 4}
    ),
    "deepseek_v2": LanguageModelKind(
        "deepseek_v2",
        "DeepSeek V2, V2 Lite: latent attention",
        options={**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        head_dims=frozenset({(24, 16)}),
    ),
    "deepseek_v3": LanguageModelKind(
        "deepseek_v3",
        "DeepSeek V3, R1: latent attention",
        options={**_LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
        head_dims=frozenset({(24, 16)}),
    ),
}

REFUSED: dict[str, tuple[str, str]] = {
    "gemma2": ("Gemma 2", "its attention scores are soft-capped"),
    "gpt_oss": ("gpt-oss", "its attention has sinks"),
    "phi3": ("Phi 3 and 3.5 with longrope", "it chooses its frequencies by the longest position of a step"),
    "llama": ("any with dynamic NTK scaling", "it chooses its frequencies by the longest position of a step"),
}
"""Model types, the names of such models, and the reason."""


def small_model(kind: LanguageModelKind) -> PreTrainedModel:
    """Return a model of random weights, wide enough that its answers differ from token to token."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.model_type, **{**_SIZES, **kind.options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)
