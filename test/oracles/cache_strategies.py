"""Configurations of caches, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig

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
