"""Models to drive an engine with, and what each of their prompts gets alone."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from executorch_mlx.examples.llm.folder import MODEL_FILE
from executorch_mlx.examples.llm.generation import LanguageModel
from executorch_mlx.extension.llm.cache import (
    BatchCellCache,
    BatchSequenceCache,
    CacheConfig,
    CacheSession,
    LayerConfig,
    LayerPlan,
    Run,
    SequenceCache,
    active_cache,
)
from executorch_mlx.extension.llm.engine import Completion, Sampler, Sampling

# -- a model of integers: the next token follows from what the caches hold, all of it --------------------

Seen = tuple[tuple[int, int], ...]
"""What a query sees of a layer: positions and the tokens there."""


class TokenCells(BatchCellCache):
    """Cells that hold tokens."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools: list[dict[int, int]] = [{} for _ in config.layers]

    def attend_tokens(self, layer: int, positions: Sequence[int], tokens: Sequence[int]) -> list[Seen]:
        plan = self.plan(layer, positions)
        with self.writing(plan):
            pool = self._pools[layer]
            pool.update(zip(_slots(plan.write), tokens, strict=True))
            spans = [span for group in plan.groups for span in group.spans]
            seen = {}
            for span in spans:
                its = self.tokens(span.seq_id)
                held = tuple((at, pool[cell]) for at, cell in zip(its.positions, its.cells, strict=True))
                for row in range(span.start, span.stop):
                    seen[row] = _visible(held, positions[row], plan.window)
        return [seen[row] for row in range(len(tokens))]

    def _attend(self, *_: Any) -> Any:
        raise NotImplementedError

    def _forget(self) -> None:
        self._pools = [{} for _ in self.config.layers]


class TokenSequence(SequenceCache):
    """One sequence of tokens."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._pools: list[dict[int, int]] = [{} for _ in config.layers]

    def attend_tokens(self, plan: LayerPlan, tokens: Sequence[int]) -> list[Seen]:
        pool = self._pools[plan.layer]
        pool.update(zip(_slots(plan.write), tokens, strict=True))
        held = tuple(zip(range(plan.first_key, plan.stop), (pool[slot] for slot in _slots(plan.read)), strict=True))
        return [_visible(held, position, plan.window) for position in plan.positions]

    def _copy_prefix(self, source: TokenSequence, upto: int) -> None:
        self._pools = [dict(pool) for pool in source._pools]

    def _attend(self, *_: Any) -> Any:
        raise NotImplementedError

    def _forget(self) -> None:
        self._pools = [{} for _ in self.config.layers]


class TokenSequences(BatchSequenceCache[TokenSequence]):
    """Many sequences of tokens."""

    sequence_type = TokenSequence

    def attend_tokens(self, layer: int, positions: Sequence[int], tokens: Sequence[int]) -> list[Seen]:
        plan = self.plan(layer, positions)
        seen = {}
        with self.writing(plan):
            for part in plan.parts:
                rows = [row for span in part.rows for row in range(span.start, span.stop)]
                with part.cache.writing(part.plan):
                    its = part.cache.attend_tokens(part.plan, [tokens[row] for row in rows])
                seen.update(zip(rows, its, strict=True))
        return [seen[row] for row in range(len(tokens))]

    def _joined(self, parts: Sequence[Any]) -> Any:
        raise NotImplementedError


def _slots(runs: Sequence[Run]) -> list[int]:
    return [slot for run in runs for slot in range(run.slot, run.slot + run.length)]


def _visible(held: Seen, position: int, window: int | None) -> Seen:
    first = 0 if window is None else position - window + 1
    return tuple(item for item in held if first <= item[0] <= position)


@lru_cache(maxsize=1 << 18)
def scores(seen: tuple[Seen, ...], vocab_size: int) -> np.ndarray:
    """Return logits that any other token, at any position of any layer, would have changed."""
    return np.random.default_rng(zlib.crc32(repr(seen).encode())).normal(size=vocab_size) * 3


class TokenModel:
    """An ``engine.Model`` over caches of tokens, with layers of the given windows."""

    max_context = 64
    max_step = 16
    vocab_size = 23

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self.layers = tuple(LayerConfig(1, 1, window=window) for window in windows)

    def new_cache(self, capacity: int, *, kind: str = "batched-cell", max_seqs: int | None = None) -> Any:
        config = CacheConfig(capacity, self.layers, "float32", max_write=self.max_step, max_seqs=max_seqs)
        return (TokenCells if kind == "batched-cell" else TokenSequences)(config)

    def logits(self, seen: tuple[Seen, ...]) -> np.ndarray:
        return scores(seen, self.vocab_size)

    def step(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> np.ndarray:
        cache = active_cache()
        assert cache is not None
        with cache.step():
            seen = [cache.attend_tokens(layer, positions, tokens) for layer in range(len(self.layers))]
        return np.stack([self.logits(tuple(layer[row] for layer in seen)) for row in rows])

    def step_greedy(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> list[int]:
        return self.step(tokens, positions, rows).argmax(-1).tolist()


# -- the oracles: one prompt alone -----------------------------------------------------------------------


class Answer(NamedTuple):
    tokens: list[int]
    finish_reason: str


class TokenWorld:
    """The model of integers; its oracle keeps a list of tokens and no cache."""

    beginning = (1, 30)
    capacities = (30, 90)

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.model = TokenModel(windows)
        self._windows = windows
        self._known: dict[Any, Answer] = {}

    def answer(self, prompt: Sequence[int], sampling: Sampling, stop_ids: frozenset[int], budget: int) -> Answer:
        key = (tuple(prompt), sampling, stop_ids, budget)
        if key not in self._known:
            tokens, sampler, new = list(prompt), Sampler(sampling), []
            reason = "length"
            while len(new) < budget:
                held = tuple(enumerate(tokens))
                logits = scores(tuple(held if w is None else held[-w:] for w in self._windows), self.model.vocab_size)
                token = int(logits.argmax()) if sampling.is_greedy else sampler.choose(logits, len(new))
                if token in stop_ids:
                    reason = "stop"
                    break
                new.append(token)
                tokens.append(token)
            self._known[key] = Answer(new, reason)
        return self._known[key]

    def is_tie(self, tokens: Sequence[int], candidates: tuple[int, int]) -> bool:
        return False


class ExportedWorld:
    """An exported model; its oracle is ``generate`` over a cache of one sequence."""

    beginning = (1, 56)
    capacities = (70, 130)

    def __init__(self, exported: Any) -> None:
        self.model = LanguageModel(exported.folder / MODEL_FILE)
        self._eager = exported.model
        self._known: dict[Any, Answer] = {}

    def answer(self, prompt: Sequence[int], sampling: Sampling, stop_ids: frozenset[int], budget: int) -> Answer:
        key = (tuple(prompt), sampling, stop_ids, budget)
        if key not in self._known:
            with CacheSession(self.model.new_cache(len(prompt) + budget)) as session:
                result = self.model.generate(
                    prompt, max_new_tokens=budget, stop_ids=stop_ids, sampling=sampling, session=session
                )
            self._known[key] = Answer(result.tokens, result.finish_reason)
        return self._known[key]

    def is_tie(self, tokens: Sequence[int], candidates: tuple[int, int]) -> bool:
        """Whether rounding alone may choose either: their logits are as good as equal."""
        ids = torch.tensor([list(tokens)])
        logits = self._eager(ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        return bool((logits[candidates[0]] - logits[candidates[1]]).abs() < 1e-4)


def sampled_as(sampling: Sampling, sample: int) -> Sampling:
    if sampling.seed is None:
        return sampling
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + sample)


def check_answer(world: Any, completion: Completion, room: int) -> None:
    """Compare an answer that has ended with that of its prompt alone."""
    request = completion.request
    budget = min(request.max_new_tokens, room - len(request.prompt) + 1)
    sampling = sampled_as(request.sampling, completion.sample)
    expected = world.answer(request.prompt, sampling, request.stop_ids, budget)
    for index, pair in enumerate(zip(completion.tokens, expected.tokens, strict=False)):
        if pair[0] != pair[1]:
            assert world.is_tie([*request.prompt, *completion.tokens[:index]], pair), (completion, expected, index)
            return
    if completion.finish_reason == "cancelled":
        assert len(completion.tokens) <= len(expected.tokens), (completion, expected)
    else:
        assert (completion.tokens, completion.finish_reason) == tuple(expected), (completion, expected)


# -- steps that are watched, and fail as they are told ---------------------------------------------------


class InjectedError(Exception):
    """A step that fails."""


class Call(NamedTuple):
    tokens: list[int]
    positions: list[int]
    rows: list[int]


class WatchedModel:
    """A model that records its steps, and fails as it is told: before a step or once the cache has taken it."""

    def __init__(self, model: Any) -> None:
        self.max_context, self.max_step, self.vocab_size = model.max_context, model.max_step, model.vocab_size
        self.calls: list[Call] = []
        self.failures: deque[tuple[int, type[BaseException], bool]] = deque()
        self._model = model

    def step(self, *step: Sequence[int]) -> Any:
        return self._watched(self._model.step, step)

    def step_greedy(self, *step: Sequence[int]) -> Any:
        return self._watched(self._model.step_greedy, step)

    def _watched(self, run: Any, step: tuple[Sequence[int], ...]) -> Any:
        tokens, positions, rows = map(list, step)
        self.calls.append(Call(tokens, positions, rows))
        wait, error, is_late = self.failures[0] if self.failures else (1, InjectedError, False)
        if self.failures:
            self.failures[0] = (wait - 1, error, is_late)
        if wait <= 0:
            self.failures.popleft()
            if not is_late:
                raise error
        outputs = run(*step)
        if wait <= 0:
            raise error
        return outputs
