"""Looks at an instruction's operands before it runs, where what was known of them did not say that it will fit."""

from __future__ import annotations

from ..program import Node, Tid, Vid
from ..program.flow import is_bounded
from ..program.rules import Call, results_of
from ..program.types import TensorType, Type, exactly
from .device import MEMORY_BYTES, dtype_name, mx
from .kernels import At, Step


def guarded(step: Step, node: Node, at: At) -> Step:
    """Return a step that raises ValueError before it makes what the verifier would have refused, had it been known."""
    written = [at(slot) for name, slot in node.slots() if node.writes(name)]

    def guarded_step(env: list[object]) -> None:
        def known(slot: Tid | Vid) -> Type:
            return _type(env[at(slot)])

        call = Call(node, known)
        try:
            is_bounded(call, results_of(call), MEMORY_BYTES)
            step(env)
            # What a scan stacks is known only now; it is not there yet, as MLX is lazy.
            is_bounded(call, [_type(env[slot]) for slot in written], MEMORY_BYTES)
        except ValueError as error:
            raise ValueError(f"{node.kind}: {error}") from error

    return guarded_step


def _type(value: object) -> Type:
    if isinstance(value, mx.array):
        return TensorType(tuple(map(exactly, value.shape)), dtype_name(value.dtype))
    assert isinstance(value, (int, float)), "a slot holds a tensor or a number"
    return exactly(value)
