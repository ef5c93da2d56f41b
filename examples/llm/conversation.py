"""A conversation of many turns over one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from executorch_mlx.extension.llm.cache import CacheLostError, CacheSession
from executorch_mlx.extension.llm.engine import GREEDY, Sampling

from .generation import Generation, LanguageModel
from .tokenizer import Message, Tokenizer


class Conversation:
    """Messages, and a cache that holds as much of their tokens as has been computed.

    The messages are the truth. Each turn writes them out anew, as the model's chat template does (or one after the
    other, without one), rewinds the cache to where these tokens differ from what it holds, and computes the rest. So
    an answer is the same as that of a fresh run of the same conversation, whatever was undone before.

    Attributes:
        messages: each with "role" and "content"; user and assistant take turns.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, session: CacheSession, *, chat: bool) -> None:
        """Begin an empty conversation.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            session: a session whose cache is empty; nothing else may use it.
            chat: use the model's chat template.
        """
        self.messages: list[Message] = []
        self._model = model
        self._tokenizer = tokenizer
        self._session = session
        self._chat = chat
        self._held: list[int] = []

    @property
    def num_turns(self) -> int:
        """Questions that have been answered."""
        return len(self.messages) // 2

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        position: int = self._session.control.position
        return position

    def ask(
        self,
        text: str,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        on_token: Callable[[int], None] = lambda token: None,
    ) -> Generation:
        """Answer a message; an interrupted answer is kept as far as it came, unless nothing came.

        Raises:
            ValueError: the conversation with this message does not fit; it is as it was.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        tokens = self._encode(asked)
        room = min(self._session.control.capacity, self._model.max_context)
        if len(tokens) > room:
            raise ValueError(
                f"the conversation would have {len(tokens)} tokens and there is room for {room}: /undo or /reset"
            )
        fed = list(tokens)

        def note(token: int) -> None:
            fed.append(token)
            on_token(token)

        try:
            result = self._model.generate(
                tokens[self._rewind(tokens) :],
                max_new_tokens=max_new_tokens,
                stop_ids=self._tokenizer.stop_ids,
                sampling=sampling,
                on_token=note,
                session=self._session,
            )
        except CacheLostError:
            self._session.control.clear()
            raise
        finally:
            # The last token of an answer is not fed, and a step that failed or was interrupted has fed none of its own.
            self._held = fed[: self.num_tokens]
        if result.tokens or result.finish_reason != "interrupted":
            self.messages = [*asked, {"role": "assistant", "content": self._tokenizer.decode(result.tokens)}]
        return result

    def undo(self, turns: int = 1) -> None:
        """Forget the last questions and their answers.

        Raises:
            ValueError: there are not so many.
        """
        if not self.messages:
            raise ValueError("undo: there is nothing to undo")
        if not 1 <= turns <= self.num_turns:
            raise ValueError(f"undo: expected 1 to {self.num_turns} turns, got {turns}")
        self.messages = self.messages[: -2 * turns]
        if self.messages:
            self._rewind(self._encode(self.messages))
        else:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.messages = []
        self._held = []
        self._session.control.clear()

    def _encode(self, messages: list[Message]) -> list[int]:
        if self._chat:
            return self._tokenizer.encode_chat(messages)
        return self._tokenizer.encode("".join(message["content"] for message in messages))

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Keep of the cache what begins these tokens, all but the last at most; return how many that are."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._held, tokens[:-1], strict=False)))
        # A ring may have overwritten what it would have to go back to.
        if not self._session.control.rewind(common):
            self._session.control.clear()
            common = 0
        self._held = self._held[:common]
        return common
