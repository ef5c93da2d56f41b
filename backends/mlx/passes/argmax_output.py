"""Replaces a program's scores by the index of the highest one.

Before::

    return logits                       [..., vocabulary]

After::

    return argmax(logits, -1)           [...], int64

A step that needs the likeliest tokens only then copies a few integers to the host, instead of a vocabulary per row.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ..graph import aten, copy_program


def argmax_output(program: ExportedProgram) -> ExportedProgram:
    """Return a program with the index of the highest score as its output; it shares the given one's tensors.

    Args:
        program: with one output. It is not changed.

    Raises:
        ValueError: the program has several outputs, or changes buffers.
    """
    kinds = [spec.kind.name for spec in program.graph_signature.output_specs]
    if kinds != [OutputKind.USER_OUTPUT.name]:
        raise ValueError(f"argmax_output: expected a program with one output, got {', '.join(kinds) or 'none'}")
    program = copy_program(program)
    graph = program.graph
    output = graph.output_node()
    (scores,) = output.args[0]
    with graph.inserting_before(output):
        index = graph.call_function(aten.argmax.default, (scores, -1))
    value = scores.meta["val"]
    with value.fake_mode:
        index.meta = {**scores.meta, "val": value.argmax(-1)}
    output.args = ((index,),)
    program.graph_signature.output_specs[0].arg.name = index.name
    program.graph_module.recompile()
    return program
