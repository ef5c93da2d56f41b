"""From an edge graph to the wire format: a row per operator, and the builder that they write to."""

from .builder import GraphBuilder
from .rows import ROWS, refusal

__all__ = ["ROWS", "GraphBuilder", "refusal"]
