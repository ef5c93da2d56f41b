"""What each instruction needs and gives: a table from node kinds to rules over types, in parts by subject."""

from collections.abc import Sequence

from ..types import Type
from . import attention, control, elementwise, indexing, products, reductions, shapes, values
from .base import Call, Rule

RULES: dict[str, Rule] = {
    kind: rule
    for part in (values, elementwise, reductions, shapes, indexing, products, attention, control)
    for kind, rule in part.RULES.items()
}


def results_of(call: Call) -> list[Type]:
    """Return what an instruction writes, in the order of its slots.

    Raises:
        ValueError: it cannot be run on what its operands are known to be.
    """
    results = RULES[call.node.kind](call)
    if results is None:
        return []
    return list(results) if isinstance(results, Sequence) else [results]


__all__ = ["RULES", "Call", "Rule", "results_of"]
