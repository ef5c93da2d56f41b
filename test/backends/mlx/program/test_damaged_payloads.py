"""A damaged payload is refused with a ProgramError or read as some graph; nothing else happens."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

import flatbuffers
import pytest
from program_strategies import filled_node
from reading import call_budget, read_untrusted

from executorch_mlx.backends.mlx.program import (
    NODE_KINDS,
    Graph,
    InstructionChain,
    NamedSlot,
    ProgramError,
    ShapeDim,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    read_payload,
    verify_graph,
    write_payload,
)
from executorch_mlx.backends.mlx.program.schema import FIELDS

HEADER_BYTES = 24
HEADER = struct.pack("<4x4sQQ", b"MLX0", 0, 0)
Builder = flatbuffers.Builder


def small_graph() -> Graph:
    """A runnable graph with a table of every sort, and vectors of scalars, structs, tables and strings."""
    main = [
        make_node("SymSizeNode", a=Tid(1), dim=0, out=Vid(0)),
        make_node("SumNode", x=Tid(1), out=Tid(2), axes=[0]),
        make_node("ConcatenateNode", tensors=[Tid(0), Tid(2)], out=Tid(2)),
        make_node("IfNode", cond=Vid(0), then_chain_idx=1, else_chain_idx=1),
    ]
    return Graph(
        "1",
        num_constant_tensors=1,
        num_input_tensors=1,
        num_output_tensors=1,
        num_values=1,
        instruction_chains=[InstructionChain(main), InstructionChain([make_node("NoopNode")])],
        input_map=[SlotVariant(1)],
        output_map=[SlotVariant(2)],
        named_slots=[NamedSlot("w", SlotVariant(0))],
        tensor_meta=[TensorMeta([ShapeDim(2)], 6, [0]), None, None],
    )


SMALL = write_payload(small_graph())


def by_hand(build: Callable[[Builder], int]) -> bytes:
    """Return a payload whose root is the table that ``build`` writes."""
    builder = Builder(1024)
    builder.Finish(build(builder))
    return HEADER + bytes(builder.Output())


def table(builder: Builder, offsets: dict[int, int] | None = None, *, fields: int = 16) -> int:
    """Write a table of offsets by field number."""
    builder.StartObject(fields)
    for number, offset in (offsets or {}).items():
        builder.PrependUOffsetTRelativeSlot(number, offset, 0)
    return int(builder.EndObject())


def vector(builder: Builder, offsets: list[int]) -> int:
    """Write a vector of offsets."""
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def number_of(table_name: str, field: str) -> int:
    return next(row.number for row in FIELDS[table_name] if row.name == field)


CHAINS = number_of("MLXGraph", "instruction_chains")
METAS = number_of("MLXGraph", "tensor_meta")


def graph_by_hand(instruction: Callable[[Builder], int]) -> bytes:
    """Return a payload of one chain with one instruction."""

    def build(builder: Builder) -> int:
        chain = table(builder, {0: vector(builder, [instruction(builder)])})
        return table(builder, {CHAINS: vector(builder, [chain])})

    return by_hand(build)


def tagged(builder: Builder, tag: int | None, op: int | None) -> int:
    """Write an Instruction; None leaves a field out."""
    builder.StartObject(2)
    if tag is not None:
        builder.PrependUint8Slot(0, tag, None)
    if op is not None:
        builder.PrependUOffsetTRelativeSlot(1, op, 0)
    return int(builder.EndObject())


def take_node(builder: Builder, tag: int | None, kind: int, *, vid: int | None = None, tid: int | None = None) -> int:
    """Write an Instruction with a TakeNode whose index has the kind and the slots given."""
    builder.StartObject(4)
    for number, idx in ((1, vid), (2, tid)):
        if idx is not None:
            builder.PrependUint32(idx)
            builder.Slot(number)
    builder.PrependUint8Slot(3, kind, 0)
    index = int(builder.EndObject())
    builder.StartObject(4)
    for number in (0, 1):
        builder.PrependUint32(number)
        builder.Slot(number)
    builder.PrependUOffsetTRelativeSlot(2, index, 0)
    return tagged(builder, tag, int(builder.EndObject()))


def test_the_payload_that_these_tests_damage_is_good() -> None:
    verify_graph(read_payload(SMALL))
    assert read_untrusted(SMALL) == small_graph()


class TestEveryPlace:
    """Damage in every place of a small payload."""

    def test_every_truncation_is_refused(self) -> None:
        for length in range(len(SMALL)):
            with pytest.raises(ProgramError, match=r"truncated: (expected|its header promises)"):
                read_payload(SMALL[:length])

    def test_every_truncation_that_the_header_does_not_tell_of_is_read_or_refused(self) -> None:
        for length in range(HEADER_BYTES, len(SMALL)):
            read_untrusted(HEADER + SMALL[HEADER_BYTES:length])
            read_untrusted(struct.pack("<4x4sQQ", b"MLX0", length, 0) + SMALL[HEADER_BYTES:])

    @pytest.mark.parametrize("damage", ["0", "255", *(f"bit {bit}" for bit in range(8))])
    def test_every_changed_byte_is_read_or_refused(self, damage: str) -> None:
        for place, byte in enumerate(SMALL):
            value = byte ^ 1 << int(damage[-1]) if damage.startswith("bit") else int(damage)
            read_untrusted(SMALL[:place] + bytes([value]) + SMALL[place + 1 :])

    @pytest.mark.parametrize(
        "word", [0, 1, 4, 0x7F, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF], ids=lambda word: f"{word:#x}"
    )
    def test_every_changed_word_is_read_or_refused(self, word: int) -> None:
        for place in range(0, len(SMALL) - 3, 2):
            read_untrusted(SMALL[:place] + struct.pack("<I", word) + SMALL[place + 4 :])

    def test_every_offset_turned_to_every_place_is_read_or_refused(self) -> None:
        offsets = [
            place
            for place in range(HEADER_BYTES, len(SMALL) - 3, 4)
            if 0 < int.from_bytes(SMALL[place : place + 4], "little") < len(SMALL)
        ]
        targets = range(0, len(SMALL) - HEADER_BYTES, 20)
        assert len(offsets) > 20
        for place in offsets:
            for target in targets:
                word = struct.pack("<I", (target - place + HEADER_BYTES) % 2**32)
                read_untrusted(SMALL[:place] + word + SMALL[place + 4 :])

    def test_every_byte_left_out_or_doubled_is_read_or_refused(self) -> None:
        for place in range(len(SMALL)):
            read_untrusted(SMALL[:place] + SMALL[place + 1 :])
            read_untrusted(SMALL[: place + 1] + SMALL[place:])


HEADERS = [
    pytest.param(b"", r"truncated: expected a header of 24 bytes, got 0", id="nothing"),
    pytest.param(SMALL[:23], r"truncated: expected a header of 24 bytes, got 23", id="short by one"),
    pytest.param(b"\0\0\0\0MLX1" + SMALL[8:], r"expected magic b'MLX0', got b'MLX1'", id="another magic"),
    pytest.param(SMALL[4:], r"expected magic b'MLX0', got", id="no leading zeros"),
    pytest.param(b"PK\x03\x04" * 20, r"expected magic b'MLX0', got b'PK\\x03\\x04'", id="a zip file"),
    *(
        pytest.param(struct.pack("<4x4sQQ", b"MLX0", *header) + SMALL[24:], message, id=name)
        for name, header, message in (
            ("data in the header", (23, 0), r"truncated: its header promises"),
            ("data at byte 1", (1, 1), r"truncated: its header promises"),
            ("data past the end", (len(SMALL) + 1, 0), rf"promises {len(SMALL) + 1} bytes, got {len(SMALL)}"),
            ("data that ends past the end", (len(SMALL), 1), rf"promises {len(SMALL) + 1} bytes, got"),
            ("a sum that overflows", (len(SMALL), 2**64 - 1), r"its header promises \d{20} bytes"),
            ("the largest offset", (2**64 - 1, 0), r"its header promises \d{20} bytes"),
            ("a flatbuffer of no bytes", (24, 0), r"the delegate payload is damaged"),
        )
    ),
    pytest.param(HEADER, r"the delegate payload is damaged", id="a header alone"),
]


@pytest.mark.parametrize(("payload", "message"), HEADERS)
def test_a_header_that_cannot_be_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        read_payload(payload)


def test_leading_bytes_that_the_format_reserves_are_not_looked_at() -> None:
    assert read_payload(b"\xff" * 4 + SMALL[4:]) == small_graph()


class TestInstructions:
    """The op union."""

    @pytest.mark.parametrize("tag", [0, len(NODE_KINDS) + 1, 255])
    def test_an_unknown_tag_is_refused_by_number(self, tag: int) -> None:
        payload = graph_by_hand(lambda builder: tagged(builder, tag, table(builder)))
        with pytest.raises(ProgramError, match=rf"unknown instruction {tag}: .* knows {len(NODE_KINDS)}"):
            read_payload(payload)

    def test_a_tag_in_range_is_read_by_the_same_hand(self) -> None:
        payload = graph_by_hand(lambda builder: tagged(builder, 1, table(builder)))
        assert read_payload(payload).instruction_chains == [InstructionChain([make_node("NoopNode")])]

    def test_an_absent_tag_is_refused_even_where_the_start_of_the_table_looks_like_one(self) -> None:
        def instruction(builder: Builder) -> int:
            # The table starts with the distance of its field table, 8, which is TakeNode's tag.
            assert NODE_KINDS.index("TakeNode") + 1 == 8
            return take_node(builder, None, 1, vid=5)

        with pytest.raises(ProgramError, match=r"unknown instruction 0|lacks its field"):
            read_payload(graph_by_hand(instruction))

    @pytest.mark.parametrize("tag", [0, 1, None])
    def test_an_absent_op_is_refused(self, tag: int | None) -> None:
        payload = graph_by_hand(lambda builder: tagged(builder, tag, None))
        with pytest.raises(ProgramError, match="Instruction lacks its field 'op'"):
            read_payload(payload)

    @pytest.mark.parametrize("kind", [kind for kind in NODE_KINDS if any(row.required for row in FIELDS[kind])])
    def test_an_absent_required_field_is_refused_by_name(self, kind: str) -> None:
        first = next(row.name for row in FIELDS[kind] if row.required)
        payload = graph_by_hand(lambda builder: tagged(builder, NODE_KINDS.index(kind) + 1, table(builder, fields=0)))
        with pytest.raises(ProgramError, match=f"{kind} lacks its field '{first}'"):
            read_payload(payload)

    def test_each_required_field_is_missed_by_name(self) -> None:
        for kind in NODE_KINDS:
            payload = write_payload(Graph(instruction_chains=[InstructionChain([filled_node(kind, "slots")])]))
            for row in FIELDS[kind]:
                if row.required:
                    with pytest.raises(ProgramError, match=f"{kind} lacks its field '{row.name}'"):
                        read_payload(without_field(payload, kind, row.number))


def without_field(payload: bytes, kind: str, number: int) -> bytes:
    """Return the payload of a single instruction with one entry of its op's field table set to zero."""
    data = bytearray(payload[HEADER_BYTES:])

    def follow(at: int) -> int:
        return at + int.from_bytes(data[at : at + 4], "little")

    def entry(at: int, field: int) -> int:
        return at - struct.unpack_from("<i", data, at)[0] + 4 + 2 * field

    def field_at(at: int, field: int) -> int:
        return at + int.from_bytes(data[entry(at, field) : entry(at, field) + 2], "little")

    chain = follow(follow(field_at(follow(0), CHAINS)) + 4)
    instruction = follow(follow(field_at(chain, 0)) + 4)
    assert data[field_at(instruction, 0)] == NODE_KINDS.index(kind) + 1
    place = entry(follow(field_at(instruction, 1)), number)
    assert int.from_bytes(data[place : place + 2], "little")
    data[place : place + 2] = bytes(2)
    return payload[:HEADER_BYTES] + bytes(data)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        pytest.param(lambda builder: table(builder), "MLXGraph lacks its field 'instruction_chains'", id="graph"),
        pytest.param(
            lambda builder: table(builder, {CHAINS: vector(builder, [table(builder)])}),
            "InstructionChain lacks its field 'instructions'",
            id="chain",
        ),
        pytest.param(
            lambda builder: table(
                builder,
                {CHAINS: vector(builder, []), METAS: vector(builder, [table(builder)])},
            ),
            "TensorMeta lacks its field 'shape'",
            id="metadata",
        ),
        pytest.param(
            lambda builder: table(
                builder,
                {
                    CHAINS: vector(builder, []),
                    number_of("MLXGraph", "named_slots"): vector(
                        builder, [table(builder, {0: builder.CreateString("w")})]
                    ),
                },
            ),
            "NamedSlot lacks its field 'slot'",
            id="named slot",
        ),
    ],
)
def test_an_absent_required_field_of_a_container_is_refused_by_name(
    root: Callable[[Builder], int], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        read_payload(by_hand(root))


class TestSlots:
    """Tables that hold one of a literal and slots."""

    def test_the_kind_chooses_among_the_slots_given(self) -> None:
        for kind, expected in ((0, 0), (1, Vid(5)), (2, Tid(6))):
            payload = graph_by_hand(lambda builder, kind=kind: take_node(builder, 8, kind, vid=5, tid=6))
            assert read_payload(payload).instruction_chains[0].instructions[0].index == expected

    @pytest.mark.parametrize("kind", [1, 2, 3, 255])
    def test_a_kind_that_is_unknown_or_whose_slot_is_absent_is_refused(self, kind: int) -> None:
        payload = graph_by_hand(lambda builder: take_node(builder, 8, kind))
        with pytest.raises(ProgramError, match="IntOrVidOrTid names no slot"):
            read_payload(payload)


def test_a_text_that_is_not_utf8_is_refused() -> None:
    payload = write_payload(Graph(version="version"))
    with pytest.raises(ProgramError, match=r"damaged: .*utf-8"):
        read_payload(payload.replace(b"version", b"vers\xffon"))


def vector_places() -> Iterator[tuple[str, bytes, int]]:
    """Yield (name, payload, place of a vector's or text's length) for vectors of each sort."""
    length = 3
    sample = {
        "tables": Graph(output_map=[SlotVariant(1)] * length),
        "tables that may be absent": Graph(tensor_meta=[None] * length),
        "scalars": Graph(
            instruction_chains=[InstructionChain([make_node("SumNode", x=Tid(9), out=Tid(9), axes=[9] * length)])]
        ),
        "bytes": Graph(tensor_meta=[TensorMeta([], dim_order=[9] * length)]),
        "slots": Graph(
            instruction_chains=[InstructionChain([make_node("StackNode", tensors=[Tid(9)] * length, out=Tid(9))])]
        ),
        "text": Graph(version="x" * length),
    }
    for name, graph in sample.items():
        payload = write_payload(graph)
        places = [
            place
            for place in range(HEADER_BYTES, len(payload) - 4, 4)
            if payload[place : place + 4] == struct.pack("<I", length)
        ]
        assert len(places) == 1, name
        yield name, payload, places[0]


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, 2**20])
@pytest.mark.parametrize(("payload", "place"), [pytest.param(*rest, id=name) for name, *rest in vector_places()])
def test_a_vector_longer_than_the_payload_is_refused_before_it_is_read(payload: bytes, place: int, length: int) -> None:
    damaged = payload[:place] + struct.pack("<I", length) + payload[place + 4 :]
    with call_budget(2_000), pytest.raises(ProgramError, match=r"tables overlap|claims"):
        read_payload(damaged)


class TestOverlap:
    """Payloads that unfold to far more than their size."""

    @staticmethod
    def refused(payload: bytes) -> None:
        assert len(payload) < 40_000
        with (
            call_budget(600 * (len(payload) + 1200)),
            pytest.raises(ProgramError, match=re.escape("its tables overlap")),
        ):
            read_payload(payload)

    def test_chains_that_share_one_long_list_of_instructions_are_refused(self) -> None:
        def build(builder: Builder) -> int:
            instruction = tagged(builder, 1, table(builder))
            chain = table(builder, {0: vector(builder, [instruction] * 3000)})
            return table(builder, {CHAINS: vector(builder, [chain] * 3000)})

        self.refused(by_hand(build))

    def test_tensors_that_share_one_long_shape_are_refused(self) -> None:
        def build(builder: Builder) -> int:
            meta = table(builder, {0: vector(builder, [table(builder)] * 3000)})
            return table(builder, {CHAINS: vector(builder, []), METAS: vector(builder, [meta] * 3000)})

        self.refused(by_hand(build))

    def test_tensors_that_share_one_long_dim_order_are_refused(self) -> None:
        def build(builder: Builder) -> int:
            builder.StartVector(1, 20_000, 1)
            for _ in range(20_000):
                builder.PrependByte(0)
            order = int(builder.EndVector())
            meta = table(builder, {0: vector(builder, []), 2: order})
            return table(builder, {CHAINS: vector(builder, []), METAS: vector(builder, [meta] * 3000)})

        self.refused(by_hand(build))

    def test_instructions_that_share_one_node_with_long_lists_are_refused(self) -> None:
        row = FIELDS["TileNode"][2]
        assert (row.name, row.type) == ("reps", "IntOrVid")

        def instruction(builder: Builder) -> int:
            reps = vector(builder, [table(builder)] * 2000)
            builder.StartObject(3)
            for number in (0, 1):
                builder.PrependUint32(0)
                builder.Slot(number)
            builder.PrependUOffsetTRelativeSlot(row.number, reps, 0)
            return tagged(builder, NODE_KINDS.index("TileNode") + 1, int(builder.EndObject()))

        def build(builder: Builder) -> int:
            chain = table(builder, {0: vector(builder, [instruction(builder)] * 2000)})
            return table(builder, {CHAINS: vector(builder, [chain])})

        self.refused(by_hand(build))

    def test_a_long_text_shared_by_many_names_is_not_copied_per_name(self) -> None:
        def build(builder: Builder) -> int:
            text = builder.CreateString("x" * 20_000)
            slot = table(builder)
            named = table(builder, {0: text, 1: slot})
            names = vector(builder, [named] * 3000)
            return table(builder, {CHAINS: vector(builder, []), number_of("MLXGraph", "named_slots"): names})

        payload = by_hand(build)
        try:
            graph = read_payload(payload)
        except ProgramError:
            return
        distinct = {id(named.name): len(named.name) for named in graph.named_slots}
        assert sum(distinct.values()) <= 4 * len(payload)

    def test_a_large_good_graph_is_not_taken_for_one(self) -> None:
        """Small tables in numbers: what they cost has to stay below the bytes they take."""
        nodes = [make_node("NoopNode"), make_node("TileNode", x=Tid(0), out=Tid(0), reps=[0] * 500)]
        graph = Graph(
            instruction_chains=[InstructionChain(nodes * 20), *[InstructionChain([])] * 500],
            input_map=[SlotVariant(0)] * 2000,
            tensor_meta=[TensorMeta([ShapeDim()] * 8, 0, [0] * 8)] * 500 + [None] * 500,
            named_slots=[NamedSlot("", SlotVariant(0))] * 500,
        )
        assert read_payload(write_payload(graph)) == graph
