"""Decode steps through ``mx.compile``: a program's graph is built once per shape, and each step fills it in.

Building the graph in Python takes longer than a GPU takes for a small step. What can be traced is a step whose
attention the cache computes from arrays alone (``MLXCache.traced``); others run as they are written. A shape is traced
when it comes again, so that the steps of a prompt that comes once are not.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..program import Graph, Tid
from .device import mx
from .kernels import StepState

logger = logging.getLogger("executorch_mlx")

_MOST_TRACES = 64
_SEEN_BEFORE = 2
"""Steps of a shape that run as they are written."""
_RETRY = 1000
"""Further steps that do, where a shape could not be traced."""

Run = Callable[[Sequence[Any], StepState], list[Any]]


class TracedAttention(ABC):
    """A planned step of a cache, whose attention follows from arrays.

    Attributes:
        arrays: what it is computed from, besides queries, keys and values.
        fixed: what it depends on besides, and the arrays' shapes: equal ones are traced once.
    """

    arrays: list[Any]
    fixed: tuple[Any, ...]

    @abstractmethod
    def attend(self, arrays: list[Any], layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """Append and attend, with arrays in the place of its own."""

    @abstractmethod
    def commit(self, results: list[mx.array]) -> None:
        """Record the step as written, by what ``attend`` has returned."""


class _State(StepState):
    """A run whose numbers are not there yet."""

    def __init__(self, attention: TracedAttention, arrays: list[Any]) -> None:
        super().__init__(self)
        self.reads_inputs = False
        self.results: list[mx.array] = []
        self._attention, self._arrays = attention, arrays

    def positions(self, slot: Any, array: mx.array) -> tuple[int, ...]:
        return ()

    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        out = self._attention.attend(self._arrays, layer, q, k, v, scale)
        self.results.append(out)
        return out


class Tracer:
    """Runs the steps of a program that can be traced."""

    def __init__(self, graph: Graph, run: Run) -> None:
        self._run = run
        self._traces: OrderedDict[Any, tuple[int, _Trace | None]] = OrderedDict()  # by shape: its steps, its trace
        nodes = graph.instruction_chains[graph.main_chain_idx].instructions
        self._layers = [node.layer_id for node in nodes if node.kind == "UpdateAndAttendNode"]
        inputs = [entry.slot for entry in graph.input_map]
        given = {node.position for node in nodes if node.kind == "UpdateAndAttendNode"}
        are_tensors = all(isinstance(slot, Tid) for slot in inputs)
        self._can_trace = len(given) == 1 and given <= set(inputs) and are_tensors and not graph.buffer_tensors
        self._position = inputs.index(next(iter(given))) if self._can_trace else 0
        self._slots = inputs

    def __call__(self, inputs: Sequence[Any], state: StepState) -> list[Any] | None:
        """Run a step with the state's cache.

        Returns:
            The outputs; None where the step is to be run as it is written, and nothing has been done. Extents of
            indices are left in the state.
        """
        if not self._can_trace:
            return None
        positions = state.positions(self._slots[self._position], inputs[self._position])
        attention = state.cache.traced(self._layers, positions)
        if attention is None:
            return None
        key = (attention.fixed, tuple((array.shape, array.dtype) for array in inputs))
        seen, trace = self._traces.pop(key, (0, None))
        if seen >= _SEEN_BEFORE and trace is None:
            trace = _Trace(self._run)
        self._remember(key, (seen + 1, trace))
        if trace is None:
            return None
        try:
            outputs, extents, results = trace(inputs, attention)
        except Exception as error:
            # The step is run as it is written: what is wrong with it is reported there. A program that reads what it
            # computes cannot be traced, so that it is not tried often.
            logger.debug("a step of %s is not traced: %s", [array.shape for array in inputs], error)
            self._remember(key, (-_RETRY, None))
            return None
        state.extents.extend(extents)
        attention.commit(results)
        return list(outputs)

    def _remember(self, key: Any, entry: tuple[int, _Trace | None]) -> None:
        self._traces[key] = entry
        if len(self._traces) > _MOST_TRACES:
            self._traces.popitem(last=False)


class _Trace:
    """A step of one shape."""

    def __init__(self, run: Run) -> None:
        self._bounds: list[tuple[int, int]] = []
        self._attention: TracedAttention | None = None  # while it is called: it holds a cache's pools

        def step(inputs: list[mx.array], arrays: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            assert self._attention is not None, "there is a call that traces"
            state = _State(self._attention, arrays)
            outputs = run(inputs, state)
            self._bounds = [(low, high) for _, _, low, high in state.extents]
            return outputs, [[least, most] for least, most, *_ in state.extents], state.results

        self._step = mx.compile(step)

    def __call__(self, inputs: Sequence[Any], attention: TracedAttention) -> tuple[list[Any], list[Any], list[Any]]:
        self._attention = attention
        try:
            outputs, extents, results = self._step(list(inputs), attention.arrays)
        finally:
            self._attention = None
        bounded = [(least, most, low, high) for (least, most), (low, high) in zip(extents, self._bounds, strict=True)]
        return outputs, bounded, results
