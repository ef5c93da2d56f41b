"""The few bytes of a `.pte` that are read here: its length, its delegates' ids, what its methods are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import flatbuffers
from flatbuffers import number_types
from flatbuffers.table import Table

# Vtable indices in ExecuTorch's schema/program.fbs.
_PROGRAM_EXECUTION_PLANS = 1
_PLAN_NAME, _PLAN_INPUTS, _PLAN_OUTPUTS, _PLAN_CHAINS, _PLAN_DELEGATES = 0, 3, 4, 5, 7
_CHAIN_INSTRUCTIONS = 2
_INSTRUCTION_KIND, _INSTRUCTION_FIELDS = 0, 1
_DELEGATE_CALL, _DELEGATE_CALL_ARGUMENTS = 2, 1
_DELEGATE_ID = 0

HEAD_BYTES = 64


def check_length(head: bytes, size: int) -> None:
    """Check that a program is whole before ExecuTorch maps it.

    Args:
        head: the first ``HEAD_BYTES`` bytes, or fewer if there are no more.
        size: bytes there are in all.

    Raises:
        ValueError: no `.pte`, or one that is cut short.
    """
    if len(head) < 8 or not head[4:8].startswith(b"ET"):
        raise ValueError(f"not an ExecuTorch program: expected the mark b'ET..' at byte 4, got {head[4:8]!r}")
    # The extended header: magic, length, program size, segment base, and (from 32 bytes on) the segments' size.
    if len(head) < 40 or head[8:12] != b"eh00":
        return
    length, program_size, segment_base = struct.unpack_from("<IQQ", head, 12)
    segments = struct.unpack_from("<Q", head, 32)[0] if length >= 32 else 0
    expected = max(program_size, segment_base + segments)
    if size < expected:
        raise ValueError(f"the program is truncated: its header promises {expected} bytes, got {size}")


def program_bytes(head: bytes) -> int:
    """Return how many bytes of a file are the program itself; -1, all of them, where its header does not say."""
    if len(head) < 40 or head[8:12] != b"eh00":
        return -1
    size: int = struct.unpack_from("<Q", head, 16)[0]
    return size


def _children(table: Table, index: int) -> Iterator[Table]:
    offset = table.Offset(4 + 2 * index)
    if offset:
        start = table.Vector(offset)
        for item in range(table.VectorLen(offset)):
            yield Table(table.Bytes, table.Indirect(start + 4 * item))


def _integers(table: Table, index: int) -> list[int]:
    offset = table.Offset(4 + 2 * index)
    if not offset:
        return []
    start = table.Vector(offset)
    return [table.Get(number_types.Int32Flags, start + 4 * item) for item in range(table.VectorLen(offset))]


def _root(program: bytes | bytearray) -> Table:
    return Table(program, flatbuffers.encode.Get(number_types.UOffsetTFlags.packer_type, program, 0))


def is_one_delegate(program: bytes, method: str) -> bool:
    """Whether a method is one call of a delegate with the method's inputs and outputs, in their order.

    Raises:
        ValueError: the program is damaged.
    """
    try:
        for plan in _children(_root(program), _PROGRAM_EXECUTION_PLANS):
            offset = plan.Offset(4 + 2 * _PLAN_NAME)
            if not offset or _string(plan, offset)[1] != method.encode():
                continue
            calls = [call for chain in _children(plan, _PLAN_CHAINS) for call in _children(chain, _CHAIN_INSTRUCTIONS)]
            return [_delegate_arguments(call) for call in calls] == [
                _integers(plan, _PLAN_INPUTS) + _integers(plan, _PLAN_OUTPUTS)
            ]
        return False
    except (struct.error, IndexError, TypeError) as error:
        raise ValueError(f"the program is damaged: {error}") from error


def _delegate_arguments(instruction: Table) -> list[int] | None:
    """Return what a delegate is called with; None where the instruction is no such call."""
    kind, fields = (instruction.Offset(4 + 2 * index) for index in (_INSTRUCTION_KIND, _INSTRUCTION_FIELDS))
    is_call = kind and instruction.Get(number_types.Uint8Flags, instruction.Pos + kind) == _DELEGATE_CALL
    if not is_call or not fields:
        return None
    call = Table(instruction.Bytes, instruction.Indirect(instruction.Pos + fields))
    return _integers(call, _DELEGATE_CALL_ARGUMENTS)


def delegate_ids(program: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield (position of the id's first byte, id) for each delegate of a program.

    Raises:
        ValueError: the program is damaged.
    """
    try:
        for plan in _children(_root(program), _PROGRAM_EXECUTION_PLANS):
            for delegate in _children(plan, _PLAN_DELEGATES):
                offset = delegate.Offset(4 + 2 * _DELEGATE_ID)
                if offset:
                    yield _string(delegate, offset)
    except (struct.error, IndexError, TypeError) as error:
        raise ValueError(f"the program is damaged: {error}") from error


def _string(table: Table, offset: int) -> tuple[int, bytes]:
    at = table.Indirect(table.Pos + offset)
    (length,) = struct.unpack_from("<I", table.Bytes, at)
    return at + 4, bytes(table.Bytes[at + 4 : at + 4 + length])


def retag(program: bytes, old: str, new: str) -> bytes:
    """Return the program with the delegates of one id given to another of the same length."""
    patched = bytearray(program)
    for position, name in list(delegate_ids(patched)):
        if name == old.encode():
            patched[position : position + len(name)] = new.encode()
    return bytes(patched)
