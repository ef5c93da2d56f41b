"""An engine for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from .engine import Engine, Update
from .request import Completion, Request


class AsyncEngine:
    """Streams answers to any number of tasks of one event loop; steps run in a worker thread while there is work."""

    def __init__(self, engine: Engine) -> None:
        """Drive an engine, which nothing else may step.

        Args:
            engine: the engine.
        """
        self._engine = engine
        self._queues: dict[Completion, asyncio.Queue[Update | BaseException]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def stream(self, request: Request) -> AsyncGenerator[Update, None]:
        """Yield what comes for a request, of all its samples. Closing the generator early cancels them.

        Raises:
            ValueError: it can never be answered; see ``Engine.submit``.
            RuntimeError: the engine was closed.
            Exception: a step failed; all requests that are open are cancelled.
        """
        completions = self._engine.submit(request)
        queue: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        self._queues |= dict.fromkeys(completions, queue)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        open_ = len(completions)
        try:
            while open_:
                update = await queue.get()
                if isinstance(update, BaseException):
                    raise update
                open_ -= update.finish_reason is not None
                yield update
        finally:
            for completion in completions:
                completion.cancel()
                self._queues.pop(completion, None)

    async def _drive(self) -> None:
        """Step while there is work, until nobody waits and steps fail."""
        is_stuck = False
        try:
            while self._engine.has_work and not is_stuck:
                try:
                    updates = await asyncio.to_thread(self._engine.step)
                except Exception as error:
                    # The step after a failure frees what was cancelled.
                    is_stuck = not self._queues
                    self._fail(error)
                    continue
                for update in updates:
                    if update.completion in self._queues:
                        self._queues[update.completion].put_nowait(update)
        finally:
            self._driver = None
            self._fail(RuntimeError("the engine was closed, or its driver cancelled, before the answer was complete"))

    def _fail(self, error: BaseException) -> None:
        """Tell all that wait, and cancel what they wait for."""
        for queue in set(self._queues.values()):
            queue.put_nowait(error)
        for completion in self._queues:
            completion.cancel()
        self._queues.clear()
