"""Structured damage: payloads and graphs that are almost right, and a simulation of what is accepted."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import WRITTEN_FIELDS, any_graphs, runnable_graphs
from reading import is_runnable, read_untrusted

from executorch_mlx.backends.mlx.program import (
    Graph,
    InstructionChain,
    Node,
    SlotType,
    SlotVariant,
    Tid,
    Vid,
    make_node,
    read_payload,
    verify_graph,
    write_payload,
)

HEADER_BYTES = 24
HEADER = struct.pack("<4x4sQQ", b"MLX0", 0, 0)
MANY = settings(max_examples=3 * settings.default.max_examples)

_WORDS = st.sampled_from([0, 1, 2, 4, 8, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]) | st.integers(0, 64)


@st.composite
def damaged_payloads(draw: st.DrawFn) -> bytes:
    """Payloads of runnable graphs with up to four places changed as a faulty or hostile writer would."""
    data = bytearray(HEADER + write_payload(draw(runnable_graphs() | any_graphs()))[HEADER_BYTES:])
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["word", "half", "byte", "retarget", "copy", "swap", "cut", "insert"]))
        place = draw(st.integers(HEADER_BYTES, len(data) - 1))
        other = draw(st.integers(HEADER_BYTES, len(data) - 1))
        word = place & ~3
        if kind == "word":
            data[word : word + 4] = struct.pack("<I", draw(_WORDS))
        elif kind == "half":
            data[place & ~1 : (place & ~1) + 2] = struct.pack("<H", draw(st.integers(0, 40)))
        elif kind == "byte":
            data[place] = draw(st.integers(0, 255))
        elif kind == "retarget":
            data[word : word + 4] = struct.pack("<I", ((other & ~3) - word) % 2**32)
        elif kind == "copy":
            length = draw(st.integers(1, 32))
            data[place : place + length] = data[other : other + length]
        elif kind == "swap":
            other &= ~3
            data[word : word + 4], data[other : other + 4] = data[other : other + 4], data[word : word + 4]
        elif kind == "cut" and len(data) > HEADER_BYTES + 64:
            del data[place : place + draw(st.integers(1, 8))]
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


def shown(graph: Graph) -> str:
    """Return a graph's text, in which floats that are no numbers equal themselves and no zero has a sign."""
    return re.sub(r"-0\.0\b(?!\d|e)", "0.0", repr(graph))


@MANY
@given(payload=damaged_payloads())
def test_a_payload_damaged_in_structure_is_refused_or_is_some_graph(payload: bytes) -> None:
    graph = read_untrusted(payload)
    if graph is not None:
        # What was read is a graph like any other: it can be written and is read again as it was.
        assert shown(read_payload(write_payload(graph))) == shown(graph)


@MANY
@given(body=st.binary(max_size=400))
def test_any_bytes_behind_a_header_are_refused_or_are_some_graph(body: bytes) -> None:
    read_untrusted(HEADER + body)


@MANY
@given(payload=st.binary(max_size=64))
def test_any_bytes_are_refused_or_are_some_graph(payload: bytes) -> None:
    read_untrusted(payload)


@given(graph=any_graphs())
def test_a_graph_that_makes_no_sense_is_refused_or_accepted(graph: Graph) -> None:
    graph.version = "1"
    is_runnable(graph)


@st.composite
def altered_graphs(draw: st.DrawFn) -> Graph:
    """Runnable graphs with up to three parts changed for others that could stand there."""
    graph = draw(runnable_graphs())
    small = st.integers(0, 12)
    for _ in range(draw(st.integers(1, 3))):
        chain = draw(st.sampled_from(graph.instruction_chains)).instructions
        kind = draw(st.sampled_from(["slot", "drop", "move", "wrap", "chain", "map", "count", "start"]))
        if kind == "slot" and chain:
            node = draw(st.sampled_from(chain))
            names = sorted({name for name, _ in node.slots()})
            if names:
                _change_slot(node, draw(st.sampled_from(names)), draw(small))
        elif kind == "drop" and chain:
            del chain[draw(st.integers(0, len(chain) - 1))]
        elif kind == "move" and chain:
            chain.insert(draw(st.integers(0, len(chain) - 1)), chain.pop())
        elif kind == "wrap" and chain:
            place = draw(st.integers(0, len(chain) - 1))
            chain[place] = _sometimes(graph, chain[place], draw(st.booleans()))
        elif kind == "chain":
            index = st.integers(0, len(graph.instruction_chains))
            chain.append(make_node("IfNode", cond=1, then_chain_idx=draw(index), else_chain_idx=draw(index)))
        elif kind == "map":
            entries = draw(st.sampled_from([graph.input_map, graph.output_map]))
            entries.append(SlotVariant(draw(small), draw(st.integers(0, 3))))
        elif kind == "count":
            name = draw(st.sampled_from(["num_temp_tensors", "num_values"]))
            setattr(graph, name, draw(small))
        elif kind == "start":
            graph.init_chain_idx = draw(st.integers(-1, len(graph.instruction_chains)))
    return graph


def _sometimes(graph: Graph, node: Node, in_branch: bool) -> Node:
    """Return an instruction that runs the node in one of two branches, or as often as a scan has steps."""
    inner = len(graph.instruction_chains)
    graph.instruction_chains += [InstructionChain([node]), InstructionChain([])]
    if in_branch:
        return make_node("IfNode", cond=1, then_chain_idx=inner, else_chain_idx=inner + 1)
    original, sliced = Tid(graph.num_constant_tensors), Tid(graph.num_tensors)
    graph.num_temp_tensors += 1
    return make_node(
        "ScanNode", originals=[original], sliced=[sliced], outputs=[], carry=[], body_chain_idx=inner, scan_axis=0
    )


def _change_slot(node: Node, name: str, idx: int) -> None:
    value = getattr(node, name)
    if isinstance(value, list):
        value[-1:] = [Vid(idx) if isinstance(value[-1], Vid) else Tid(idx)] if not isinstance(value[-1], int) else []
    else:
        setattr(node, name, type(value)(idx))


class _Simulation:
    """Runs a graph on nothing but whether a slot holds something; it takes the branches it is told to."""

    def __init__(self, graph: Graph, takes_then: Callable[[], bool], scan_steps: int) -> None:
        self._graph = graph
        self._takes_then = takes_then
        self._scan_steps = scan_steps
        self._tensors = [False] * graph.num_tensors
        self._values = [False] * graph.num_values
        first_output = graph.num_constant_tensors + graph.num_input_tensors
        first_buffer = first_output + graph.num_output_tensors
        for index in range(graph.num_constant_tensors):
            self._tensors[index] = True
        for index in range(first_buffer, first_buffer + graph.num_mutable_buffer_tensors):
            self._tensors[index] = True
        self._constants_are_fixed = False

    def run(self) -> None:
        """Fail the test where a step would."""
        graph = self._graph
        if graph.init_chain_idx >= 0:
            self._chain(graph.init_chain_idx)
        self._constants_are_fixed = True
        for entry in graph.input_map:
            self._write(self._slot(entry))
        self._chain(graph.main_chain_idx)
        for entry in graph.output_map:
            assert self._holds(self._slot(entry)), f"output {entry} is empty"

    @staticmethod
    def _slot(entry: SlotVariant) -> Tid | Vid:
        return Tid(entry.idx) if entry.slot_type == SlotType.TensorSlot else Vid(entry.idx)

    def _holds(self, slot: Tid | Vid) -> bool:
        return (self._tensors if isinstance(slot, Tid) else self._values)[slot.idx]

    def _write(self, slot: Tid | Vid) -> None:
        is_constant = isinstance(slot, Tid) and slot.idx < self._graph.num_constant_tensors
        assert not (is_constant and self._constants_are_fixed), f"constant {slot} is written"
        (self._tensors if isinstance(slot, Tid) else self._values)[slot.idx] = True

    def _chain(self, index: int) -> None:
        for node in self._graph.instruction_chains[index].instructions:
            for name, slot in node.slots():
                assert name in WRITTEN_FIELDS or self._holds(slot), f"{node} reads the empty {name}"
            if node.kind == "IfNode":
                self._chain(node.then_chain_idx if self._takes_then() else node.else_chain_idx)
            elif node.kind == "ScanNode":
                for _ in range(self._scan_steps):
                    for slot in node.sliced:
                        self._write(slot)
                    self._chain(node.body_chain_idx)
                    assert all(map(self._holds, node.outputs)), f"{node} has no output to stack"
            for name, slot in node.slots():
                if name in WRITTEN_FIELDS:
                    self._write(slot)


@MANY
@given(graph=altered_graphs(), data=st.data())
def test_what_is_accepted_reads_no_empty_slot_whichever_branches_are_taken(graph: Graph, data: st.DataObject) -> None:
    if is_runnable(graph):
        _Simulation(graph, lambda: data.draw(st.booleans()), data.draw(st.integers(0, 2))).run()


@given(graph=runnable_graphs())
def test_a_runnable_graph_stays_so_when_written_and_read(graph: Graph) -> None:
    read = read_payload(write_payload(graph))
    assert read == graph
    verify_graph(read)
    for takes_then in (True, False):
        _Simulation(read, lambda takes_then=takes_then: takes_then, 1).run()
