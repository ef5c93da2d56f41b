"""What each instruction needs and gives: a table from node kinds to rules over types, in parts by subject."""

from . import attention, control, elementwise, indexing, products, reductions, shapes, values
from .base import Call, Rule

RULES: dict[str, Rule] = {
    kind: rule
    for part in (values, elementwise, reductions, shapes, indexing, products, attention, control)
    for kind, rule in part.RULES.items()
}

__all__ = ["RULES", "Call", "Rule"]
