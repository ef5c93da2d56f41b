"""Which layouts are known, and which cache is the active one."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executorch_mlx.extension.llm.cache import (
    CacheConfig,
    CacheSession,
    LayerConfig,
    active_cache,
    build,
    op,  # noqa: F401  registers the eager builders
    register_builder,
    registry,
)

CONFIG = CacheConfig(capacity=8, layers=[LayerConfig(n_kv_heads=1, head_dim=4)], kv_dtype="float32")
PATIENCE_S = 20  # how long a test waits for a thread that should be done at once


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a new thread; return its result or raise what it raised."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results[0]


# -- registry --------------------------------------------------------------


@pytest.mark.parametrize(("backend", "kind"), [("eager", "no-such-kind"), ("NoSuchBackend", "sequence")])
def test_build_with_an_unknown_pair_raises_naming_known_ones(backend: str, kind: str) -> None:
    with pytest.raises(LookupError, match=rf"'{kind}'.*'{backend}'.*known: .*'sequence' on 'eager'"):
        build(backend, kind, CONFIG)


@pytest.mark.usefixtures("_own_registry")
def test_register_builder_with_a_new_pair_makes_it_buildable() -> None:
    built = []
    register_builder("ThirdParty", "paged", lambda config: built.append(config) or "a cache")
    assert build("ThirdParty", "paged", CONFIG) == "a cache"
    assert built == [CONFIG]


@pytest.mark.usefixtures("_own_registry")
def test_register_builder_with_a_taken_pair_raises_and_keeps_the_first() -> None:
    register_builder("ThirdParty", "paged", lambda config: "first")
    with pytest.raises(ValueError, match=r"'paged' on 'ThirdParty'"):
        register_builder("ThirdParty", "paged", lambda config: "second")
    assert build("ThirdParty", "paged", CONFIG) == "first"


@pytest.mark.usefixtures("_own_registry")
def test_register_builder_with_the_same_builder_again_is_accepted() -> None:
    register_builder("ThirdParty", "paged", len)
    register_builder("ThirdParty", "paged", len)


@pytest.mark.usefixtures("_own_registry")
def test_build_when_the_builder_raises_passes_it_on() -> None:
    def refuse(config: CacheConfig) -> Any:
        raise NotImplementedError("not on this device")

    register_builder("ThirdParty", "paged", refuse)
    with pytest.raises(NotImplementedError, match="not on this device"):
        build("ThirdParty", "paged", CONFIG)


@pytest.mark.usefixtures("_own_registry")
def test_build_while_another_thread_imports_the_builders_module_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The importing thread holds the module's import lock and registers; ``build`` waits for that import."""
    importing, building = threading.Event(), threading.Event()

    class Entry:
        name = "ThirdParty"

        def load(self) -> None:
            building.set()
            importlib.import_module("third_party_cache_builders")

    (tmp_path / "third_party_cache_builders.py").write_text(
        "import builtins\n"
        "importing, building, patience_s = builtins.third_party_events\n"
        "importing.set()\n"
        "building.wait(patience_s)\n"
        "from executorch_mlx.extension.llm.cache import register_builder\n"
        "register_builder('ThirdParty', 'paged', lambda config: 'a cache')\n"
    )
    monkeypatch.setattr("builtins.third_party_events", (importing, building, PATIENCE_S), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry()])
    # A lock of its own: if this test fails, the others can still go on.
    monkeypatch.setattr(registry, "_lock", threading.RLock())

    built: list[Any] = []
    importer = threading.Thread(target=lambda: importlib.import_module("third_party_cache_builders"), daemon=True)
    builder = threading.Thread(target=lambda: built.append(build("ThirdParty", "paged", CONFIG)), daemon=True)
    importer.start()
    assert importing.wait(PATIENCE_S)
    builder.start()
    builder.join(PATIENCE_S / 4)
    importer.join(PATIENCE_S / 4)
    sys.modules.pop("third_party_cache_builders", None)
    assert built == ["a cache"]


def test_build_in_many_threads_gives_each_its_own_cache() -> None:
    caches: list[Any] = []
    threads = [threading.Thread(target=lambda: caches.append(build("eager", "sequence", CONFIG))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len({id(cache) for cache in caches}) == 8


# -- session ---------------------------------------------------------------


def test_active_cache_outside_a_session_is_none() -> None:
    assert active_cache() is None


def test_session_when_entered_installs_its_cache_and_removes_it_on_exit() -> None:
    cache = build("eager", "sequence", CONFIG)
    with CacheSession(cache) as session:
        assert active_cache() is cache
        assert session.control is cache
        assert isinstance(session.key, str)
    assert active_cache() is None
    assert session.control is cache


def test_session_when_the_block_raises_removes_its_cache() -> None:
    session = CacheSession("a cache")
    with pytest.raises(ZeroDivisionError, match="lost"), session:
        raise ZeroDivisionError("lost")
    assert active_cache() is None
    with pytest.raises(RuntimeError, match="not open"):
        _ = session.key


def test_session_before_it_is_entered_has_no_key() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        _ = CacheSession("a cache").key


def test_session_before_it_is_entered_cannot_be_activated() -> None:
    with pytest.raises(RuntimeError, match="not open"), CacheSession("a cache").activate():
        pass
    assert active_cache() is None


def test_session_entered_twice_at_once_raises_and_stays_open() -> None:
    with CacheSession("a cache") as session:
        with pytest.raises(RuntimeError, match="open already"):
            session.__enter__()
        assert active_cache() == "a cache"
    assert active_cache() is None


def test_session_entered_again_after_exit_has_a_new_key() -> None:
    session = CacheSession("a cache")
    with session:
        first = session.key
    with session:
        assert session.key != first
        assert active_cache() == "a cache"


def test_sessions_when_nested_answer_with_the_innermost() -> None:
    with CacheSession("outer"):
        with CacheSession("inner"):
            assert active_cache() == "inner"
        assert active_cache() == "outer"
        with pytest.raises(ZeroDivisionError, match="in failing"), CacheSession("failing"):
            raise ZeroDivisionError(f"in {active_cache()}")
        assert active_cache() == "outer"
    assert active_cache() is None


def test_sessions_left_in_the_order_of_entry_keep_the_later_active() -> None:
    first, second = CacheSession("first"), CacheSession("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert active_cache() == "second"
    second.__exit__(None, None, None)
    assert active_cache() is None


def test_session_keys_over_threads_and_sessions_are_unique() -> None:
    keys: list[str] = []

    def collect() -> None:
        for _ in range(50):
            with CacheSession("a cache") as outer, CacheSession("a cache") as inner:
                keys.extend((outer.key, inner.key))

    threads = [threading.Thread(target=collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(keys) == len(set(keys)) == 400


def test_active_cache_in_a_new_thread_is_none() -> None:
    with CacheSession("a cache"):
        assert in_thread(active_cache) is None


def test_activate_in_another_thread_makes_the_session_active_there_only() -> None:
    def work() -> tuple[Any, Any, Any]:
        before = active_cache()
        with session.activate() as same:
            assert same is session
            inside = active_cache()
        return before, inside, active_cache()

    with CacheSession("ours") as session, CacheSession("another"):
        assert in_thread(work) == (None, "ours", None)
        assert active_cache() == "another"


def test_activate_when_its_block_raises_restores_what_was_active() -> None:
    with CacheSession("ours") as ours, CacheSession("another"):
        with pytest.raises(ZeroDivisionError, match="in ours"), ours.activate():
            raise ZeroDivisionError(f"in {active_cache()}")
        assert active_cache() == "another"


def test_activate_in_two_asyncio_tasks_keeps_them_apart() -> None:
    async def forward(session: CacheSession, turns: int) -> set[Any]:
        seen = set()
        with session.activate():
            for _ in range(turns):
                seen.add(active_cache())
                await asyncio.sleep(0)
        seen.add(active_cache())
        return seen

    async def main(first: CacheSession, second: CacheSession) -> list[set[Any]]:
        return await asyncio.gather(forward(first, 5), forward(second, 7))

    # An empty context: asyncio tasks start with a copy of their creator's.
    with CacheSession("first") as first, CacheSession("second") as second:
        seen = contextvars.Context().run(asyncio.run, main(first, second))
    assert seen == [{"first", None}, {"second", None}]


def test_session_entered_in_an_asyncio_task_stays_in_it() -> None:
    async def forward(name: str) -> set[Any]:
        seen = set()
        with CacheSession(name):
            for _ in range(3):
                seen.add(active_cache())
                await asyncio.sleep(0)
        return seen

    async def main() -> tuple[list[set[Any]], Any]:
        return await asyncio.gather(forward("first"), forward("second")), active_cache()

    assert asyncio.run(main()) == ([{"first"}, {"second"}], None)


def test_session_removed_while_another_thread_has_it_active_leaves_that_thread_without_one() -> None:
    entered, left = threading.Event(), threading.Event()
    session = CacheSession("a cache")

    def work() -> tuple[Any, Any]:
        with session.activate():
            before = active_cache()
            entered.set()
            assert left.wait(PATIENCE_S)
            return before, active_cache()

    def leave() -> None:
        assert entered.wait(PATIENCE_S)
        session.__exit__(None, None, None)
        left.set()

    session.__enter__()
    leaver = threading.Thread(target=leave)
    leaver.start()
    assert in_thread(work) == ("a cache", None)
    leaver.join(PATIENCE_S)
    # The key was removed by a thread whose context never had it: here it is active, but of nothing.
    assert active_cache() is None


def test_session_removed_while_a_copied_context_has_it_active_leaves_that_context_without_one() -> None:
    with CacheSession("a cache"):
        context = contextvars.copy_context()
        assert context.run(active_cache) == "a cache"
    assert context.run(active_cache) is None


def test_session_removed_during_a_forward_does_not_disturb_it() -> None:
    cache = build("eager", "sequence", CONFIG)
    with CacheSession(cache):
        held = active_cache()
    q = torch.zeros(1, 1, 1, 4)
    with held.step():
        held.attend(0, [0], q, q, torch.ones(1, 1, 1, 4), 1.0)
    assert held.position == 1


def test_session_exit_keeps_what_the_cache_holds() -> None:
    cache = build("eager", "sequence", CONFIG)
    q = torch.zeros(1, 1, 2, 4)
    with CacheSession(cache), cache.step():
        cache.attend(0, [0, 1], q, q, q, 1.0)
    with CacheSession(cache) as session:
        assert session.control.position == 2
