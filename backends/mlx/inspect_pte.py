"""Say what is in a ``.pte``: its methods, their MLX delegates' instructions and constants, and the KV caches they need.

``python -m executorch_mlx.backends.mlx.inspect_pte model.pte``
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary

from .identity import BACKEND_IDS
from .program import Graph, Node, ProgramError, SlotType, TensorMeta, Tid, Vid, read_payload, verify_graph
from .program.dtypes import SCALAR_TYPE_NAMES
from .program.types import WIDTHS


def inspect(path: Path) -> dict[str, Any]:
    """Return what a program holds, in plain types.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no ExecuTorch program.
        ProgramError: a delegate's payload is damaged.
    """
    program = _read(path)
    plans = program.program.execution_plan
    entries, data = (
        ({}, []) if program.named_data is None else (program.named_data.pte_data, program.named_data.buffers)
    )
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "constants": {plan.name: _numbers(plan) for plan in plans if _is_constant(plan)},
        "named_data": {"entries": len(entries), "bytes": sum(map(len, data))},
        "methods": {plan.name: _method(program, plan) for plan in plans if not _is_constant(plan)},
    }


def _read(path: Path) -> PTEFile:
    content = path.read_bytes()
    try:
        return deserialize_pte_binary(content)
    except Exception as error:  # what ExecuTorch's reader raises for other files is an accident of its code
        raise ValueError(f"{path}: no ExecuTorch program: {type(error).__name__}: {error}") from error


def _is_constant(plan: Any) -> bool:
    """Whether a method computes nothing and gives integers."""
    values = [plan.values[index].val for index in plan.outputs]
    return not plan.chains[0].instructions and all(hasattr(value, "int_val") for value in values)


def _numbers(plan: Any) -> Any:
    """Return what a constant method gives: a number, or a list of them."""
    values = [plan.values[index].val.int_val for index in plan.outputs]
    return values[0] if len(values) == 1 else values


def _method(program: PTEFile, plan: Any) -> dict[str, Any]:
    delegates = []
    for delegate in plan.delegates:
        described: dict[str, Any] = {"id": delegate.id}
        if delegate.id in BACKEND_IDS:
            described |= describe(_graph(program, delegate))
        delegates.append(described)
    return {"operators": [f"{row.name}.{row.overload}".rstrip(".") for row in plan.operators], "delegates": delegates}


def _graph(program: PTEFile, delegate: Any) -> Graph:
    return read_payload(bytes(program.program.backend_delegate_data[delegate.processed.index].data))


def graphs(path: Path) -> Iterator[tuple[str, int, Graph]]:
    """Yield (method, number, graph) for each MLX delegate of a program; raises as ``inspect`` does."""
    program = _read(path)
    for plan in program.program.execution_plan:
        for number, delegate in enumerate(plan.delegates):
            if delegate.id in BACKEND_IDS:
                yield plan.name, number, _graph(program, delegate)


def describe(graph: Graph) -> dict[str, Any]:
    """Return a delegate's slots and instructions, in plain types."""
    names = {named.slot.idx: named.name for named in graph.named_slots if named.slot.slot_type == SlotType.TensorSlot}
    constants = [
        {"slot": f"t{index}", "name": names.get(index), "type": _type(meta), "bytes": _num_bytes(meta)}
        for index, meta in enumerate(graph.tensor_meta[: graph.num_constant_tensors])
    ]
    attentions = [node for chain in graph.instruction_chains for node in chain.instructions if node.kind == _ATTENTION]
    results, refusal = _results(graph)
    chains = [
        [{"kind": node.kind, **_fields(node), "gives": results.get(id(node), [])} for node in chain.instructions]
        for chain in graph.instruction_chains
    ]
    return {
        "format": graph.version,
        "refusal": refusal,
        "inputs": [_slot(graph, entry) for entry in graph.input_map],
        "outputs": [_slot(graph, entry) for entry in graph.output_map],
        "mutable_buffers": [_slot(graph, entry) for entry in graph.mutable_buffer_map],
        "constants": constants,
        "constant_bytes": sum(row["bytes"] for row in constants),
        "temporaries": graph.num_temp_tensors,
        "values": graph.num_values,
        "caches": sorted({node.layer_id for node in attentions}),
        "main_chain": graph.main_chain_idx,
        "init_chain": graph.init_chain_idx,
        "chains": chains,
    }


_ATTENTION = "UpdateAndAttendNode"


def _results(graph: Graph) -> tuple[dict[int, list[str]], str | None]:
    """Return what is known of each instruction's results, by its id, and why the graph cannot be run, if it cannot."""
    try:
        facts = verify_graph(graph)
    except ProgramError as error:
        return {}, str(error)
    return {key: [str(known) for known in results] for key, results in facts.results.items()}, None


def _slot(graph: Graph, entry: Any) -> dict[str, Any]:
    if entry.slot_type != SlotType.TensorSlot:
        return {"slot": f"v{entry.idx}", "type": SlotType(entry.slot_type).name.removesuffix("ValueSlot").lower()}
    meta = graph.tensor_meta[entry.idx] if entry.idx < len(graph.tensor_meta) else None
    return {"slot": f"t{entry.idx}", "type": _type(meta)}


def _type(meta: TensorMeta | None) -> str | None:
    """Return a tensor's dtype and shape; a dynamic dimension shows its bounds."""
    if meta is None:
        return None
    sizes = [
        str(dim.value) if dim.value >= 0 else f"{dim.min_value}..{dim.max_value if dim.max_value >= 0 else ''}"
        for dim in meta.shape
    ]
    return f"{SCALAR_TYPE_NAMES.get(meta.scalar_type, meta.scalar_type)}[{', '.join(sizes)}]"


def _num_bytes(meta: TensorMeta | None) -> int:
    if meta is None:
        return 0
    width = WIDTHS.get(SCALAR_TYPE_NAMES.get(meta.scalar_type, ""), 0)
    return math.prod(dim.value for dim in meta.shape) * width


def _fields(node: Node) -> dict[str, Any]:
    """Return a node's fields, slots by their names, those that are absent left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, (Tid, Vid)):
            return f"{'t' if isinstance(value, Tid) else 'v'}{value.idx}"
        return value

    return {name: plain(value) for name, value in vars(node).items() if name != "kind" and value is not None}


def dot(graph: Graph) -> str:
    """Return the main chain in Graphviz's language: an edge leads from what writes a slot to what reads it."""
    results, _ = _results(graph)
    lines = ["digraph delegate {", "  node [shape=box, fontname=sans-serif, fontsize=10];"]
    writers: dict[Tid | Vid, str] = {}

    def box(name: str, label: str, style: str = "") -> None:
        lines.append(f'  {name} [label="{label}"{style}];')

    def join(slots: set[Tid | Vid], target: str) -> None:
        lines.extend(
            f"  {source} -> {target};" for source in sorted({writers[slot] for slot in slots & writers.keys()})
        )

    for position, entry in enumerate(graph.input_map):
        box(f"input{position}", f"input {position}\\n{_slot(graph, entry)['type']}", ", style=rounded")
        writers[entry.slot] = f"input{position}"
    for number, node in enumerate(graph.instruction_chains[graph.main_chain_idx].instructions):
        box(f"n{number}", "\\n".join([node.kind.removesuffix("Node"), *results.get(id(node), [])]))
        join({slot for name, slot in node.slots() if not node.writes(name)}, f"n{number}")
        writers |= {slot: f"n{number}" for name, slot in node.slots() if node.writes(name)}
    for position, entry in enumerate(graph.output_map):
        box(f"output{position}", f"output {position}\\n{_slot(graph, entry)['type']}", ", style=rounded")
        join({entry.slot}, f"output{position}")
    return "\n".join([*lines, "}"]) + "\n"


# -- the command ------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m executorch_mlx.backends.mlx.inspect_pte",
        description="Say what is in a .pte: its methods, their MLX delegates' instructions and constants, and the KV"
        " caches they need.",
    )
    result.add_argument("program", type=Path, help="the .pte")
    result.add_argument(
        "--instructions", action="store_true", help="list each instruction, not only how many of a kind"
    )
    result.add_argument("--json", action="store_true", help="print one JSON object with everything")
    result.add_argument(
        "--dot",
        metavar="METHOD[:N]",
        help="print the N-th delegate (default: 0) of a method as a Graphviz graph: pipe it to `dot -Tsvg`",
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    if options.dot is not None:
        print(dot(_chosen(options.program, options.dot)), end="")
        return
    report = inspect(options.program)
    if options.json:
        print(json.dumps(report))
        return
    for line in _lines(report, is_long=options.instructions):
        print(line)


def _chosen(path: Path, which: str) -> Graph:
    method, _, number = which.partition(":")
    found = {(name, str(index)): graph for name, index, graph in graphs(path)}
    if (method, number or "0") not in found:
        known = ", ".join(f"{name}:{index}" for name, index in found) or "none"
        raise LookupError(f"no MLX delegate {which!r} in {path}; there are: {known}")
    return found[method, number or "0"]


def _lines(report: dict[str, Any], *, is_long: bool) -> Iterator[str]:
    named = report["named_data"]
    yield f"{report['path']}: {report['bytes']:,} bytes, {named['bytes']:,} of them in {named['entries']} constants"
    for name, value in report["constants"].items():
        yield f"  {name} = {value}"
    for name, method in report["methods"].items():
        outside = f"; outside of them: {', '.join(method['operators'])}" if method["operators"] else ""
        yield f"{name}: {len(method['delegates'])} delegate(s){outside}"
        for number, delegate in enumerate(method["delegates"]):
            yield f"  delegate {number}: {delegate['id']}"
            if "chains" in delegate:
                yield from _delegate_lines(delegate, is_long=is_long)


def _typed(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['slot']} {row['type']}" for row in rows)


def _delegate_lines(delegate: dict[str, Any], *, is_long: bool) -> Iterator[str]:
    if delegate["refusal"]:
        yield f"    cannot be run: {delegate['refusal']}"
    for title, key in (("inputs", "inputs"), ("outputs", "outputs"), ("mutable buffers", "mutable_buffers")):
        if delegate[key]:
            yield f"    {title}: {_typed(delegate[key])}"
    yield f"    constants: {len(delegate['constants'])}, {delegate['constant_bytes']:,} bytes"
    if delegate["caches"]:
        yield f"    KV caches: {len(delegate['caches'])}"
    for index, chain in enumerate(delegate["chains"]):
        role = {delegate["main_chain"]: "main", delegate["init_chain"]: "init"}.get(index, "other")
        yield f"    chain {index} ({role}): {len(chain)} instructions"
        if is_long:
            for step, row in enumerate(chain):
                fields = ", ".join(f"{name}={value}" for name, value in row.items() if name not in ("kind", "gives"))
                gives = f" -> {', '.join(row['gives'])}" if row["gives"] else ""
                yield f"      {step:4} {row['kind']} {fields}{gives}"
        else:
            counts = Counter(row["kind"] for row in chain)
            yield "      " + ", ".join(f"{kind} {count}" for kind, count in counts.most_common())


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
