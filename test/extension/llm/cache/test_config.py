"""What a configuration accepts, and how it refuses the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, layers_from_constants

LAYER = LayerConfig(n_kv_heads=2, head_dim=8)
NOT_A_COUNT = [0, -1, 1.0, "1", True]


def cache_config(**fields: Any) -> CacheConfig:
    return CacheConfig(**{"capacity": 16, "layers": [LAYER], "kv_dtype": "float32", **fields})


@pytest.mark.parametrize("field", ["n_kv_heads", "head_dim", "v_head_dim", "window"])
@pytest.mark.parametrize("value", NOT_A_COUNT)
def test_layer_config_with_an_invalid_field_raises_naming_it(field: str, value: Any) -> None:
    fields = {"n_kv_heads": 2, "head_dim": 8, field: value}
    with pytest.raises(ValueError, match=rf"^{field}: .*1.*{value!r}"):
        LayerConfig(**fields)


@pytest.mark.parametrize("field", ["n_kv_heads", "head_dim"])
def test_layer_config_without_a_size_raises_naming_it(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .*None"):
        LayerConfig(**{"n_kv_heads": 2, "head_dim": 8, field: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in ("capacity", "max_write", "max_seqs") for value in NOT_A_COUNT],
        ("capacity", None),
        *[("initial_capacity", value) for value in (-1, 1.0, "1", True, None)],
        *[("kv_dtype", value) for value in ("float64", "int8", "", "Float32", None, 32, ["float32"])],
        *[("layers", value) for value in ((), [], [None], [LAYER, "flat"], "flat", [{"n_kv_heads": 2}])],
    ],
)
def test_cache_config_with_an_invalid_field_raises_naming_it(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected .*got "):
        cache_config(**{field: value})


@pytest.mark.parametrize("value", [None, 4, LAYER])
def test_cache_config_with_layers_that_are_no_sequence_raises_naming_the_field(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^layers: expected .*got "):
        cache_config(layers=value)


@pytest.mark.parametrize("initial_capacity", [0, 1, 16, 17, 4096])
def test_cache_config_with_any_initial_capacity_is_accepted(initial_capacity: int) -> None:
    assert cache_config(initial_capacity=initial_capacity).initial_capacity == initial_capacity


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_cache_config_with_a_float_dtype_is_accepted(kv_dtype: str) -> None:
    assert cache_config(kv_dtype=kv_dtype).kv_dtype == kv_dtype


def test_cache_config_without_options_has_the_documented_defaults() -> None:
    config = cache_config()
    assert (config.initial_capacity, config.max_write, config.max_seqs) == (512, None, None)


def test_layer_config_without_options_keeps_all_history_and_equal_dims() -> None:
    assert (LAYER.v_head_dim, LAYER.window, LAYER.value_dim) == (None, None, 8)
    assert LayerConfig(n_kv_heads=2, head_dim=8, v_head_dim=4).value_dim == 4


@pytest.mark.parametrize(("config", "field"), [(LAYER, "window"), (cache_config(), "capacity")])
def test_config_when_assigned_to_raises(config: Any, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(config, field, 3)


def test_cache_config_from_a_list_does_not_follow_its_changes() -> None:
    layers = [LAYER]
    config = cache_config(layers=layers)
    layers.append(LAYER)
    assert len(config.layers) == 1
    assert hash(config) == hash(cache_config())


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        ({"get_kv_heads": 2, "get_head_dims": 8, "get_windows": 0}, [LayerConfig(2, 8)]),
        (
            {"get_kv_heads": [2, 1], "get_head_dims": [8, 4], "get_windows": [0, 6], "get_v_head_dims": [8, 3]},
            [LayerConfig(2, 8, 8), LayerConfig(1, 4, 3, 6)],
        ),
    ],
)
def test_layers_from_constants_are_what_the_program_says(constants: dict, expected: list[LayerConfig]) -> None:
    assert layers_from_constants(constants) == expected


@pytest.mark.parametrize(
    ("constants", "match"),
    [
        ({"get_kv_heads": 2}, "lacks get_head_dims, get_windows"),
        ({"get_kv_heads": [2, 2], "get_head_dims": [8], "get_windows": [0, 0]}, r"differ in length: \[2, 1, 2\]"),
    ],
)
def test_layers_from_constants_that_do_not_fit_are_an_error(constants: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layers_from_constants(constants)
