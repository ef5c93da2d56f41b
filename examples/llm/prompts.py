"""Prompts with settings of their own: from flags, text lines or JSONL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executorch_mlx.extension.llm.engine import Request, Sampling

from .tokenizer import Tokenizer

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")

_NUMBER, _TEXTS = (int, float), "a text or a list of texts"
# What a line of JSONL may say, with its type. All but the prompt override the command's flags.
_KEYS: dict[str, Any] = {
    "prompt": str,
    "system": str,
    "chat": bool,
    "max_new_tokens": int,
    "temperature": _NUMBER,
    "top_k": int,
    "top_p": _NUMBER,
    "seed": int,
    "n": int,
    "stop": _TEXTS,
}
_NAMES = {str: "a text", bool: "true or false", int: "an integer", _NUMBER: "a number", _TEXTS: _TEXTS}


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was given.

    Attributes:
        text: the prompt.
        where: how an error names it.
        settings: what it asks for itself, by the flags' names.
    """

    text: str
    where: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def request(self, defaults: Mapping[str, Any], tokenizer: Tokenizer) -> Request:
        """Return what the engine is asked.

        Args:
            defaults: the command's flags.
            tokenizer: the model's.

        Raises:
            ValueError: a setting is out of range, or the prompt has no tokens; the message says which prompt it is.
        """
        settings = {name: self.settings.get(name, defaults[name]) for name in _KEYS if name != "prompt"}
        stop = settings["stop"]
        try:
            return Request(
                self._encode(settings["system"], settings["chat"], tokenizer),
                settings["max_new_tokens"],
                Sampling(*(settings[name] for name in ("temperature", "top_k", "top_p", "seed"))),
                tokenizer.stop_ids,
                [stop] if isinstance(stop, str) else stop,
                settings["n"],
            )
        except (TypeError, ValueError) as error:  # a text with half a surrogate pair is a TypeError of the tokenizer's
            raise ValueError(f"{self.where}: {error}") from error

    def _encode(self, system: str | None, chat: bool | None, tokenizer: Tokenizer) -> list[int]:
        if not (tokenizer.has_chat_template if chat is None else chat):
            return tokenizer.encode((system or "") + self.text)
        first = [] if system is None else [{"role": "system", "content": system}]
        return tokenizer.encode_chat([*first, {"role": "user", "content": self.text}])


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file: JSONL where its name says so, else a prompt per line. Blank lines are skipped.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no prompt, or a line is not what it should be; the message names the line.
    """
    try:
        # Other separators that str.splitlines knows may stand inside a prompt.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected a text file in UTF-8: {error}") from error
    parse = _parse if path.suffix.lower() in JSONL_SUFFIXES else Prompt
    prompts = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: no prompt in it; expected one per line")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object, got {line.strip()[:60]!r}: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where}: expected a JSON object with a text "prompt", got {line.strip()[:60]!r}')
    for name, value in row.items():
        if name not in _KEYS:
            raise ValueError(f"{where}: unknown key {name!r}; known are {', '.join(_KEYS)}")
        if value is not None and not _has_type(value, _KEYS[name]):
            raise ValueError(f"{where}: {name}: expected {_NAMES[_KEYS[name]]}, got {value!r}")
    text = row.pop("prompt")
    return Prompt(text, where, {name: value for name, value in row.items() if value is not None})


def _has_type(value: Any, expected: Any) -> bool:
    if expected is _TEXTS:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
    # A bool is an int to Python, and to nobody else.
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
