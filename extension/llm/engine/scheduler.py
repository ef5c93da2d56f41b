"""Whose tokens the next step carries: admission, shared beginnings, preemption.

::

    waiting   [F G H]           oldest first; preempted jobs among them, in their old places
    running   [A B C D E]       oldest first; each holds a sequence of the cache
    a step    A B C | D D D E   one token of each, then the rest of prompts, oldest first
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from executorch_mlx.extension.llm.cache import BatchControl, CacheFullError

HEADROOM = 16
"""Tokens that each running sequence is expected to grow by: admission leaves so much room."""

LEAST_SHARED = 16
"""Tokens of a common beginning that are worth a clone; a whole prompt and a kept prefix always are."""


@dataclass(eq=False)
class Job:
    """Tokens to compute in the cache, and then one more after each step.

    Attributes:
        order: jobs with lower ones are older: admitted first, preempted last.
        prompt: the tokens that it begins with.
        limit: the most tokens that its sequence will ever hold.
        new: the tokens after them; whoever chooses the next one appends it.
        is_prefix: whether it is kept once it is computed, for others to share, and needs no next token.
        seq_id: its sequence in the cache; None while it waits.
        position: tokens that the sequence holds.
    """

    order: tuple[int, int]
    prompt: Sequence[int]
    limit: int
    new: list[int] = field(default_factory=list)
    is_prefix: bool = False
    seq_id: int | None = None
    position: int = 0

    @property
    def tokens(self) -> list[int]:
        """What its sequence is to hold."""
        return [*self.prompt, *self.new]

    @property
    def length(self) -> int:
        """How many tokens these are."""
        return len(self.prompt) + len(self.new)

    @property
    def pending(self) -> int:
        """Tokens that have not been computed."""
        return self.length - self.position

    @property
    def is_full(self) -> bool:
        """Whether its sequence has no room for its last token, which therefore is the last one."""
        return self.length > self.limit

    @property
    def wants(self) -> int:
        """Tokens that its sequence will soon take."""
        return min(self.limit, self.length + HEADROOM) - self.position


@dataclass(frozen=True)
class Chunk:
    """A job's share of a step: its next ``size`` pending tokens."""

    job: Job
    size: int

    @property
    def tokens(self) -> list[int]:
        """What is fed."""
        return self.job.tokens[self.job.position : self.job.position + self.size]

    @property
    def positions(self) -> range:
        """Where."""
        return range(self.job.position, self.job.position + self.size)

    @property
    def seq_ids(self) -> list[int]:
        """Whose they are, an id per token."""
        return [_id(self.job)] * self.size

    @property
    def is_last(self) -> bool:
        """Whether nothing of the job is pending after it, so that its next token can be chosen."""
        return self.size == self.job.pending


@dataclass(frozen=True)
class StepPlan:
    """What a step carries.

    Attributes:
        chunks: at most one per running job; those of one token first, so that single rows lie side by side.
        begun: jobs that have got a sequence for this step.
        preempted: jobs that have lost theirs; they wait again.
    """

    chunks: list[Chunk]
    begun: list[Job]
    preempted: list[Job]


class Scheduler:
    """Plans steps over a cache of which it is the only user.

    The oldest running job always advances, and every running one does in each step, by a token at least. A job is
    admitted when all its tokens fit besides what the running ones will soon take. Where they outgrow the cache
    nevertheless, the newest gives its room back and is computed anew later.

    Attributes:
        waiting: jobs without a sequence, oldest first.
        running: jobs with one, oldest first.
        kept: prefixes that are computed.
    """

    def __init__(self, cache: BatchControl, step_tokens: int, max_running: int) -> None:
        """Begin with no jobs.

        Args:
            cache: an empty cache.
            step_tokens: the most tokens of a step.
            max_running: the most jobs that run at once; no more than a step's tokens.
        """
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.kept: list[Job] = []
        self._cache = cache
        self._step_tokens = step_tokens
        self._max_running = max_running
        # The job that last lacked room, what it could have shared, and how much there was: it is not tried again until
        # there is more of either.
        self._unfit: tuple[Job | None, int, int] = (None, 0, 0)

    def add(self, job: Job) -> None:
        """Let a job wait for its turn."""
        insort(self.waiting, job, key=_order)

    def remove(self, job: Job) -> None:
        """End a job, wherever it is; nothing happens if it has ended."""
        for jobs in (self.waiting, self.running, self.kept):
            if job in jobs:
                jobs.remove(job)
        self._free(job)

    def clear(self) -> None:
        """End all jobs."""
        for job in [*self.waiting, *self.running, *self.kept]:
            self.remove(job)

    def plan(self) -> StepPlan:
        """Return what the next step carries; nothing where nothing is left to do.

        Raises:
            CacheFullError: something else takes the cache's room, so that not even the oldest job can advance.
        """
        if self._cache.is_lost:
            self._restart()
        for job in list(self.running):
            self._settle(job)
        begun = self._admit()
        if self.waiting and not self.running:
            self._give_up_kept()
            begun = self._admit()
            if not self.running:
                raise self._full(self.waiting[0])
        preempted = self._make_room()
        return StepPlan(self._chunks(), begun, preempted)

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Record that a step has been computed."""
        for chunk in chunks:
            chunk.job.position += chunk.size

    # -- admission ---------------------------------------------------------

    def _admit(self) -> list[Job]:
        """Let waiting jobs begin, oldest first, until one does not fit."""
        begun = []
        for job in list(self.waiting):
            num_live = len(self.running) + len(self.kept)
            if len(self.running) >= self._max_running or num_live >= self._cache.max_seqs:
                break
            source, computed, coming = self._shared(job)
            gain = coming - computed
            # What another job is about to compute is worth waiting for; those behind this one need not wait.
            if gain >= LEAST_SHARED or (gain > 0 and (not computed or coming == job.length - 1)):
                continue
            if not self._begin(job, source, computed):
                break
            self.waiting.remove(job)
            insort(self.running, job, key=_order)
            begun.append(job)
        return begun

    def _shared(self, job: Job) -> tuple[Job | None, int, int]:
        """Return who has computed most of a job's beginning, how much that is, and the most that anyone will have.

        Beginnings that are not worth a clone are left out. A job's last token is always left to itself: the next one is
        chosen after it.
        """
        source, computed, coming = None, 0, 0
        most, tokens = job.length - 1, job.tokens
        for other in (*self.kept, *self.running):
            common = _common(tokens, other.tokens, most)
            least = min(LEAST_SHARED, most, other.length if other.is_prefix else most)
            if common >= least:
                coming = max(coming, common)
            has = min(common, other.position)
            # Of equals the shorter one: what its rings have overwritten is the least.
            if has >= max(least, computed + 1) or (source and has == computed and other.position < source.position):
                source, computed = other, has
        return source, computed, coming

    def _begin(self, job: Job, source: Job | None, common: int) -> bool:
        """Give a job a sequence, cloned where that is worth while; False where it does not fit."""
        room = self._cache.free - sum(other.wants for other in self.running)
        unfit, shared_then, room_then = self._unfit
        if job is unfit and common <= shared_then and room <= room_then:
            return False
        if source is not None and job.wants - common <= room:
            job.seq_id = self._cache.seq_clone(_id(source), common)
            if job.seq_id is not None:
                job.position = common
                # Only now is it known what the copy has taken: all of its tokens, or none.
                if job.wants <= self._cache.free - sum(other.wants for other in self.running):
                    return True
                self._free(job)
        if job.wants > room:
            self._unfit = (job, common, room)
            return False
        job.seq_id = self._cache.seq_new()
        return job.seq_id is not None

    # -- room --------------------------------------------------------------

    def _make_room(self) -> list[Job]:
        """Take sequences from the newest jobs until each that is left can advance by a token; return those jobs."""
        preempted: list[Job] = []
        while self.running and not self._cache.can_step([_id(job) for job in self.running]):
            if len(self.running) > 1:
                preempted.append(self.running[-1])
                self._preempt(self.running[-1])
            elif self.kept:
                self._give_up_kept()
            else:
                raise self._full(self.running[0])
        return preempted

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self._free(job)
        self.add(job)

    def _give_up_kept(self) -> None:
        """Free the prefixes that are kept: a job that runs alone needs their room."""
        for job in list(self.kept):
            self.remove(job)

    def _settle(self, job: Job) -> None:
        """Make a running job one that has tokens pending, or a kept prefix."""
        assert job.seq_id is not None
        # The cache knows better after a step whose end was interrupted.
        job.position = self._cache.pos(job.seq_id) or 0
        if job.pending > 0:
            return
        if job.is_prefix:
            self.running.remove(job)
            self.kept.append(job)
        elif self._cache.rewind(job.seq_id, job.length - 1):
            job.position = job.length - 1
        else:
            self._preempt(job)

    def _restart(self) -> None:
        """Begin anew with a cache that has lost its bytes."""
        jobs = [*self.running, *self.kept]
        self.running, self.kept = [], []
        self._cache.clear()
        for job in jobs:
            job.seq_id, job.position = None, 0
            self.add(job)

    def _free(self, job: Job) -> None:
        if job.seq_id is not None:
            self._cache.seq_rm(job.seq_id)
        job.seq_id, job.position = None, 0

    def _full(self, job: Job) -> CacheFullError:
        return CacheFullError(
            f"the cache has room for {self._cache.free} of {self._cache.capacity} tokens while nothing but a sequence"
            f" of {job.length} runs: something else uses the cache; give the engine a cache of its own"
        )

    # -- the step ----------------------------------------------------------

    def _chunks(self) -> list[Chunk]:
        """Deal the step's tokens out: one to each running job, the rest to the oldest that have more pending."""
        most = self._cache.max_step or self._step_tokens
        spare = min(self._step_tokens, self._cache.free) - len(self.running)
        chunks = []
        for job in self.running:
            size = min(job.pending, 1 + spare, most)
            spare -= size - 1
            chunks.append(Chunk(job, size))
        return sorted(chunks, key=lambda chunk: chunk.size > 1)


def _order(job: Job) -> tuple[int, int]:
    return job.order


def _id(job: Job) -> int:
    assert job.seq_id is not None, "a running job has a sequence"
    return job.seq_id


def _common(tokens: Sequence[int], others: Sequence[int], most: int) -> int:
    """Return how many first tokens are equal, at most ``most``."""
    most = max(min(most, len(others)), 0)
    if tokens[:most] == others[:most]:
        return most
    return next((index for index in range(most) if tokens[index] != others[index]), most)
