"""The few bytes of a `.pte` that loading looks at itself: its length, and the ids of its delegates."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import flatbuffers
from flatbuffers import number_types
from flatbuffers.table import Table

# Vtable indices in ExecuTorch's schema/program.fbs.
_PROGRAM_EXECUTION_PLANS = 1
_PLAN_DELEGATES = 7
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


def _children(table: Table, index: int) -> Iterator[Table]:
    offset = table.Offset(4 + 2 * index)
    if offset:
        start = table.Vector(offset)
        for item in range(table.VectorLen(offset)):
            yield Table(table.Bytes, table.Indirect(start + 4 * item))


def delegate_ids(program: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield (position of the id's first byte, id) for each delegate of a program.

    Raises:
        ValueError: the program is damaged.
    """
    try:
        root = Table(program, flatbuffers.encode.Get(number_types.UOffsetTFlags.packer_type, program, 0))
        for plan in _children(root, _PROGRAM_EXECUTION_PLANS):
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
