"""ExecuTorch's MLX wire format: the one thing that export and runtime share.

``schema`` has a class per table of the format, ``codec`` turns graphs into payloads and back, ``verify`` refuses a
graph that cannot be run before anything else looks at it: ``flow`` runs it on ``types``, by the ``rules`` of each kind
of instruction.
"""

from .codec import read_payload, write_payload
from .errors import ProgramError
from .flow import Facts
from .schema import (
    NODE_KINDS,
    Graph,
    InstructionChain,
    NamedSlot,
    Node,
    ShapeDim,
    SlotType,
    SlotVariant,
    TensorMeta,
    Tid,
    Vid,
    make_node,
)
from .verify import verify_graph

__all__ = [
    "NODE_KINDS",
    "Facts",
    "Graph",
    "InstructionChain",
    "NamedSlot",
    "Node",
    "ProgramError",
    "ShapeDim",
    "SlotType",
    "SlotVariant",
    "TensorMeta",
    "Tid",
    "Vid",
    "make_node",
    "read_payload",
    "verify_graph",
    "write_payload",
]
