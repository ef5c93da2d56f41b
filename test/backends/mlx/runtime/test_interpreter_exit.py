"""Processes that exit while programs are loaded, sessions open or threads running: quietly, with their own status."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from oracles.small_programs import run_process, tiny_lm

SETUP = """
import threading, time
import torch
from executorch.runtime import Runtime
from executorch_mlx.backends.mlx import load_program
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build

layer = LayerConfig(n_kv_heads=2, head_dim=8)
session = CacheSession(build("MLXBackend", "sequence", CacheConfig(24, [layer, layer], "float32")))
inputs = [torch.zeros(1, 4, dtype=torch.long), torch.arange(4)]
running = threading.Event()
results = []

# Results are kept: a thread that drops torch tensors while the interpreter exits aborts the process, MLX or not.
def loop(method):
    with session:
        while True:
            results.append(method.execute(inputs))
            session.control.clear()
            running.set()

def reload():
    while True:
        program = load_program(sys.argv[1])
        program.load_method("forward")
        running.set()

def in_background(*work):
    threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    running.wait(60)
    time.sleep(0.05)

program = load_program(sys.argv[1])
method = program.load_method("forward")
"""

# Name -> (script, exit status).
SCENARIOS = {
    "programs loaded by both runtimes": (
        "stock = Runtime.get().load_program(sys.argv[1]); other = stock.load_method('forward')",
        0,
    ),
    "an open step of an open session": (
        "session.__enter__(); step = session.control.step(); step.__enter__(); out = method.execute(inputs)",
        0,
    ),
    "sys.exit in a session": ("with session:\n    out = method.execute(inputs)\n    sys.exit(3)", 3),
    "an uncaught error in a session": ("with session:\n    method.execute([])", 1),
    "a daemon thread that executes under the stock runtime": (
        "stock = Runtime.get().load_program(sys.argv[1]); in_background(loop, stock.load_method('forward'))",
        0,
    ),
    "a daemon thread that loads programs": ("in_background(reload)", 0),
    **{f"a daemon thread that executes, run {run}": ("in_background(loop, method)", 0) for run in range(1, 6)},
}


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit status, standard output and standard error of each scenario; two run at a time."""
    path = tmp_path_factory.mktemp("exit") / "tiny.pte"
    path.write_bytes(tiny_lm())
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(
            lambda script: run_process(f"{SETUP}\n{script}\nprint('done')\n", path),
            [script for script, _ in SCENARIOS.values()],
        )
        return dict(zip(SCENARIOS, outcomes, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_exit_with(scenario: str, exits: dict[str, tuple[int, str, str]]) -> None:
    status, output, errors = exits[scenario]
    expected = SCENARIOS[scenario][1]
    assert status == expected, errors
    assert output == ("" if expected else "done\n")
    for trouble in ("Fatal Python error", "terminate called", "Exception ignored", "Segmentation fault"):
        assert trouble not in errors
    assert ("Traceback" in errors) == (scenario == "an uncaught error in a session")
