"""The MLX delegate: ``MLXPartitioner`` exports for it, ``load_program`` runs it.

Names are imported when first used, so that running a program never imports the exporter.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .identity import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID

if TYPE_CHECKING:
    from .partitioner import MLXPartitioner
    from .runtime.backend import BackendInfo, backend_info
    from .runtime.loader import CPU_WEIGHTS, Method, Program, load_program

__all__ = [
    "CPU_WEIGHTS",
    "PLUGIN_BACKEND_ID",
    "UPSTREAM_BACKEND_ID",
    "BackendInfo",
    "MLXPartitioner",
    "Method",
    "Program",
    "backend_info",
    "load_program",
]

_HOMES = {
    "CPU_WEIGHTS": ".runtime.loader",
    "BackendInfo": ".runtime.backend",
    "MLXPartitioner": ".partitioner",
    "Method": ".runtime.loader",
    "Program": ".runtime.loader",
    "backend_info": ".runtime.backend",
    "load_program": ".runtime.loader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
