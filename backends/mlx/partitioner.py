"""``MLXPartitioner``: which parts of a program go to the MLX delegate."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.passes.operator_support import OperatorSupportBase

from .graph import module_of, plain_copy
from .identity import BACKEND_IDS, UPSTREAM_BACKEND_ID
from .lowering.rows import name_of, refusal
from .outline import Outlined, is_outlined, outline
from .passes import FUSIONS
from .preprocess import BACKENDS

logger = logging.getLogger("executorch_mlx")


@dataclass(frozen=True)
class NotDelegated:
    """A call that stays outside the delegate.

    Attributes:
        operator: its name, such as "aten.topk.default".
        reason: why.
        module: path of the module that it comes from, or "the model" where that is unknown.
        source: the line of the model it comes from, or "" where that is unknown.
    """

    operator: str
    reason: str
    module: str
    source: str


class MLXPartitioner(Partitioner):
    """Claims for the MLX delegate every call that has a lowering.

    Use with ``executorch.exir.to_edge_transform_and_lower``. What is left outside is logged as a warning, operator by
    operator, and kept in ``not_delegated``.
    """

    def __init__(self, *, backend_id: str = UPSTREAM_BACKEND_ID, outline: bool = True) -> None:
        """Make a partitioner.

        Args:
            backend_id: "MLXBackend", which ExecuTorch's own runtime for Apple silicon runs too, or this package's own
                id, ``PLUGIN_BACKEND_ID``.
            outline: let a program that is delegated whole cross ExecuTorch's passes as one call, which is several times
                faster. Say False with ``transform_passes`` of your own, which would not see its operators, and with
                another partitioner listed first, which would be left nothing. A graph put aside is kept, with its
                weights, for as long as the partitioner.

        Raises:
            ValueError: another id.
        """
        super().__init__()
        if backend_id not in BACKEND_IDS:
            raise ValueError(f"backend_id: expected one of {', '.join(BACKEND_IDS)}, got {backend_id!r}")
        self._spec = DelegationSpec(BACKENDS[backend_id].__name__, [])
        self.not_delegated: list[NotDelegated] = []
        self._outline = outline
        self._outlined: list[Outlined] = []

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Spare ExecuTorch re-tracing the program a dozen times: fuse, and outline what is delegated whole."""
        program = plain_copy(exported_program)
        for fuse in FUSIONS:
            fuse(program)
        if not self._outline or any(refusal(node) is not None for node in _calls(program)):
            return program
        whole = outline(program)
        if whole is None:
            return program
        self._outlined.append(whole[1])
        return whole[0]

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        """Return the operators to keep whole: those whose every call can be lowered as it is."""
        kept: dict[Any, bool] = {}
        for node in _calls(ep):
            if isinstance(node.target, torch._ops.OpOverload):
                kept[node.target] = kept.get(node.target, True) and refusal(node) is None
        return [target for target, is_lowered in kept.items() if is_lowered], None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what goes to the delegate."""
        support = _Support(exported_program)
        partitions = generate_partitions_from_list_of_nodes(exported_program.graph_module, op_support=support)
        tags = {}
        for partition in partitions:
            tag = f"mlx_{partition.id}"
            tags[tag] = self._spec
            for node in partition.nodes:
                node.meta["delegation_tag"] = tag
        if tags:
            _pull_in_sizes(exported_program)
            _constants_as_buffers(exported_program)
            tag_constant_data(exported_program)
            _keep_returned_constants(exported_program)
        self.not_delegated = [
            NotDelegated(name_of(node), reason, module_of(node), _source(node))
            for node, reason in support.refusals.items()
        ]
        for call in self.not_delegated:
            logger.warning(
                "not delegated to MLX: %s in %s: %s %s", call.operator, call.module, call.reason, call.source
            )
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


class _Support(OperatorSupportBase):
    """Answers from the lowering table, once per call."""

    def __init__(self, program: ExportedProgram) -> None:
        reasons = {node: None if is_outlined(node) else refusal(node) for node in _calls(program)}
        # A result that several calls pick from is lowered with them or not at all.
        for node, reason in reasons.items():
            if node.target is operator.getitem and reason is None:
                reasons[node] = reasons.get(node.args[0])
        self.refusals = {node: reason for node, reason in reasons.items() if reason is not None}

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node.op == "call_function" and node not in self.refusals


def _calls(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def _pull_in_sizes(program: ExportedProgram) -> None:
    """Compute dynamic sizes inside the delegate that uses them; across its boundary they would be fixed."""
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and name_of(node) == "aten.sym_size.int" and "delegation_tag" not in node.meta:
            tags = {user.meta.get("delegation_tag") for user in node.users}
            if len(tags) == 1 and None not in tags:
                node.meta["delegation_tag"] = tags.pop()


def _constants_as_buffers(program: ExportedProgram) -> None:
    """Make buffers of lifted constants.

    What several delegates use ExecuTorch gives each user a copy of, all under one name in the signature. torch runs a
    delegate that has two of a buffer or a parameter, but not of a constant.
    """
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def _keep_returned_constants(program: ExportedProgram) -> None:
    """Leave constants that the program returns outside the delegate, which takes a copy."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and any(user.op == "output" for user in node.users):
            node.meta.pop("delegation_tag", None)


def _source(node: Node) -> str:
    """Return the model's own line that a call comes from: the last frame of its stack trace."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    files = [line for line in lines if line.startswith("File ")]
    return f"({files[-1]})" if files else ""
