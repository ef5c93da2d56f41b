"""From an edge graph to the wire format: a row per operator, and the builder that they write to."""

from .builder import GraphBuilder
from .rows import ROWS, Row, refusal

__all__ = ["ROWS", "GraphBuilder", "Row", "refusal"]
