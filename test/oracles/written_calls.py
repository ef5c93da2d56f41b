"""One instruction with its operands written as text, such as ``x="float32[2, 0..5]"``."""

from __future__ import annotations

import re
from typing import Any

from executorch_mlx.backends.mlx.program import Graph, Node, ShapeDim, TensorMeta, Tid, Vid, make_node
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.program.schema import FIELDS
from oracles.hand_built import assembled

_WRITTEN = ("out", "outs", "outputs", "sliced")
_TENSORS = ("Tid", "VidOrTid", "IntOrVidOrTid")


def described_as(text: str) -> TensorMeta | None:
    """Return the description that a text gives: ``float32[2, 0..5, 0..]``; of ``?`` there is none."""
    if text == "?":
        return None
    match = re.fullmatch(r"(\w+)\[(.*)\]", text)
    assert match, text
    dtype, sizes = match.groups()
    return TensorMeta([_dim(size) for size in sizes.split(",") if size.strip()], SCALAR_TYPE_CODES[dtype])


def _dim(text: str) -> ShapeDim:
    low, dots, high = text.strip().partition("..")
    return ShapeDim(-1, int(low), int(high or -1)) if dots else ShapeDim(int(low))


class WrittenCalls:
    """A graph in the making, of one chain: its inputs are what the calls name.

    A value slot that a call reads, and no call before it writes, is an input of which nothing is known.
    """

    def __init__(self) -> None:
        self.meta: list[TensorMeta | None] = []
        self._nodes: list[tuple[str, dict[str, Any]]] = []
        self._outs = 0

    def call(self, kind: str, num_outs: int = 1, **fields: Any) -> list[Tid]:
        """Add an instruction; return slots that stand for its results in the fields of others.

        Args:
            kind: its kind.
            num_outs: how many tensors it writes to a field that is a list.
            fields: its fields; a text, or a list of texts, describes an input where a tensor is asked for.
        """
        types = {row.name: row.type for row in FIELDS[kind]}
        for name, value in fields.items():
            if types.get(name) in _TENSORS and name not in _WRITTEN:
                fields[name] = [self._slot(item) for item in value] if isinstance(value, list) else self._slot(value)
        results: list[Tid] = []
        for row in FIELDS[kind]:
            if row.name in _WRITTEN and row.type == "Tid" and row.name not in fields:
                slots = [self._result() for _ in range(num_outs if row.is_vector else 1)]
                fields[row.name] = slots if row.is_vector else slots[0]
                results += slots
        if types.get("out") == "Vid":
            fields.setdefault("out", Vid(9))
        self._nodes.append((kind, fields))
        return results

    def _slot(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        self.meta.append(described_as(value))
        return Tid(len(self.meta) - 1)

    def _result(self) -> Tid:
        self._outs += 1
        # Inputs come before: the number is set when they are known.
        return Tid(-self._outs)

    def graph(self, *others: list[Node]) -> Graph:
        """Return the graph, not verified, with further chains for its instructions to run."""

        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return [placed(item) for item in value]
            is_result = isinstance(value, Tid) and value.idx < 0
            return Tid(len(self.meta) - 1 - value.idx) if is_result else value

        nodes = [
            make_node(kind, **{name: placed(value) for name, value in fields.items()}) for kind, fields in self._nodes
        ]
        written = {slot for node in nodes for name, slot in node.slots() if node.writes(name)}
        values = {slot for node in nodes for name, slot in node.slots() if isinstance(slot, Vid)} - written
        inputs = [*map(Tid, range(len(self.meta))), *sorted(values, key=str)]
        return assembled([nodes, *others], inputs, [], meta=self.meta)


def written_graph(kind: str, num_outs: int = 1, **fields: Any) -> Graph:
    """Return the graph of one call."""
    calls = WrittenCalls()
    calls.call(kind, num_outs, **fields)
    return calls.graph()
