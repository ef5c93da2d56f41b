"""Where another runtime holds "MLXBackend" already, as Apple's does: who runs a program, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime

from executorch_mlx.backends.mlx import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID, backend_info, load_program
from oracles.small_programs import affine, export_function, outside_the_delegate, run_process, tiny_lm


def test_backend_info_without_another_runtime_names_both_ids() -> None:
    info = backend_info()
    assert info.backend_ids == (UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)
    assert info.device in ("cpu", "gpu")
    assert info.executorch_version.startswith("1.5.")
    assert info.mlx_version.startswith("0.32")


def test_registry_of_executorch_lists_both_ids() -> None:
    assert {UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID} <= set(Runtime.get().backend_registry.registered_backend_names)


@pytest.fixture(scope="module")
def beside_another(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process says in which a stand-in took "MLXBackend" before this package was imported."""

    def split(x: torch.Tensor) -> torch.Tensor:
        return outside_the_delegate(x * 2) + x

    folder = tmp_path_factory.mktemp("other_holder")
    for name, content in {
        "affine": affine(),
        "own": affine(PLUGIN_BACKEND_ID),
        "split": export_function(split, torch.zeros(2, 4), dynamic=True),
        "tiny": tiny_lm(),
    }.items():
        (folder / f"{name}.pte").write_bytes(content)
    script = """
        import ctypes, json, logging
        from pathlib import Path
        import numpy as np

        executorch = Path(importlib.util.find_spec("executorch").submodule_search_locations[0])
        name = "libexecutorch.dylib" if sys.platform == "darwin" else "libexecutorch.so"
        ctypes.CDLL(str(executorch / "lib" / name))
        from executorch_mlx.backends.mlx.runtime import _trampoline

        calls = []

        def other_init(payload, named_data):
            calls.append("init")
            return object()

        def other_execute(handle, arguments):
            calls.append("execute")
            shape = arguments.get(0).shape
            arguments.set(len(arguments) - 1, np.full(shape, 42, np.float32))
            return 0

        said = {"registered": _trampoline.register_backend("MLXBackend", other_init, other_execute)}
        said["registered again"] = _trampoline.register_backend("MLXBackend", other_init, other_execute)

        import torch
        from executorch.runtime import Runtime
        from executorch_mlx.backends.mlx import backend_info, load_program
        from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build

        folder = Path(sys.argv[1])
        x = torch.arange(8.0).reshape(2, 4)

        def run(program, *inputs):
            calls.clear()
            try:
                out = program.load_method("forward").execute(inputs)[0].tolist()
            except Exception as error:
                out = f"{type(error).__name__}: {error}"
            return {"out": out, "calls": list(calls)}

        said["ids"] = backend_info().backend_ids
        for name in ("affine", "own", "split"):
            path = folder / f"{name}.pte"
            said[f"{name} by path"] = run(load_program(path), x)
            said[f"{name} by str"] = run(load_program(str(path)), x)
            said[f"{name} by bytes"] = run(load_program(path.read_bytes()), x)
        said["own native"] = run(load_program(folder / "own.pte", native=True), x)
        said["affine native"] = run(load_program(folder / "affine.pte", native=True), x)
        content = (folder / "affine.pte").read_bytes()
        said["affine native by bytes"] = run(load_program(content, native=True), x)
        said["affine stock"] = run(Runtime.get().load_program(folder / "affine.pte"), x)
        said["bytes kept"] = (folder / "affine.pte").read_bytes().count(b"MLXBackend")
        layer = LayerConfig(n_kv_heads=2, head_dim=8)
        cache = build("MLXBackend", "sequence", CacheConfig(24, [layer, layer], "float32"))
        tiny = load_program(folder / "tiny.pte")
        with CacheSession(cache):
            said["tiny"] = run(tiny, torch.zeros(1, 3, dtype=torch.long), torch.arange(3))
        said["position"] = cache.position
        print(json.dumps(said))
    """
    status, output, errors = run_process(script, folder)
    assert status == 0, errors[-3000:]
    said: dict[str, Any] = json.loads(output)
    return said


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The same programs' results where nobody else holds the id."""
    x = torch.arange(8.0).reshape(2, 4)
    program = load_program(affine())
    return {
        "affine": program.load_method("forward").execute([x])[0].tolist(),
        "split": ((x * 2).max(-1, keepdim=True).values + x).tolist(),
    }


def test_register_backend_of_a_name_that_is_taken_returns_a_code(beside_another: dict[str, Any]) -> None:
    assert beside_another["registered"] == 0
    assert beside_another["registered again"] != 0


def test_backend_info_beside_another_runtime_names_the_plugins_id_only(
    beside_another: dict[str, Any],
) -> None:
    assert beside_another["ids"] == [PLUGIN_BACKEND_ID]


@pytest.mark.parametrize("source", ["path", "str", "bytes"])
@pytest.mark.parametrize("name", ["affine", "split"])
def test_load_program_beside_another_runtime_runs_the_plugin(
    name: str, source: str, beside_another: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert beside_another[f"{name} by {source}"] == {"out": expected[name], "calls": []}


def test_load_program_beside_another_runtime_leaves_the_file_as_it_is(beside_another: dict[str, Any]) -> None:
    assert beside_another["bytes kept"] == affine().count(b"MLXBackend")


@pytest.mark.parametrize("how", ["by path", "by bytes", "native"])
def test_program_for_the_plugins_id_runs_the_plugin_however_it_is_loaded(
    how: str, beside_another: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert beside_another[f"own {how}"] == {"out": expected["affine"], "calls": []}


@pytest.mark.parametrize("how", ["native", "native by bytes", "stock"])
def test_native_program_beside_another_runtime_reaches_the_other(how: str, beside_another: dict[str, Any]) -> None:
    assert beside_another[f"affine {how}"] == {"out": [[42.0] * 4] * 2, "calls": ["init", "execute"]}


def test_attention_beside_another_runtime_uses_the_sessions_cache(beside_another: dict[str, Any]) -> None:
    assert beside_another["tiny"]["calls"] == []
    assert beside_another["position"] == 3


def test_program_exported_to_a_file_is_not_changed_by_loading(tmp_path: Path) -> None:
    path = tmp_path / "affine.pte"
    path.write_bytes(affine())
    load_program(path).load_method("forward")
    assert path.read_bytes() == affine()


@pytest.mark.parametrize(("version", "works"), [("2.11.0+cu130", False), ("2.13.0", True), ("2.14.1+cpu", True)])
def test_torch_that_the_bindings_misread_is_refused(version: str, works: bool) -> None:
    from executorch_mlx.backends.mlx.runtime.loader import check_torch

    if works:
        check_torch(version)
    else:
        with pytest.raises(ImportError, match=r"torch 2.13 or newer, found 2.11"):
            check_torch(version)
