"""The faces of a cache that an application controls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager


class CacheControl(ABC):
    """What every layout offers an application.

    A *step* is one forward. Verbs are refused inside one. Admission is by what physically fits: how long a context the
    model was trained for is the application's business.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that may be held."""

    @property
    @abstractmethod
    def max_step(self) -> int | None:
        """The most tokens of one sequence in one step, or None where only the capacity bounds it."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the device failed while it computed the cache's bytes, so that only ``clear()`` helps."""

    @abstractmethod
    def clear(self) -> None:
        """End all sequences; makes a cache that has lost its bytes usable again.

        Raises:
            StepError: inside a step.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError naming the invariant that does not hold, if one does not."""

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """Bracket one forward: commits on leaving, aborts on an exception.

        After an abort every sequence is at the position it had, and the same step may be run again.

        Raises:
            StepError: a step is open already.
            CacheLostError: bytes were lost in an earlier step; ``clear()`` first.
        """


class SequenceControl(CacheControl):
    """Control of a cache that holds one sequence."""

    @property
    @abstractmethod
    def position(self) -> int:
        """The position that the next token takes; the sequence's length."""

    @abstractmethod
    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit."""

    @abstractmethod
    def rewind(self, position: int) -> bool:
        """Forget the positions from ``position`` on.

        Returns:
            False, with nothing changed, where the sequence is shorter, or where a window's keys that a query at
            ``position`` needs have been overwritten.

        Raises:
            ValueError: a negative position.
            StepError: inside a step.
        """


class BatchControl(CacheControl):
    """Control of a cache that holds many sequences, several of which may take part in one flat step.

    A verb given an id that does not live answers False or None. A successful verb that changes something cancels a
    pending declaration; a refused one, one that changes nothing and ``seq_new`` do not. Inside a step every verb raises
    StepError; a negative position is a ValueError.
    """

    @property
    @abstractmethod
    def max_seqs(self) -> int:
        """The most sequences that live at once."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Tokens that still fit, all sequences together."""

    @abstractmethod
    def seq_new(self) -> int | None:
        """Return the id of a new, empty sequence; None where ``max_seqs`` live. Ids are recycled and may be 0."""

    @abstractmethod
    def seq_clone(self, src: int, upto: int | None = None) -> int | None:
        """Return the id of an independent copy of ``src``'s positions below ``upto`` (None: all of them).

        Returns:
            None, with nothing changed, where ``upto`` is past the end, keys it needs are gone, or there is no room.

        Raises:
            CacheLostError: the bytes to copy were lost in an earlier step.
        """

    @abstractmethod
    def seq_rm(self, seq_id: int) -> bool:
        """End a sequence and free what it alone holds."""

    @abstractmethod
    def rewind(self, seq_id: int, position: int) -> bool:
        """Forget a sequence's positions from ``position`` on; as ``SequenceControl.rewind``."""

    @abstractmethod
    def pos(self, seq_id: int) -> int | None:
        """Return the position that the sequence's next token takes."""

    @abstractmethod
    def can_step(self, seq_ids: Sequence[int]) -> bool:
        """Whether a step with one token per entry, in token order, would be accepted. ValueError for none."""

    @abstractmethod
    def declare_step(self, seq_ids: Sequence[int]) -> bool:
        """Announce whose tokens the next step carries; False, with nothing changed, where ``can_step`` is.

        An accepted declaration replaces the one before and authorises one step, whether that succeeds or not.
        """
