"""Many prompts at once: continuous batching over any batched KV cache.

The package needs numpy and the cache core only. What computes is a ``Model``: an exported program
(``executorch_mlx.examples.llm.generation.LanguageModel``) or anything else with its methods.
"""

from .aio import AsyncEngine
from .engine import Engine, Model, Update
from .request import Completion, Request
from .sampling import GREEDY, Sampler, Sampling
from .statistics import Statistics, timings
from .text import Detokenizer

__all__ = [
    "GREEDY",
    "AsyncEngine",
    "Completion",
    "Detokenizer",
    "Engine",
    "Model",
    "Request",
    "Sampler",
    "Sampling",
    "Statistics",
    "Update",
    "timings",
]
