"""Scheduling alone, over cache cores that hold no bytes: who runs, who waits, who gives way."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from executorch_mlx.extension.llm.cache import (
    BatchCellCache,
    BatchSequenceCache,
    CacheConfig,
    CacheFullError,
    LayerConfig,
    SequenceCache,
)
from executorch_mlx.extension.llm.engine.scheduler import HEADROOM, LEAST_SHARED, Job, Scheduler, StepPlan


class Cells(BatchCellCache):
    def _attend(self, *_: Any) -> Any:
        return None


class Sequence(SequenceCache):
    def _attend(self, *_: Any) -> Any:
        return None


class Sequences(BatchSequenceCache[Sequence]):
    sequence_type = Sequence

    def _joined(self, parts: Any) -> Any:
        return parts


LAYOUTS = {"batched-cell": Cells, "batched-sequence": Sequences}


class InjectedError(Exception):
    """A step that fails."""


def cache_of(kind: str, capacity: int, max_seqs: int = 8, window: int | None = None) -> Any:
    return LAYOUTS[kind](
        CacheConfig(capacity, [LayerConfig(1, 1, window=window)], "float32", max_write=4, max_seqs=max_seqs)
    )


def compute(cache: Any, plan: StepPlan) -> None:
    """Run a step of a plan in the cache alone."""
    assert cache.declare_step([seq_id for chunk in plan.chunks for seq_id in [chunk.job.seq_id] * chunk.size])
    with cache.step():
        step = cache.plan(0, [position for chunk in plan.chunks for position in chunk.positions])
        with cache.writing(step):
            for part in getattr(step, "parts", ()):
                with part.cache.writing(part.plan):
                    pass


class Driver:
    """Does with a scheduler what an engine does, the next token being always the same."""

    def __init__(self, cache: Any, step_tokens: int) -> None:
        self.cache, self.scheduler = cache, Scheduler(cache, step_tokens, step_tokens)
        self.numbers = iter(range(10**6))
        self.done: list[Job] = []

    def add(self, tokens: list[int], new: int, *, is_prefix: bool = False) -> Job:
        room = self.cache.capacity
        limit = len(tokens) if is_prefix else min(len(tokens) + new - 1, room)
        job = Job((not is_prefix, next(self.numbers)), list(tokens), limit, is_prefix=is_prefix)
        self.scheduler.add(job)
        return job

    def step(self, *, fails_before: bool = False, fails_after: bool = False) -> StepPlan:
        plan = self.scheduler.plan()
        if not plan.chunks:
            return plan
        with suppress(InjectedError):
            if fails_before:
                raise InjectedError
            compute(self.cache, plan)
            if fails_after:
                raise InjectedError
            last = [chunk.job for chunk in plan.chunks if chunk.is_last and not chunk.job.is_prefix]
            self.scheduler.commit(plan.chunks)
            for job in last:
                job.new.append(99)
                if job.is_full:
                    self.scheduler.remove(job)
                    self.done.append(job)
        return plan

    def drain(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.waiting or self.scheduler.running:
            plans.append(self.step())
            assert len(plans) < 5000, "it does not come to an end"
        return plans


def sizes(plan: StepPlan, *jobs: Job) -> list[int]:
    by_job = {chunk.job: chunk.size for chunk in plan.chunks}
    return [by_job.get(job, 0) for job in jobs]


@pytest.fixture(params=LAYOUTS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_each_running_job_gets_a_token_and_the_oldest_prompt_the_rest(kind: str) -> None:
    driver = Driver(cache_of(kind, 200), 10)
    jobs = [driver.add([seed], 20) for seed in range(3)]
    driver.step()
    prompts = [driver.add([10 + seed] * 15, 5) for seed in range(2)]
    plan = driver.step()
    assert sizes(plan, *jobs, *prompts) == [1, 1, 1, 6, 1]
    assert [chunk.size for chunk in plan.chunks] == [1, 1, 1, 1, 6]
    assert sizes(driver.step(), *jobs, *prompts) == [1, 1, 1, 6, 1]
    assert sizes(driver.step(), *jobs, *prompts) == [1, 1, 1, 3, 4]


def test_a_sequence_gets_no_more_of_a_step_than_its_windows_take() -> None:
    driver = Driver(cache_of("batched-sequence", 200, window=6), 10)
    first, second = driver.add([1] * 20, 5), driver.add([2] * 20, 5)
    assert sizes(driver.step(), first, second) == [4, 4]


@pytest.mark.parametrize(("step_tokens", "max_seqs", "most"), [(3, 8, 3), (8, 3, 3), (8, 8, 5)])
def test_no_more_run_than_there_are_sequences_and_tokens_of_a_step(
    kind: str, step_tokens: int, max_seqs: int, most: int
) -> None:
    driver = Driver(cache_of(kind, 400, max_seqs), step_tokens)
    for seed in range(5):
        driver.add([seed], 4)
    assert len(driver.step().chunks) == most
    driver.drain()
    assert len(driver.done) == 5


def test_job_is_admitted_with_room_for_what_it_will_soon_take(kind: str) -> None:
    driver = Driver(cache_of(kind, 2 * (10 + HEADROOM)), 40)
    jobs = [driver.add([seed] * 10, 100) for seed in range(3)]
    assert driver.step().begun == jobs[:2]
    short = Driver(cache_of(kind, 2 * 12), 40)
    jobs = [short.add([seed] * 10, 3) for seed in range(3)]
    assert short.step().begun == jobs[:2], "a short answer needs less"


def test_job_that_did_not_fit_is_admitted_in_the_step_after_room_was_made(kind: str) -> None:
    driver = Driver(cache_of(kind, 40), 40)
    first, second = driver.add([1] * 30, 2), driver.add([2] * 30, 2)
    while first not in driver.done:
        assert second not in driver.step().begun
    assert driver.step().begun == [second]


def test_job_that_lacked_a_sequence_is_admitted_in_the_step_after_one_was_given_back(kind: str) -> None:
    driver = Driver(cache_of(kind, 200, max_seqs=3), 40)
    driver.add([9] * 5, 0, is_prefix=True)
    driver.drain()
    driver.add([1] * 20, 60)
    driver.step()
    # It shares its prompt: its end gives back no more room than the other one has meanwhile taken.
    ends, waits = driver.add([1] * 20, 6), driver.add([2] * 5, 3)
    while ends not in driver.done:
        assert waits not in driver.step().begun
    assert driver.step().begun == [waits]
    driver.drain()
    assert len(driver.scheduler.kept) == 1, "there was room for the prefix all along"


def test_job_behind_one_that_does_not_fit_waits(kind: str) -> None:
    driver = Driver(cache_of(kind, 60), 40)
    for seed, length in enumerate([30, 40, 1]):
        driver.add([seed] * length, 3)
    assert len(driver.step().begun) == 1


@pytest.mark.parametrize(("common", "shared"), [(LEAST_SHARED - 1, 0), (LEAST_SHARED, LEAST_SHARED), (30, 30)])
def test_beginning_of_a_job_is_shared_where_that_is_worth_a_clone(kind: str, common: int, shared: int) -> None:
    driver = Driver(cache_of(kind, 200), 64)
    driver.add([1] * common + [2] * 5, 5)
    driver.step()
    second = driver.add([1] * common + [3] * 5, 5)
    plan = driver.scheduler.plan()
    assert plan.begun == [second]
    assert second.position == shared


def test_last_token_is_never_shared(kind: str) -> None:
    driver = Driver(cache_of(kind, 200), 64)
    first, second = driver.add([1] * 20, 5), driver.add([1] * 20, 5)
    assert driver.step().begun == [first]
    plan = driver.scheduler.plan()
    assert (plan.begun, second.position) == ([second], 19)
    assert sizes(plan, second) == [1]


def test_job_that_waits_for_a_beginning_lets_others_by(kind: str) -> None:
    driver = Driver(cache_of(kind, 300), 8)
    first, same, other = driver.add([1] * 40, 5), driver.add([1] * 40, 5), driver.add([2] * 3, 5)
    assert driver.step().begun == [first, other]
    plans = driver.drain()
    assert [plan.begun for plan in plans if plan.begun] == [[same]]


class SchedulerMachine(RuleBasedStateMachine):
    """Any jobs, any failures: rules that hold of every plan."""

    kind: ClassVar[str]
    num_preempted: ClassVar[int] = 0

    @initialize(
        capacity=st.integers(20, 70),
        max_seqs=st.integers(1, 6),
        step_tokens=st.integers(1, 12),
        window=st.none() | st.just(5),
    )
    def build(self, capacity: int, max_seqs: int, step_tokens: int, window: int | None) -> None:
        self.cache = cache_of(self.kind, capacity, max_seqs, window)
        self.driver = Driver(self.cache, step_tokens)
        self.step_tokens = step_tokens
        self.most_running = min(step_tokens, max_seqs)
        self.jobs: list[Job] = []

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 9) | st.integers(10, 50),
        tail=st.lists(st.integers(3, 6), max_size=2),
        new=st.integers(1, 60),
        count=st.integers(1, 3),
        is_prefix=st.sampled_from([False, False, False, False, True]),
    )
    def add(self, stem: int, length: int, tail: list[int], new: int, count: int, is_prefix: bool) -> None:
        tokens = ([stem] * length + tail)[: self.cache.capacity]
        self.jobs += [self.driver.add(tokens, new, is_prefix=is_prefix) for _ in range(count)]

    @rule(count=st.integers(3, 6), length=st.integers(1, 5))
    def add_short_ones_that_grow(self, count: int, length: int) -> None:
        self.jobs += [self.driver.add([10 + index] * length, 30) for index in range(count)]

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 20))
    def remove(self, which: int) -> None:
        job = self.jobs.pop(which % len(self.jobs))
        self.driver.scheduler.remove(job)
        assert job.seq_id is None

    @rule(times=st.integers(1, 8), failure=st.sampled_from([{}, {}, {"fails_before": True}, {"fails_after": True}]))
    def step(self, times: int, failure: dict[str, bool]) -> None:
        for index in range(times):
            self.checked_step(**failure if index == times - 1 else {})

    @rule(really=st.sampled_from([False, False, True]))
    def lose(self, really: bool) -> None:
        if really:
            self.cache.mark_lost("test")

    def checked_step(self, **failure: bool) -> None:
        scheduler = self.driver.scheduler
        oldest = scheduler.running[0] if scheduler.running and not self.cache.is_lost else None
        was_running, was_kept = list(scheduler.running), set(scheduler.kept)
        plan = scheduler.plan()
        if not plan.preempted and was_kept <= set(scheduler.kept):
            # Planned again, as after a failure: the same.
            again = [(chunk.job, chunk.size) for chunk in scheduler.plan().chunks]
            assert again == [(chunk.job, chunk.size) for chunk in plan.chunks]
        running = scheduler.running
        assert [job.order for job in running] == sorted(job.order for job in running)
        assert [job.order for job in scheduler.waiting] == sorted(job.order for job in scheduler.waiting)
        assert len(running) <= self.most_running
        assert {chunk.job for chunk in plan.chunks} == set(running)
        assert len(plan.chunks) == len(running)
        assert all(1 <= chunk.size <= chunk.job.pending for chunk in plan.chunks)
        assert sum(chunk.size for chunk in plan.chunks) <= min(self.step_tokens, self.cache.free)
        type(self).num_preempted += len(plan.preempted)
        assert oldest not in plan.preempted
        assert all(job.order > other.order for job in plan.preempted for other in running)
        assert set(plan.preempted) <= {*was_running, *plan.begun, *plan.preempted}
        assert not set(plan.begun) & set(plan.preempted)
        if not plan.preempted and was_kept <= set(scheduler.kept):
            self.check_nobody_waits_needlessly()
        # All jobs are somewhere once; a prefix may have been given up.
        known = [*scheduler.waiting, *running, *scheduler.kept, *self.driver.done]
        assert len(set(known)) == len(known)
        assert all(job in known or job.is_prefix for job in self.jobs)
        self.driver.step(**failure)
        self.cache.check_integrity()

    def check_nobody_waits_needlessly(self) -> None:
        scheduler = self.driver.scheduler
        if not scheduler.waiting or len(scheduler.running) >= self.most_running:
            return
        job, others = scheduler.waiting[0], [*scheduler.running, *scheduler.kept]
        if any(job.tokens[0] == other.tokens[0] for other in others) or len(others) >= self.cache.max_seqs:
            return
        assert job.wants > self.cache.free - sum(other.wants for other in scheduler.running)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler, steps = self.driver.scheduler, 0
        while scheduler.waiting or scheduler.running:
            self.checked_step()
            steps += 1
            assert steps < 50_000, "it does not come to an end"
        assert all(job in self.driver.done or job.is_prefix for job in self.jobs)
        assert self.cache.capacity - self.cache.free <= sum(job.position for job in self.driver.scheduler.kept)
        self.driver.scheduler.clear()
        assert self.cache.free == self.cache.capacity


def test_any_jobs_advance_in_order_and_none_is_lost(kind: str) -> None:
    machine = type(f"Scheduler{kind}", (SchedulerMachine,), {"kind": kind})
    profile = settings()
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=max(profile.max_examples // 8, 1)))
    assert machine.num_preempted


def test_room_that_something_else_takes_is_an_error_and_changes_nothing_for_later(kind: str) -> None:
    cache = cache_of(kind, 30)
    other = Driver(cache, 30)
    held = other.add([5] * 20, 5)
    other.step()
    driver = Driver(cache, 8)
    job = driver.add([1] * 15, 5)
    for _ in range(2):
        with pytest.raises(CacheFullError, match="room for 10 of 30"):
            driver.step()
    other.scheduler.remove(held)
    driver.drain()
    assert driver.done == [job]
