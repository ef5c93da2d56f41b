"""The delegate's compiler: an edge subgraph becomes a payload and named data."""

from __future__ import annotations

from typing import Any, final

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from torch.export import ExportedProgram

from .graph import copy_program, remove_dead_code
from .identity import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID
from .lowering import ROWS, GraphBuilder, refusal
from .lowering.rows import name_of
from .outline import restored
from .passes import FUSIONS
from .program import write_payload
from .weights import Weights

# ExecuTorch aligns what it maps; MLX copies, so that no more is needed than a cache line.
_ALIGNMENT = 64


def compile_program(program: ExportedProgram, weights: Weights | None = None) -> PreprocessResult:
    """Fuse, lower, verify and encode one delegated subgraph.

    Args:
        program: the subgraph. It is changed.
        weights: of the other subgraphs that are lowered with it.

    Raises:
        ValueError: a call that has no lowering; the partitioner claims none.
    """
    weights = Weights() if weights is None else weights
    program = restored(program)
    remove_dead_code(program.graph_module)
    for fuse in FUSIONS:
        fuse(program)
    builder = GraphBuilder(program, weights.digest)
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
        store.add_named_data(key, weights.bytes_of(tensor), alignment=_ALIGNMENT)
    return PreprocessResult(processed_bytes=write_payload(graph), data_store_output=store.get_named_data_store_output())


class _Compiler:
    """What ExecuTorch calls of a backend, in place of the defaults of ``BackendDetails``."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Compile one subgraph."""
        return compile_program(edge_program)

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: Any
    ) -> dict[str, list[PreprocessResult]]:
        """Compile the subgraphs of all methods, which share weights."""
        weights = Weights()
        return {
            method: [compile_program(program, weights) for program in programs]
            for method, programs in edge_programs.items()
        }

    @classmethod
    def copy_exported_program_for_preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> ExportedProgram:
        """Return a program that may be changed; the default copies its weights too."""
        return copy_program(edge_program)


def _backend(backend_id: str) -> type[BackendDetails]:
    """ExecuTorch finds a backend by its class's name, which is also the id in the program."""
    members = {name: member for name, member in vars(_Compiler).items() if not name.startswith("__")}
    return final(type(backend_id, (BackendDetails,), {**members, "__doc__": __doc__}))


BACKENDS = {backend_id: _backend(backend_id) for backend_id in (UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)}
