"""The verifier accepts what can run and refuses everything else, saying what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from program_strategies import WRITTEN_FIELDS, runnable_graphs, whole_nodes

from executorch_mlx.backends.mlx.program import (
    NODE_KINDS,
    Graph,
    InstructionChain,
    NamedSlot,
    Node,
    ProgramError,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    verify_graph,
)
from executorch_mlx.backends.mlx.program.flow import MAX_CHAIN_DEPTH, MAX_RANK
from executorch_mlx.backends.mlx.program.schema import FIELDS
from executorch_mlx.backends.mlx.program.verify import MAX_SLOTS, MAX_TENSOR_BYTES, static_shape

CONSTANT, SECOND_CONSTANT, INPUT, SECOND_INPUT, OUTPUT, BUFFER = (Tid(index) for index in range(6))
TEMP, SLICE, STEP_OUTPUT = (Tid(index) for index in range(6, 9))
LENGTH, FLAG = Vid(0), Vid(1)
MAIN, THEN, ELSE, BODY, INIT = range(5)
INT_VALUE = int(SlotType.IntValueSlot)


def good_graph() -> Graph:
    """A graph of every sort of slot, with a branch, a scan and a chain that sets up the buffer."""
    main = [
        make_node("AddNode", a=CONSTANT, b=INPUT, out=TEMP),
        make_node("SymSizeNode", a=INPUT, dim=0, out=LENGTH),
        make_node("IfNode", cond=FLAG, then_chain_idx=THEN, else_chain_idx=ELSE),
        make_node(
            "ScanNode",
            originals=[SECOND_INPUT],
            sliced=[SLICE],
            outputs=[STEP_OUTPUT],
            carry=[BUFFER],
            body_chain_idx=BODY,
            scan_axis=0,
        ),
        make_node("SliceUpdateNode", dst=BUFFER, update=STEP_OUTPUT, out=BUFFER, axis=0, start=0, stop=LENGTH),
    ]
    return Graph(
        "1",
        num_constant_tensors=2,
        num_input_tensors=2,
        num_output_tensors=1,
        num_mutable_buffer_tensors=1,
        num_temp_tensors=3,
        num_values=2,
        instruction_chains=[
            InstructionChain(main),
            InstructionChain([make_node("IdCopyNode", x=TEMP, out=OUTPUT)]),
            InstructionChain([make_node("NegNode", x=TEMP, out=OUTPUT)]),
            InstructionChain([make_node("AddmmNode", mat1=SLICE, mat2=BUFFER, out=STEP_OUTPUT)]),
            InstructionChain([make_node("FullNode", out=BUFFER, shape=[3, 3], v=0.0, scalar_type=6)]),
        ],
        main_chain_idx=MAIN,
        init_chain_idx=INIT,
        input_map=[SlotVariant(INPUT.idx), SlotVariant(SECOND_INPUT.idx), SlotVariant(FLAG.idx, INT_VALUE)],
        output_map=[SlotVariant(OUTPUT.idx), SlotVariant(LENGTH.idx, INT_VALUE)],
        mutable_buffer_map=[SlotVariant(BUFFER.idx)],
        named_slots=[
            NamedSlot("weight", SlotVariant(CONSTANT.idx)),
            NamedSlot("bias", SlotVariant(SECOND_CONSTANT.idx)),
            NamedSlot("state", SlotVariant(BUFFER.idx)),
        ],
        tensor_meta=[TensorMeta([ShapeDim(3), ShapeDim(3)], 6) for _ in range(6)],
    )


def setting(**fields: Any) -> Callable[[Graph], None]:
    """Return a mutation that sets fields of the graph."""

    def mutate(graph: Graph) -> None:
        for name, value in fields.items():
            setattr(graph, name, value)

    return mutate


def appending(field: str, item: Any) -> Callable[[Graph], None]:
    return lambda graph: getattr(graph, field).append(item)


def instruction(chain: int, step: int, **fields: Any) -> Callable[[Graph], None]:
    """Return a mutation that sets fields of one instruction."""

    def mutate(graph: Graph) -> None:
        for name, value in fields.items():
            assert name in vars(graph.instruction_chains[chain].instructions[step])
            setattr(graph.instruction_chains[chain].instructions[step], name, value)

    return mutate


def inserting(chain: int, step: int, node: Node) -> Callable[[Graph], None]:
    return lambda graph: graph.instruction_chains[chain].instructions.insert(step, node)


def emptying(chain: int) -> Callable[[Graph], None]:
    return lambda graph: graph.instruction_chains[chain].instructions.clear()


def meta(index: int, value: TensorMeta | None) -> Callable[[Graph], None]:
    return lambda graph: graph.tensor_meta.__setitem__(index, value)


def noop() -> Node:
    return make_node("NoopNode")


def run(chain: int) -> Node:
    """Return an instruction that runs a chain in either case."""
    return make_node("IfNode", cond=1, then_chain_idx=chain, else_chain_idx=chain)


def only_named(*named: NamedSlot) -> Callable[[Graph], None]:
    return setting(named_slots=list(named))


# (name, mutation of the good graph, what the error says)
REFUSED = [
    ("version absent", setting(version=None), r"version: expected '1', got None"),
    ("version empty", setting(version=""), r"version: expected '1', got ''"),
    (
        "version of another format",
        setting(version="2"),
        r"version: expected '1', got '2'.*matching ExecuTorch",
    ),
    # Counts
    (
        "temporaries too many",
        setting(num_temp_tensors=MAX_SLOTS),
        rf"\d+ tensors and 2 values: at most {MAX_SLOTS}",
    ),
    ("values too many", setting(num_values=MAX_SLOTS + 1), rf"9 tensors and {MAX_SLOTS + 1} values: at most"),
    ("values by far too many", setting(num_values=2**32 - 1), r"and 4294967295 values: at most"),
    ("inputs by far too many", setting(num_input_tensors=2**32 - 1), r"4294967302 tensors and 2 values"),
    (
        "no temporaries",
        setting(num_temp_tensors=0),
        r"chain 0, instruction 0 \(AddNode\) names Tid\(idx=6\), there are 6",
    ),
    ("no values", setting(num_values=0), r"input 2 names slot 1 of 0 values"),
    # Metadata
    ("a constant not described", setting(num_constant_tensors=3), r"metadata: expected 7 entries .*, got 6"),
    ("metadata absent", setting(tensor_meta=[]), r"metadata: expected 6 entries .*, got 0"),
    ("metadata one too many", appending("tensor_meta", None), r"metadata: expected 6 entries .*, got 7"),
    ("constant of no metadata", meta(1, None), r"tensor 1: a constant or buffer without shape and dtype"),
    ("buffer of no metadata", meta(5, None), r"tensor 5: a constant or buffer without shape and dtype"),
    ("scalar type unknown", meta(0, TensorMeta([], 8)), r"tensor 0: unknown scalar type 8"),
    ("scalar type negative", meta(2, TensorMeta([], -1)), r"tensor 2: unknown scalar type -1"),
    ("scalar type of an output unknown", meta(4, TensorMeta([], 99)), r"tensor 4: unknown scalar type 99"),
    (
        "constant dynamic",
        meta(1, TensorMeta([ShapeDim(4), ShapeDim(-1)], 6)),
        r"tensor 1: .*static shape, got \(4, -1\)",
    ),
    ("buffer dynamic", meta(5, TensorMeta([ShapeDim()], 6)), r"tensor 5: .*static shape, got \(-1,\)"),
    ("dimension negative", meta(0, TensorMeta([ShapeDim(-7)], 6)), r"tensor 0: .*static shape, got \(-7,\)"),
    ("constant huge", meta(0, TensorMeta([ShapeDim(2**31 - 1)] * 2, 6)), r"tensor 0: shape .* is too large"),
    (
        "constant huge in sixteen dimensions",
        meta(0, TensorMeta([ShapeDim(2**31 - 1)] * 16, 0)),
        r"tensor 0: .*too large",
    ),
    (
        "rank too large",
        meta(2, TensorMeta([ShapeDim(1)] * (MAX_RANK + 1), 6)),
        rf"tensor 2: rank {MAX_RANK + 1}, at most",
    ),
    # Maps
    (
        "input to a constant",
        appending("input_map", SlotVariant(0)),
        r"input 3 goes to tensor 0, inputs are 2\.\.3",
    ),
    (
        "input to an output",
        appending("input_map", SlotVariant(4)),
        r"input 3 goes to tensor 4, inputs are 2\.\.3",
    ),
    ("input to no tensor", appending("input_map", SlotVariant(9)), r"input 3 names slot 9 of 9 tensors"),
    (
        "input to no value",
        appending("input_map", SlotVariant(2, INT_VALUE)),
        r"input 3 names slot 2 of 2 values",
    ),
    ("input of no type", appending("input_map", SlotVariant(2, 4)), r"input 3 names slot 2"),
    ("input of a negative type", appending("input_map", SlotVariant(1, -1)), r"input 3 names slot 1"),
    (
        "output from no tensor",
        appending("output_map", SlotVariant(2**32 - 1)),
        r"output 2 names slot 4294967295 of 9 tensors",
    ),
    (
        "output from no value",
        appending("output_map", SlotVariant(7, 3)),
        r"output 2 names slot 7 of 2 values",
    ),
    (
        "buffer that is an input",
        appending("mutable_buffer_map", SlotVariant(2)),
        r"mutable buffer 1 is tensor 2, buffers are 5\.\.5",
    ),
    (
        "buffer that is a value",
        appending("mutable_buffer_map", SlotVariant(0, 1)),
        r"mutable buffer 1 is tensor 0",
    ),
    (
        "buffer out of range",
        appending("mutable_buffer_map", SlotVariant(9)),
        r"mutable buffer 1 names slot 9 of 9",
    ),
    (
        "name of no tensor",
        appending("named_slots", NamedSlot("x", SlotVariant(9))),
        r"the name 'x' names slot 9 of 9",
    ),
    (
        "name of no type",
        appending("named_slots", NamedSlot("x", SlotVariant(0, 9))),
        r"the name 'x' names slot 0",
    ),
    ("no constant named", only_named(), r"2 constants, of which 0 are named"),
    (
        "one constant not named",
        only_named(NamedSlot("w", SlotVariant(0))),
        r"2 constants, of which 1 are named",
    ),
    (
        "one constant named twice instead of the other",
        only_named(NamedSlot("w", SlotVariant(0)), NamedSlot("v", SlotVariant(0))),
        r"2 constants, of which 1 are named",
    ),
    (
        "a value named instead of a constant",
        only_named(NamedSlot("w", SlotVariant(0)), NamedSlot("v", SlotVariant(1, INT_VALUE))),
        r"2 constants, of which 1 are named",
    ),
    # Order
    (
        "temporary read before it is written",
        inserting(MAIN, 0, make_node("NegNode", x=TEMP, out=TEMP)),
        r"chain 0, instruction 0 \(NegNode\): x reads Tid\(idx=6\), which nothing has written",
    ),
    (
        "output read before it is written",
        inserting(MAIN, 0, make_node("NegNode", x=OUTPUT, out=TEMP)),
        r"x reads Tid\(idx=4\)",
    ),
    (
        "value read before it is written",
        inserting(MAIN, 0, make_node("ARangeNode", out=TEMP, start=0, stop=LENGTH, step=1)),
        r"stop reads Vid\(idx=0\)",
    ),
    (
        "input that nothing is mapped to",
        setting(input_map=[SlotVariant(2), SlotVariant(1, INT_VALUE)]),
        r"originals reads Tid\(idx=3\)",
    ),
    (
        "condition that nothing has written",
        setting(input_map=[SlotVariant(2), SlotVariant(3)]),
        r"\(IfNode\): cond reads Vid\(idx=1\)",
    ),
    (
        "input read by the chain that runs first",
        inserting(INIT, 0, make_node("NegNode", x=INPUT, out=BUFFER)),
        r"chain 4, instruction 0 \(NegNode\): x reads Tid\(idx=2\)",
    ),
    (
        "branch that reads what nothing has written",
        inserting(THEN, 0, make_node("NegNode", x=SLICE, out=OUTPUT)),
        r"chain 1, instruction 0 \(NegNode\): x reads Tid\(idx=7\)",
    ),
    (
        "body that reads its own output",
        instruction(BODY, 0, mat1=STEP_OUTPUT),
        r"chain 3, instruction 0 \(AddmmNode\): mat1 reads Tid\(idx=8\)",
    ),
    # Constants
    (
        "constant written",
        inserting(MAIN, 0, make_node("IdCopyNode", x=INPUT, out=CONSTANT)),
        r"chain 0, instruction 0 \(IdCopyNode\) writes constant 0",
    ),
    (
        "constant written in a list",
        inserting(MAIN, 0, make_node("SplitNode", x=INPUT, outs=[TEMP, SECOND_CONSTANT], sizes=[1, 2], axis=0)),
        r"\(SplitNode\) writes constant 1",
    ),
    (
        "constant written in a branch",
        instruction(ELSE, 0, out=CONSTANT),
        r"chain 2, instruction 0 \(NegNode\) writes constant 0",
    ),
    (
        "constant written in a body",
        instruction(BODY, 0, out=CONSTANT),
        r"chain 3, instruction 0 \(AddmmNode\) writes constant 0",
    ),
    ("constant sliced into", instruction(MAIN, 3, sliced=[CONSTANT]), r"\(ScanNode\) writes constant 0"),
    ("constant stacked into", instruction(MAIN, 3, outputs=[CONSTANT]), r"\(ScanNode\) writes constant 0"),
    # Outputs
    (
        "output never written",
        lambda graph: (emptying(THEN)(graph), emptying(ELSE)(graph)),
        r"output 0 \(slot 4\) is never written",
    ),
    ("output written in one branch only", emptying(ELSE), r"output 0 \(slot 4\) is never written"),
    ("output written in the other branch only", emptying(THEN), r"output 0 \(slot 4\) is never written"),
    (
        "output value never written",
        setting(
            output_map=[SlotVariant(4), SlotVariant(0, 1)],
            instruction_chains=[InstructionChain([make_node("IdCopyNode", x=INPUT, out=OUTPUT)])],
            init_chain_idx=-1,
        ),
        r"output 1 \(slot 0\) is never written",
    ),
    (
        "output of another shape than is declared",
        meta(4, TensorMeta([ShapeDim(3), ShapeDim(4)], 6)),
        r"output 0 is declared as float32\[3, 4\], what is written is float32\[3, 3\]",
    ),
    # Chains
    ("no chains", setting(instruction_chains=[], init_chain_idx=-1), r"main chain 0 of 0"),
    ("main chain out of range", setting(main_chain_idx=5), r"main chain 5 of 5"),
    ("main chain far out of range", setting(main_chain_idx=2**32 - 1), r"main chain 4294967295 of 5"),
    ("first chain out of range", setting(init_chain_idx=5), r"init chain 5 of 5"),
    ("first chain negative", setting(init_chain_idx=-2), r"init chain -2 of 5"),
    ("branch out of range", instruction(MAIN, 2, then_chain_idx=5), r"instruction 2 \(IfNode\) runs chain 5"),
    (
        "other branch out of range",
        instruction(MAIN, 2, else_chain_idx=2**32 - 1),
        r"\(IfNode\) runs chain 4294967295",
    ),
    ("body out of range", instruction(MAIN, 3, body_chain_idx=5), r"instruction 3 \(ScanNode\) runs chain 5"),
    ("body negative", instruction(MAIN, 3, body_chain_idx=-1), r"instruction 3 \(ScanNode\) runs chain -1"),
    ("chain that runs itself", inserting(MAIN, 0, run(MAIN)), r"instruction chain 0 runs itself"),
    ("branch that runs the main chain", inserting(ELSE, 0, run(MAIN)), r"instruction chain 0 runs itself"),
    ("body that runs itself", inserting(BODY, 0, run(BODY)), r"instruction chain 3 runs itself"),
    ("first chain that runs itself", inserting(INIT, 0, run(INIT)), r"instruction chain 4 runs itself"),
    # Scans
    (
        "body that never writes its output",
        emptying(BODY),
        r"ScanNode: its body never writes \[Tid\(idx=8\)\]",
    ),
    (
        "body that writes another slot",
        instruction(BODY, 0, out=TEMP),
        r"ScanNode: its body never writes \[Tid\(idx=8\)\]",
    ),
    (
        "what only the body writes read after it",
        lambda graph: instruction(MAIN, 3, outputs=[])(graph),
        r"update reads Tid\(idx=8\), which nothing has written",
    ),
    (
        "carry that nothing has written",
        instruction(MAIN, 3, carry=[STEP_OUTPUT]),
        r"carry reads Tid\(idx=8\)",
    ),
]


@pytest.mark.parametrize(
    ("mutate", "message"), [pytest.param(mutate, message, id=name) for name, mutate, message in REFUSED]
)
def test_a_graph_that_cannot_run_is_refused_with_what_is_wrong(mutate: Callable[[Graph], object], message: str) -> None:
    graph = good_graph()
    mutate(graph)
    with pytest.raises(ProgramError, match=message):
        verify_graph(graph)


# (name, mutation of the good graph): what looks odd and can run
ACCEPTED = [
    ("as it is", lambda graph: None),
    ("nothing to run first", setting(init_chain_idx=-1)),
    (
        "metadata of inputs and outputs absent",
        lambda graph: [meta(index, None)(graph) for index in (2, 3, 4)],
    ),
    ("input dynamic", meta(2, TensorMeta([ShapeDim(-1, 1, 64)], 6))),
    ("rank as large as may be", meta(1, TensorMeta([ShapeDim(1)] * MAX_RANK, 6))),
    ("constant of no elements", meta(1, TensorMeta([ShapeDim(0)], 6))),
    ("constant of no dimensions", meta(0, TensorMeta([], 6))),
    (
        "constant as large as may be",
        meta(1, TensorMeta([ShapeDim(2**20), ShapeDim(MAX_TENSOR_BYTES >> 23)], 6)),
    ),
    ("as many values as may be", setting(num_values=MAX_SLOTS)),
    ("as many temporaries as may be", setting(num_temp_tensors=MAX_SLOTS - 6)),
    ("temporary written twice", inserting(MAIN, 1, make_node("NegNode", x=TEMP, out=TEMP))),
    ("input written", inserting(MAIN, 0, make_node("NegNode", x=INPUT, out=INPUT))),
    ("output that is an input", appending("output_map", SlotVariant(2))),
    ("output that is a constant", appending("output_map", SlotVariant(0))),
    (
        "constant written by the chain that runs first",
        inserting(INIT, 0, make_node("FullNode", out=CONSTANT, shape=[3], v=1.0)),
    ),
    (
        "slot written by the chain that runs first",
        inserting(INIT, 0, make_node("FullNode", out=SLICE, shape=[3], v=1.0)),
    ),
    ("output of another dtype than is declared", meta(4, TensorMeta([ShapeDim(3), ShapeDim(3)], 5))),
    ("both branches the same chain", instruction(MAIN, 2, else_chain_idx=THEN)),
    ("chain that nothing runs", lambda graph: graph.instruction_chains.append(InstructionChain([run(99)]))),
    ("two names for a constant", appending("named_slots", NamedSlot("tied", SlotVariant(0)))),
    (
        "one name for two constants",
        only_named(NamedSlot("w", SlotVariant(0)), NamedSlot("w", SlotVariant(1))),
    ),
]


@pytest.mark.parametrize("mutate", [pytest.param(mutate, id=name) for name, mutate in ACCEPTED])
def test_a_graph_that_can_run_is_accepted(mutate: Callable[[Graph], object]) -> None:
    graph = good_graph()
    mutate(graph)
    verify_graph(graph)


@given(graph=runnable_graphs())
def test_graphs_made_to_run_are_accepted(graph: Graph) -> None:
    verify_graph(graph)


class TestNesting:
    """How deep and how often chains may run each other."""

    @staticmethod
    def nested(depth: int) -> Graph:
        chains = [InstructionChain([run(index + 1)]) for index in range(depth - 1)]
        return Graph("1", instruction_chains=[*chains, InstructionChain([noop()])])

    def test_chains_nested_as_deep_as_may_be_are_accepted(self) -> None:
        slots = {"originals": [Tid(0)], "sliced": [Tid(1)], "outputs": [], "carry": []}
        chains = [
            InstructionChain([make_node("ScanNode", **slots, body_chain_idx=index + 1, scan_axis=0)])
            for index in range(MAX_CHAIN_DEPTH - 1)
        ]
        verify_graph(
            Graph(
                "1",
                num_input_tensors=1,
                num_temp_tensors=1,
                instruction_chains=[*chains, InstructionChain([noop()])],
                input_map=[SlotVariant(0)],
                tensor_meta=[TensorMeta([ShapeDim(1)], 6)],
            )
        )

    def test_chains_nested_deeper_are_refused(self) -> None:
        with pytest.raises(ProgramError, match=f"chains nest deeper than {MAX_CHAIN_DEPTH}"):
            verify_graph(self.nested(MAX_CHAIN_DEPTH + 1))

    def test_chains_nested_far_deeper_are_refused(self) -> None:
        with pytest.raises(ProgramError, match=f"chains nest deeper than {MAX_CHAIN_DEPTH}"):
            verify_graph(self.nested(20_000))

    def test_chains_that_run_each_other_exponentially_often_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The limit is lowered: 2**31 runs are refused after 2**20 of them, which takes seconds.
        monkeypatch.setattr("executorch_mlx.backends.mlx.program.flow.MAX_VISITS", 5_000)
        with pytest.raises(ProgramError, match="run each other more than 5000 times"):
            verify_graph(self.nested(MAX_CHAIN_DEPTH))


class TestStaticShape:
    """The shape of a constant, as its storage will be read."""

    def test_a_static_shape_is_returned(self) -> None:
        assert static_shape(0, TensorMeta([ShapeDim(2), ShapeDim(0), ShapeDim(5)])) == (2, 0, 5)

    def test_a_dynamic_one_is_refused(self) -> None:
        with pytest.raises(ProgramError, match=r"tensor 3: .* static shape, got \(2, -1\)"):
            static_shape(3, TensorMeta([ShapeDim(2), ShapeDim()]))


# Operands of which nothing is known: each rule has to take them.
UNKNOWN, SOME_VALUE = INPUT, FLAG


def nodes_of(kind: str) -> list[Node]:
    """Return a kind's nodes with all of the slots that they may name."""
    return whole_nodes(kind, read=(UNKNOWN, SOME_VALUE), written=(OUTPUT, LENGTH), sliced=SLICE, chain=1)


def slots_of(node: Node, *, is_written: bool | None = None) -> dict[str, Any]:
    """Return a node's fields that name slots, all of them or just those that it writes or reads."""
    names = {name for name, _ in node.slots() if is_written is None or (name in WRITTEN_FIELDS) == is_written}
    return {name: getattr(node, name) for name in names}


def graph_around(node: Node, **slots: Any) -> Graph:
    """Return a graph like ``good_graph`` whose first instruction is a node with the slots given."""
    graph = good_graph()
    output = make_node("IdCopyNode", x=INPUT, out=OUTPUT)
    graph.instruction_chains = [
        InstructionChain([Node(node.kind, {**vars(node), **slots}), output]),
        InstructionChain([output]),
    ]
    graph.init_chain_idx = -1
    graph.output_map = [SlotVariant(OUTPUT.idx)]
    graph.tensor_meta[UNKNOWN.idx] = graph.tensor_meta[OUTPUT.idx] = None
    return graph


def each_replaced(slots: dict[str, Any], make: Callable[[Tid | Vid], Tid | Vid]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, slot put in, the field's new value) for every single slot replaced."""
    for name, value in slots.items():
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield name, make(item), [*value[:index], make(item), *value[index + 1 :]]
        else:
            yield name, make(value), make(value)


@pytest.mark.parametrize("kind", NODE_KINDS)
class TestEverySlotOfEveryKind:
    """Each position of an instruction that holds a slot."""

    def test_every_field_that_may_name_a_slot_does(self, kind: str) -> None:
        named = {name for node in nodes_of(kind) for name in slots_of(node)}
        assert named == {row.name for row in FIELDS[kind] if row.type.endswith(("Tid", "Vid"))}

    def test_slots_in_range_are_accepted(self, kind: str) -> None:
        for node in nodes_of(kind):
            verify_graph(graph_around(node))

    @pytest.mark.parametrize("excess", [0, 2**31])
    def test_a_slot_out_of_range_is_refused(self, kind: str, excess: int) -> None:
        for node in nodes_of(kind):
            for name, bad, value in each_replaced(
                slots_of(node), lambda slot: type(slot)((9 if isinstance(slot, Tid) else 2) + excess)
            ):
                limit = 9 if isinstance(bad, Tid) else 2
                message = rf"chain 0, instruction 0 \({kind}\) names {re.escape(repr(bad))}, there are {limit}"
                with pytest.raises(ProgramError, match=message):
                    verify_graph(graph_around(node, **{name: value}))

    def test_a_slot_read_before_it_is_written_is_refused(self, kind: str) -> None:
        for node in nodes_of(kind):
            reads = slots_of(node, is_written=False)
            for name, bad, value in each_replaced(reads, lambda slot: TEMP if isinstance(slot, Tid) else LENGTH):
                message = rf"instruction 0 \({kind}\): {name} reads {re.escape(repr(bad))}, which nothing"
                with pytest.raises(ProgramError, match=message):
                    verify_graph(graph_around(node, **{name: value}))

    def test_a_constant_written_is_refused(self, kind: str) -> None:
        for node in nodes_of(kind):
            writes = slots_of(node, is_written=True)
            tensors = {name: value for name, value in writes.items() if value != LENGTH}
            for name, bad, value in each_replaced(tensors, lambda slot: SECOND_CONSTANT):
                assert bad == SECOND_CONSTANT
                with pytest.raises(ProgramError, match=rf"instruction 0 \({kind}\) writes constant 1"):
                    verify_graph(graph_around(node, **{name: value}))
