"""Graphs of one sample each, and what the verifier knows of their results."""

from __future__ import annotations

from collections.abc import Sequence

from executorch_mlx.backends.mlx.program import Graph, TensorMeta, Tid, Vid, make_node, verify_graph
from executorch_mlx.backends.mlx.program.schema import FIELDS
from executorch_mlx.backends.mlx.program.types import Type
from executorch_mlx.backends.mlx.program.verify import MAX_TENSOR_BYTES
from oracles.hand_built import assembled
from samples.nodes import Sample


def sample_graph(sample: Sample, meta: Sequence[TensorMeta | None] | None = None) -> Graph:
    """Return a sample's graph, not verified: tensor slots are its inputs, then what it writes; values likewise.

    Args:
        sample: the sample.
        meta: the descriptions of its inputs; by default there are none.
    """
    num_inputs, num_values = len(sample.inputs), len(sample.values)
    fields = {**dict(zip(sample.reads, map(Tid, range(num_inputs)), strict=False)), **sample.fields}
    results = list(sample.results)
    types = {row.name: row.type for row in FIELDS[sample.kind]}
    if sample.num_outs:
        results = fields["outs"] = [Tid(num_inputs + index) for index in range(sample.num_outs)]
    elif "out" in types:
        fields["out"] = Tid(num_inputs) if types["out"] == "Tid" else Vid(num_values)
        results = [fields["out"]]
    chains = [[make_node(sample.kind, **fields)], *sample.chains]
    inputs = [*map(Tid, range(num_inputs)), *map(Vid, range(num_values))]
    return assembled(chains, inputs, results, meta=meta)


def inferred(graph: Graph, max_bytes: float = MAX_TENSOR_BYTES) -> list[Type]:
    """Return what the verifier knows of each output of a graph at its end.

    Args:
        graph: the graph, to whose main chain copies of the outputs are added.
        max_bytes: how much one tensor may take.

    Raises:
        ProgramError: it refuses the graph.
    """
    # Copies of the outputs, made last: what is known of each of them is what is known of the output.
    tensor, value = Tid(graph.num_tensors), Vid(graph.num_values)
    graph.num_temp_tensors += 1
    graph.num_values += 1
    copies = [
        make_node("IdCopyNode", x=entry.slot, out=tensor)
        if isinstance(entry.slot, Tid)
        else make_node("AddIntNode", a=entry.slot, b=0, out=value)
        for entry in graph.output_map
    ]
    graph.instruction_chains[graph.main_chain_idx].instructions += copies
    facts = verify_graph(graph, max_bytes)
    return [facts.results[id(copy)][0] for copy in copies]
