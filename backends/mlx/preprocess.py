"""The delegate's compiler: an edge subgraph becomes a payload and named data."""

from __future__ import annotations

from typing import final

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from torch.export import ExportedProgram

from .graph import remove_dead_code
from .identity import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID
from .lowering import ROWS, GraphBuilder, refusal
from .lowering.rows import name_of
from .passes import FUSIONS
from .program import write_payload

# ExecuTorch aligns what it maps; MLX copies, so that no more is needed than a cache line.
_ALIGNMENT = 64


def compile_program(program: ExportedProgram) -> PreprocessResult:
    """Fuse, lower, verify and encode one delegated subgraph.

    Raises:
        ValueError: a call that has no lowering; the partitioner claims none.
    """
    remove_dead_code(program.graph_module)
    for fuse in FUSIONS:
        fuse(program)
    builder = GraphBuilder(program)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        reason = refusal(node)
        if reason is not None:
            raise ValueError(f"{name_of(node)} cannot be lowered: {reason}")
        ROWS[name_of(node)].lower(builder, node)
    graph, constants = builder.finish()
    store = NamedDataStore()
    for key, tensor in constants.items():
        store.add_named_data(key, tensor, alignment=_ALIGNMENT)
    return PreprocessResult(processed_bytes=write_payload(graph), data_store_output=store.get_named_data_store_output())


def _backend(backend_id: str) -> type[BackendDetails]:
    """ExecuTorch finds a backend by its class's name, which is also the id in the program."""

    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return compile_program(edge_program)

    return final(type(backend_id, (BackendDetails,), {"preprocess": staticmethod(preprocess), "__doc__": __doc__}))


BACKENDS = {backend_id: _backend(backend_id) for backend_id in (UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)}
