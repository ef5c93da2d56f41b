"""Reads payloads that nobody vouches for, and holds the reader and the verifier to what they promise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from executorch_mlx.backends.mlx.program import Graph, ProgramError, read_payload, verify_graph

# A table costs a few calls per field; the reader promises no more tables than the payload has bytes.
_CALLS_PER_BYTE = 600
_FREE_BYTES = 1200
_CALLS_TO_VERIFY = 2_000_000


class OverBudgetError(Exception):
    """Far more work than the size of the payload allows: what would otherwise be a hang."""


@contextmanager
def call_budget(limit: int) -> Iterator[None]:
    """Count the calls made inside, and raise OverBudgetError beyond the limit."""
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise OverBudgetError(f"more than {limit} calls")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        yield
    finally:
        sys.setprofile(before)


def read_untrusted(payload: bytes) -> Graph | None:
    """Read a payload and verify what was read; return the graph if there is one.

    ProgramError is the one exception allowed, of either; any other fails the test.
    """
    try:
        with call_budget(_CALLS_PER_BYTE * (len(payload) + _FREE_BYTES)):
            graph = read_payload(payload)
    except ProgramError:
        return None
    assert isinstance(graph, Graph)
    instructions = sum(len(chain.instructions) for chain in graph.instruction_chains)
    assert instructions <= len(payload) + _FREE_BYTES
    is_runnable(graph)
    return graph


def is_runnable(graph: Graph) -> bool:
    """Whether the verifier accepts a graph; any exception but ProgramError fails the test."""
    try:
        with call_budget(_CALLS_TO_VERIFY):
            verify_graph(graph)
    except ProgramError:
        return False
    return True
