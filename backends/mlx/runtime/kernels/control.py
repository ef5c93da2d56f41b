"""Instructions that run other chains of instructions."""

from __future__ import annotations

from ...program import Node
from ..device import MEMORY_BYTES, mx
from .base import At, Env, Row, Step, get


def _if(node: Node, at: At) -> Step:
    condition = get(node.cond, at)
    branches = at.chain(node.else_chain_idx), at.chain(node.then_chain_idx)

    def step(env: Env) -> None:
        branch = branches[bool(condition(env))]
        env[-1].spend(len(branch))
        for instruction in branch:
            instruction(env)

    return step


def _scan(node: Node, at: At) -> Step:
    originals, sliced, outputs = ([at(slot) for slot in slots] for slots in (node.originals, node.sliced, node.outputs))
    body, axis = at.chain(node.body_chain_idx), node.scan_axis

    def step(env: Env) -> None:
        given = [env[slot] for slot in originals]
        lengths = {array.shape[axis] for array in given}
        if len(lengths) != 1:
            raise ValueError(f"ScanNode: what it goes over differs in length: {sorted(lengths)}")
        if not (length := lengths.pop()):
            raise ValueError("ScanNode: there is nothing to go over, so that its results have no shape")
        results: list[list[mx.array]] = [[] for _ in outputs]
        for index in range(length):
            env[-1].spend(len(body) + 1)
            for slot, array in zip(sliced, given, strict=True):
                env[slot] = array[tuple([slice(None)] * (axis % array.ndim) + [index])]
            for instruction in body:
                instruction(env)
            for result, slot in zip(results, outputs, strict=True):
                _check_stack(env[slot], length)
                result.append(env[slot])
        for result, slot in zip(results, outputs, strict=True):
            env[slot] = mx.stack(result, axis=axis)

    return step


def _check_stack(array: mx.array, length: int) -> None:
    """Refuse what a scan would stack once a round shows its size: the verifier may have known nothing of it."""
    if array.nbytes * length > MEMORY_BYTES:
        raise ValueError(
            f"{length} results of {list(array.shape)} take {array.nbytes * length} bytes, there are {MEMORY_BYTES}"
        )


KERNELS: dict[str, Row] = {"IfNode": _if, "ScanNode": _scan}
