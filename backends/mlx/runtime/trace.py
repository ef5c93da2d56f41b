"""Decode steps through ``mx.compile``: a program's graph is built once per shape, and each step fills it in.

Building the graph in Python takes longer than a GPU takes for a small step. What can be traced is a step whose
attention the cache computes from arrays alone (``MLXCache.traced``); others run as they are written. A shape is traced
when it comes again, so that the steps of a prompt that comes once are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..program import Graph, Tid
from .device import mx
from .kernels import StepState

_MOST_TRACES = 64
_SEEN_BEFORE = 2
"""Steps of a shape that run as they are written."""

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
        self._traces: OrderedDict[Any, Any] = OrderedDict()
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
        trace = self._traces.pop(key, 0)
        if isinstance(trace, int) and trace < _SEEN_BEFORE:
            self._remember(key, trace + 1)
            return None
        if isinstance(trace, int):
            trace = _Trace(self._run)
        try:
            outputs, extents, results = trace(inputs, attention)
        except Exception:
            # What fails here fails again, with its reason, when it is run as it is written; or it reads what it
            # computes, which cannot be traced.
            self._can_trace = False
            return None
        self._remember(key, trace)
        state.extents.extend(extents)
        attention.commit(results)
        return list(outputs)

    def _remember(self, key: Any, trace: Any) -> None:
        self._traces[key] = trace
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
