"""Configurations of caches, drawn by hypothesis, and how long a fault is searched for."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig

# A search ends with the first example that shows the fault. How many that takes changes with the modules that are
# loaded: hypothesis also draws numbers that stand in them.
MUTANT_SEARCH = settings(
    max_examples=5000,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

DTYPES = ("float32", "float16", "bfloat16")

layer_configs = st.builds(
    LayerConfig,
    n_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([4, 8]),
    v_head_dim=st.sampled_from([None, 3, 16]),
    window=st.none() | st.integers(1, 8),
)


def cache_configs(most: int, max_seqs: st.SearchStrategy[int | None]) -> st.SearchStrategy[CacheConfig]:
    """Return configurations of up to three layers, of at most so many tokens."""
    return st.builds(
        CacheConfig,
        capacity=st.integers(1, most),
        layers=st.lists(layer_configs, min_size=1, max_size=3),
        kv_dtype=st.sampled_from(DTYPES),
        initial_capacity=st.integers(0, most + 8),
        max_write=st.none() | st.integers(1, 8),
        max_seqs=max_seqs,
    )
