"""A conversation over one cache against fresh runs of the same conversation, and against Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from executorch_mlx.examples.llm.conversation import Conversation
from executorch_mlx.examples.llm.folder import MODEL_FILE
from executorch_mlx.examples.llm.generation import LanguageModel
from executorch_mlx.examples.llm.tokenizer import Message, Tokenizer
from executorch_mlx.extension.llm.cache import CacheLostError, CacheSession
from executorch_mlx.extension.llm.engine import Sampling

CAPACITY = 96
ANSWER = 5


@contextmanager
def conversation(exported: Any, tokenizer: Tokenizer, *, chat: bool = True, rings: bool = True) -> Iterator[Any]:
    model = LanguageModel(exported.folder / MODEL_FILE)
    with CacheSession(model.new_cache(CAPACITY, rings=rings)) as session:
        yield Conversation(model, tokenizer, session, chat=chat)


@pytest.fixture
def tokenizer(tiny: Any) -> Tokenizer:
    return Tokenizer(tiny.folder)


def encoded(tokenizer: Tokenizer, messages: list[Message], *, chat: bool) -> list[int]:
    return tokenizer.encode_chat(messages) if chat else tokenizer.encode("".join(m["content"] for m in messages))


def eager_answer(model: Any, tokenizer: Tokenizer, messages: list[Message], *, chat: bool) -> str:
    tokens = torch.tensor([encoded(tokenizer, messages, chat=chat)])
    budget = min(ANSWER, CAPACITY - tokens.shape[1] + 1)
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=budget, do_sample=False)
    return tokenizer.decode(out[0, tokens.shape[1] :].tolist())


def talk(talked: Conversation, draw: random.Random, turns: int) -> None:
    """Ask, undo and reset at random; what does not fit changes nothing."""
    for _ in range(turns):
        if talked.num_turns and draw.random() < 0.25:
            talked.undo(draw.randint(1, talked.num_turns))
        if draw.random() < 0.02:
            talked.reset()
        text = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 6)))
        before = list(talked.messages)
        try:
            talked.ask(text, max_new_tokens=ANSWER)
        except ValueError as error:
            assert "there is room for 96: /undo or /reset" in str(error)  # noqa: PT017
            assert talked.messages == before
            talked.undo(talked.num_turns)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
@pytest.mark.parametrize(("kind", "rings"), [("tiny", True), ("windowed", True), ("windowed", False)])
def test_five_hundred_turns_with_undo_and_reset_end_as_a_fresh_run_does(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, kind: str, chat: bool, rings: bool
) -> None:
    exported = request.getfixturevalue(kind)
    with conversation(exported, tokenizer, chat=chat, rings=rings) as talked:
        talk(talked, random.Random(f"{kind}{chat}{rings}"), 500 if kind == "tiny" and chat else 60)
        while talked.num_turns < 2:
            talked.ask("ab", max_new_tokens=ANSWER)
        for answer in range(1, len(talked.messages), 2):
            expected = eager_answer(exported.model, tokenizer, talked.messages[:answer], chat=chat)
            assert talked.messages[answer]["content"] == expected
        # The cache itself, not only what was once said.
        asked = talked.messages[-2]["content"]
        talked.undo()
        again = talked.ask(asked, max_new_tokens=ANSWER)
        history = talked.messages[:-1]
    assert tokenizer.decode(again.tokens) == eager_answer(exported.model, tokenizer, history, chat=chat)


def test_turn_computes_only_what_the_cache_does_not_hold(tiny: Any, tokenizer: Tokenizer) -> None:
    with conversation(tiny, tokenizer) as talked:
        first = talked.ask("abc", max_new_tokens=ANSWER)
        held = talked.num_tokens
        assert held == first.prompt_tokens + len(first.tokens) - 1
        second = talked.ask("de", max_new_tokens=1)
        whole = encoded(tokenizer, talked.messages[:-1], chat=True)
    assert second.prompt_tokens <= len(whole) - held + len("abc")


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5)], ids=["greedy", "sampled"])
def test_interrupted_answer_is_kept_as_far_as_it_came(
    tiny: Any, tokenizer: Tokenizer, after: int, sampling: Sampling
) -> None:
    with conversation(tiny, tokenizer) as talked:
        talked.ask("abc", max_new_tokens=3)
        seen: list[int] = []

        def interrupt(token: int) -> None:
            seen.append(token)
            if len(seen) > after:
                raise KeyboardInterrupt

        result = talked.ask("de", max_new_tokens=9, sampling=sampling, on_token=interrupt)
        assert result.finish_reason == "interrupted"
        assert talked.messages[-1]["content"] == tokenizer.decode(seen)
        assert talked.num_turns == 2
        next_one = talked.ask("fg", max_new_tokens=ANSWER)
        expected = eager_answer(tiny.model, tokenizer, talked.messages[:-1], chat=True)
    assert tokenizer.decode(next_one.tokens) == expected


def test_interrupt_before_the_first_token_leaves_the_conversation_as_it_was(
    tiny: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with conversation(tiny, tokenizer) as talked:
        talked.ask("abc", max_new_tokens=3)
        before = list(talked.messages)

        def interrupted(*_: Any) -> list[int]:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(LanguageModel, "step_greedy", interrupted)
            assert talked.ask("de", max_new_tokens=9).tokens == []
        assert talked.messages == before
        talked.ask("de", max_new_tokens=ANSWER)
        expected = eager_answer(tiny.model, tokenizer, talked.messages[:-1], chat=True)
        assert talked.messages[-1]["content"] == expected


def test_conversation_goes_on_after_the_cache_was_lost(tiny: Any, tokenizer: Tokenizer) -> None:
    with conversation(tiny, tokenizer) as talked:
        talked.ask("abc", max_new_tokens=3)
        before = list(talked.messages)
        talked._session.control.mark_lost("the device failed")
        with pytest.raises(CacheLostError, match="the device failed"):
            talked.ask("de", max_new_tokens=3)
        assert talked.messages == before
        talked.ask("de", max_new_tokens=ANSWER)
        expected = eager_answer(tiny.model, tokenizer, talked.messages[:-1], chat=True)
    assert talked.messages[-1]["content"] == expected


@pytest.mark.parametrize("turns", [0, 2, -1])
def test_undo_of_turns_that_are_not_there_is_an_error(tiny: Any, tokenizer: Tokenizer, turns: int) -> None:
    with conversation(tiny, tokenizer) as talked:
        talked.ask("abc", max_new_tokens=2)
        before = list(talked.messages)
        with pytest.raises(ValueError, match=f"expected 1 to 1 turns, got {turns}"):
            talked.undo(turns)
        assert talked.messages == before
