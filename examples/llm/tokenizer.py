"""Text to tokens and back, from an exported model's folder."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

Message = dict[str, str]


class Tokenizer:
    """A folder's ``tokenizer.json``, chat template and stop tokens.

    Attributes:
        stop_ids: tokens that end an answer.
        has_chat_template: whether ``encode_chat`` can be used.
    """

    def __init__(self, folder: Path) -> None:
        """Read a folder.

        Raises:
            FileNotFoundError: it has no tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected a folder written by export_llm")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        config = _json(folder / "tokenizer_config.json")
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
        template_path = folder / "chat_template.jinja"
        self._template = template_path.read_text() if template_path.is_file() else config.get("chat_template")
        self.has_chat_template = self._template is not None
        self.stop_ids = self._stop_ids(_json(folder / "generation_config.json"))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain text, with the special tokens that the tokenizer itself adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, ready for the assistant's answer.

        Args:
            messages: each with "role" and "content".

        Raises:
            ValueError: the model has no chat template, or the template refuses the conversation.
        """
        if self._template is None:
            raise ValueError("the model has no chat template; use --no-chat")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # A template is code from a model's folder: it runs in a sandbox that changes nothing.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            text = environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """Return a decoder for tokens as they come."""
        return TextStream(self._tokenizer)

    def _stop_ids(self, generation: dict[str, Any]) -> frozenset[int]:
        ids = generation.get("eos_token_id")
        if ids is None:
            eos = self._special["eos_token"]
            ids = self._tokenizer.token_to_id(eos) if eos else None
        return frozenset([ids] if isinstance(ids, int) else ids or [])


class TextStream:
    """Turns tokens into text as they come; a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Return the text that a token completes, which may be none."""
        return self._stream.step(self._tokenizer, token) or ""


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _token_text(token: Any) -> str | None:
    """A special token is written as text, or as an object with its text in it."""
    return token.get("content") if isinstance(token, dict) else token
