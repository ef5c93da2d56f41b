"""Models for the commands' tests: a tiny random one as a Hugging Face folder, and SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from executorch_mlx.examples.llm import export_llm
from executorch_mlx.examples.llm.checkpoint import load_checkpoint
from executorch_mlx.examples.llm.export import export_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 96,
    "eos_token_id": 0,
    "bos_token_id": None,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: token 0 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def random_model(kind: str = "llama", **options: Any) -> torch.nn.Module:
    """A random model, on the CPU in float32."""
    torch.manual_seed(0)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}[kind]
    made = model._from_config(config(**{**TINY, **options}), attn_implementation="sdpa")
    # Weights this wide give distinct answers; the default initialisation is close to uniform.
    for parameter in made.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3 if parameter.ndim > 1 else 0.0, mean=0.0 if parameter.ndim > 1 else 1.0
        )
    return made.eval().requires_grad_(False)


@dataclass(frozen=True)
class Exported:
    """A model, its exported folder, and its Hugging Face folder where it has one."""

    model: Any
    folder: Path
    source: Path | None = None


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Torch's threads would fight with those that MLX multiplies with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A random Llama exported by the command from its folder, in steps of at most 16 tokens."""
    source, folder = tmp_path_factory.mktemp("tiny-hf"), tmp_path_factory.mktemp("tiny")
    model = random_model()
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    export_llm.main(["--model", str(source), "--output-dir", str(folder), "--max-step-tokens", "16"])
    return Exported(model, folder, source)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A random Mistral with a window of 8, in steps of at most 5 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    model = random_model("mistral", sliding_window=8)
    export_model(model, folder, max_step_tokens=5)
    return Exported(model, folder)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """SmolLM2-135M-Instruct in float32, in steps of at most 32 tokens."""
    folder = tmp_path_factory.mktemp("smollm2")
    checkpoint = load_checkpoint("smollm2", torch.float32)
    export_model(checkpoint.model, folder, max_step_tokens=32)
    checkpoint.tokenizer.save_pretrained(folder)
    checkpoint.model.generation_config.save_pretrained(folder)
    return Exported(checkpoint.model, folder)
