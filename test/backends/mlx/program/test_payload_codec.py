"""What is written is what flatc reads, what flatc writes is what is read, and both agree with themselves."""

from __future__ import annotations

import copy
import importlib
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flatc_oracle import (
    HEADER_BYTES,
    as_json,
    generate_bindings,
    object_as_json,
    to_flatbuffer,
    to_json,
    without_nulls,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import NODES, VARIANTS, any_graphs, filled_node, graph_of_every_kind

from executorch_mlx.backends.mlx.program import (
    NODE_KINDS,
    Graph,
    InstructionChain,
    Node,
    ProgramError,
    TensorMeta,
    Tid,
    Vid,
    make_node,
    read_payload,
    write_payload,
)
from executorch_mlx.backends.mlx.program.schema import FIELDS

HEADER = struct.pack("<4x4sQQ", b"MLX0", 0, 0)


def graph_of(*nodes: Node) -> Graph:
    return Graph(instruction_chains=[InstructionChain(list(nodes))])


def round_trip(node: Node) -> Node:
    (chain,) = read_payload(write_payload(graph_of(node))).instruction_chains
    (read,) = chain.instructions
    return read


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], Any]]:
    """flatc's generated object API on the FlatBuffer of a payload."""
    folder = tmp_path_factory.mktemp("bindings")
    generate_bindings(folder)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("mlx_delegate")}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    root = importlib.import_module("mlx_delegate.MLXGraph").MLXGraphT
    yield lambda payload: root.InitFromPackedBuf(payload[HEADER_BYTES:])
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("mlx_delegate")]:
        del sys.modules[name]
    sys.modules.update(held)


@pytest.fixture(scope="module", params=VARIANTS)
def written(request: pytest.FixtureRequest) -> Graph:
    """A graph of every node kind."""
    return graph_of_every_kind(request.param)


@pytest.fixture(scope="module")
def printed(written: Graph, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same graph, written by us and printed as JSON by flatc."""
    return to_json(write_payload(written), tmp_path_factory.mktemp("json"))


class TestWhatIsWritten:
    @pytest.mark.parametrize("kind", NODE_KINDS)
    def test_flatc_prints_every_node_kind_as_written(self, written: Graph, printed: dict[str, Any], kind: str) -> None:
        index = NODE_KINDS.index(kind)
        node = written.instruction_chains[0].instructions[index]
        instruction = printed["instruction_chains"][0]["instructions"][index]
        assert without_nulls(instruction) == as_json("Instruction", node)

    def test_flatc_prints_the_whole_graph_as_written(self, written: Graph, printed: dict[str, Any]) -> None:
        assert without_nulls(printed) == as_json("MLXGraph", written)

    def test_the_generated_object_api_unpacks_every_node_kind_as_written(
        self, written: Graph, unpack: Callable[[bytes], Any]
    ) -> None:
        unpacked = unpack(write_payload(written))
        expected = as_json("MLXGraph", written)
        actual = object_as_json("MLXGraph", unpacked)
        for left, right in zip(
            actual["instruction_chains"][0]["instructions"],
            expected["instruction_chains"][0]["instructions"],
            strict=True,
        ):
            assert left == right
        assert actual == expected

    @given(graph=any_graphs(with_absent_meta=False))
    def test_the_generated_object_api_unpacks_any_graph_as_written(
        self, unpack: Callable[[bytes], Any], graph: Graph
    ) -> None:
        assert object_as_json("MLXGraph", unpack(write_payload(graph))) == as_json("MLXGraph", graph)

    def test_an_absent_tensor_meta_is_an_entry_of_offset_zero(self, unpack: Callable[[bytes], Any]) -> None:
        payload = write_payload(Graph(tensor_meta=[None, TensorMeta([], 6), None]))
        table = importlib.import_module("mlx_delegate.MLXGraph").MLXGraph.GetRootAs(payload[HEADER_BYTES:])
        assert table.TensorMetaLength() == 3
        assert table.TensorMeta(1).ScalarType() == 6
        at = table._tab.Vector(table._tab.Offset(4 + 2 * FIELDS["MLXGraph"][-1].number))
        entries = struct.unpack_from("<3I", payload, HEADER_BYTES + at)
        assert [entry == 0 for entry in entries] == [True, False, True]

    def test_the_header_is_magic_and_an_aligned_empty_data_segment_at_the_end(self) -> None:
        for size in range(1, 20):
            payload = write_payload(Graph(version="v" * size))
            reserved, magic, offset, data_bytes = struct.unpack_from("<4s4sQQ", payload)
            assert (reserved, magic, data_bytes) == (bytes(4), b"MLX0", 0)
            assert offset == len(payload)
            assert offset % 16 == 0

    def test_writing_the_same_graph_twice_gives_the_same_bytes(self, written: Graph) -> None:
        assert write_payload(written) == write_payload(written)


class TestWhatFlatcWrites:
    def test_every_node_kind_is_read_as_flatc_wrote_it(self, written: Graph, tmp_path: Path) -> None:
        read = read_payload(HEADER + to_flatbuffer(as_json("MLXGraph", written), tmp_path))
        for node, expected in zip(
            read.instruction_chains[0].instructions, written.instruction_chains[0].instructions, strict=True
        ):
            assert node == expected
        assert read == written

    def test_fields_left_out_of_the_json_are_read_as_their_defaults(self, tmp_path: Path) -> None:
        bare = graph_of(*[filled_node(kind, "required fields only") for kind in NODE_KINDS])
        form = as_json("MLXGraph", bare)
        for instruction in form["instruction_chains"][0]["instructions"]:
            required = {row.name for row in FIELDS[instruction["op_type"]] if row.required}
            instruction["op"] = {name: item for name, item in instruction["op"].items() if name in required}
        form = {"instruction_chains": form["instruction_chains"]}
        assert read_payload(HEADER + to_flatbuffer(form, tmp_path)) == bare

    @pytest.mark.parametrize("value", [0.1, 1e-6, 1e-45, 3.4028234663852886e38, -500000.25])
    def test_floats_are_read_to_the_last_bit(self, value: float, tmp_path: Path) -> None:
        node = make_node("RMSNormNode", x=Tid(0), out=Tid(1), eps=value)
        full = make_node("FullLikeNode", x=Tid(0), out=Tid(1), v=value)
        payload = HEADER + to_flatbuffer(as_json("MLXGraph", graph_of(node, full)), tmp_path)
        single, double = read_payload(payload).instruction_chains[0].instructions
        assert single.eps == struct.unpack("<f", struct.pack("<f", value))[0]
        assert double.v == value

    def test_the_magic_is_needed_and_the_data_segment_may_be_absent_or_present(self, tmp_path: Path) -> None:
        flatbuffer = to_flatbuffer({"instruction_chains": [], "version": "1"}, tmp_path)
        end = HEADER_BYTES + len(flatbuffer)
        with_data = struct.pack("<4x4sQQ", b"MLX0", end, 5) + flatbuffer + b"spare"
        assert read_payload(HEADER + flatbuffer) == read_payload(with_data) == Graph("1")


class TestRoundTrip:
    @given(graph=any_graphs())
    def test_a_graph_is_read_as_it_was_written(self, graph: Graph) -> None:
        assert read_payload(write_payload(graph)) == graph

    @pytest.mark.parametrize("kind", NODE_KINDS)
    @settings(max_examples=max(5, settings.default.max_examples // 25))
    @given(data=st.data())
    def test_a_node_of_every_kind_is_read_as_it_was_written(self, kind: str, data: st.DataObject) -> None:
        node = data.draw(NODES[kind])
        assert round_trip(node) == node

    def test_every_node_kind_in_one_graph_is_read_as_it_was_written(self, written: Graph) -> None:
        assert read_payload(write_payload(written)) == written

    @pytest.mark.parametrize("number_of_nodes", [1, 300])
    def test_a_long_text_that_many_nodes_share_is_read_as_it_was_written(self, number_of_nodes: int) -> None:
        kernel = make_node(
            "MetalKernelNode", name="k", source="x" * 20_000, inputs=[], outputs=[], grid=[], threadgroup=[]
        )
        graph = graph_of(*[kernel] * number_of_nodes)
        assert read_payload(write_payload(graph)) == graph

    def test_floats_that_are_no_numbers_survive(self) -> None:
        read = round_trip(make_node("RMSNormNode", x=Tid(0), out=Tid(1), eps=float("nan")))
        assert read.eps != read.eps

    def test_the_empty_graph_is_read_as_it_was_written(self) -> None:
        assert read_payload(write_payload(Graph())) == Graph()

    def test_a_zero_that_may_be_absent_is_told_from_an_absent_one(self) -> None:
        slots = {name: Tid(0) for name in ("q", "k", "v", "position", "out")}
        assert round_trip(make_node("UpdateAndAttendNode", **slots)).layer_id is None
        assert round_trip(make_node("UpdateAndAttendNode", **slots, layer_id=0)).layer_id == 0

    def test_an_empty_list_that_may_be_absent_is_told_from_an_absent_one(self) -> None:
        assert round_trip(make_node("SumNode", x=Tid(0), out=Tid(1))).axes is None
        assert round_trip(make_node("SumNode", x=Tid(0), out=Tid(1), axes=[])).axes == []


# A slot of a sort that the field cannot hold must not turn into another program without a word.
WRONG_SLOTS = [
    pytest.param("ARangeNode", "start", Tid(3), id="tensor where an int or value belongs"),
    pytest.param("FullLikeNode", "v", Tid(3), id="tensor where a float or value belongs"),
    pytest.param("RopeNode", "offset", 7, id="literal where a slot belongs"),
    pytest.param("AddNode", "a", Vid(3), id="value where a tensor belongs"),
    pytest.param("ItemIntNode", "out", Tid(3), id="tensor where a value belongs"),
    pytest.param("ConcatenateNode", "tensors", [Vid(3)], id="value in a list of tensors"),
    pytest.param("ReshapeNode", "shape", [Tid(3)], id="tensor in a list of ints or values"),
]


class TestMisuse:
    @pytest.mark.parametrize(("kind", "field", "value"), WRONG_SLOTS)
    def test_writing_a_slot_of_the_wrong_sort_raises(self, kind: str, field: str, value: Any) -> None:
        node = filled_node(kind, "literals")
        setattr(node, field, value)
        with pytest.raises((TypeError, ProgramError), match=rf"\b{field}\b"):
            write_payload(graph_of(node))

    def test_writing_a_node_without_a_required_field_raises(self) -> None:
        node = filled_node("AddNode", "literals")
        node.b = None
        with pytest.raises((TypeError, ProgramError), match=r"\bb\b"):
            write_payload(graph_of(node))

    def test_make_node_names_the_missing_and_the_unknown_fields(self) -> None:
        with pytest.raises(TypeError, match=r"AddNode.*'c'.*'b', 'out'"):
            make_node("AddNode", a=Tid(0), c=Tid(1))

    def test_make_node_names_an_unknown_kind(self) -> None:
        with pytest.raises(TypeError, match="'AddedNode' is no op node"):
            make_node("AddedNode")

    def test_a_node_names_the_field_it_does_not_have(self) -> None:
        with pytest.raises(AttributeError, match="NoopNode has no field 'x'"):
            _ = make_node("NoopNode").x

    @pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, lambda node: pickle.loads(pickle.dumps(node))])
    def test_a_node_can_be_copied(self, copy_of: Callable[[Node], Node]) -> None:
        node = filled_node("AddNode", "literals")
        copied = copy_of(node)
        assert copied == node
        assert copied is not node


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_slots_of_a_node_are_all_the_slots_in_its_fields(kind: str) -> None:
    node = filled_node(kind, "slots")
    expected = []
    for row in FIELDS[kind]:
        value = getattr(node, row.name)
        for item in value if row.is_vector else [value]:
            if row.type in ("Tid", "Vid", "IntOrVid", "FloatOrVid", "VidOrTid", "IntOrVidOrTid"):
                expected.append((row.name, item))
    assert list(node.slots()) == expected
