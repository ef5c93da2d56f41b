"""A short run of the programs' fuzzer, and what it takes for a finding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz.cases import cases, make_case
from fuzz.choosers import SeededChooser
from fuzz.programs import described, finding, main, save, shrink
from fuzz.runner import Answer, Case, Data, Runner
from hypothesis import given, settings

from executorch_mlx.backends.mlx.program import (
    NODE_KINDS,
    ShapeDim,
    TensorMeta,
    Tid,
    make_node,
    read_payload,
    write_payload,
)
from oracles.hand_built import hand_built


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as one:
        yield one


@settings(max_examples=2 * settings.default.max_examples)
@given(case=cases())
def test_program_is_refused_raises_or_runs_as_foreseen(runner: Runner, case: Case) -> None:
    answer = runner.run(case)
    found = finding(case, answer)
    assert found is None or found.is_weak, f"{found}\n{answer.message}\n{described(case)}"


# -- the fuzzer itself ----------------------------------------------------------

SHAPE = (2, 3)
FLOATS = Data(SHAPE, 6, bytes(24))


def case_of(*nodes: str, is_static: bool = True) -> Case:
    """Return a case that runs nodes of one operand, one after the other, on float32 [2, 3]."""
    chain = [make_node(kind, x=Tid(place), out=Tid(place + 1)) for place, kind in enumerate(nodes)]
    graph = hand_built([chain], [Tid(0)], [Tid(place + 1) for place in range(len(nodes))])
    graph.tensor_meta = [TensorMeta([ShapeDim(size) for size in SHAPE], 6) if is_static else None]
    return Case(write_payload(graph), {}, (FLOATS,))


def test_seed_gives_the_same_case_again_and_another_seed_another() -> None:
    first, again, other = (make_case(SeededChooser(seed)) for seed in ("1:0", "1:0", "1:1"))
    assert first == again != other


def test_every_kind_runs_or_is_refused_whole(runner: Runner) -> None:
    ran: set[str] = set()
    for seed in range(2000):
        ran |= runner.run(make_case(SeededChooser(f"kinds:{seed}"))).kinds
        if not set(NODE_KINDS) - ran - {"MetalKernelNode"}:
            break
    assert set(NODE_KINDS) - ran == {"MetalKernelNode"}


def test_runner_tells_what_ran_and_what_came_of_it(runner: Runner) -> None:
    answer = runner.run(case_of("AbsNode", "ExpNode"))
    assert (answer.outcome, answer.kinds) == ("ran", {"AbsNode", "ExpNode"})
    assert answer.outputs == [(SHAPE, "float32")] * 2
    assert finding(case_of("AbsNode"), answer) is None


def test_runner_tells_refusals_from_what_a_run_raises(runner: Runner) -> None:
    refused = runner.run(Case(b"", {}, ()))
    assert (refused.outcome, refused.error) == ("refused", "ProgramError")
    wrong = replace(case_of("AbsNode"), inputs=(Data((2, 4), 6, bytes(32)),))
    raised = runner.run(wrong)
    assert (raised.outcome, raised.stage, raised.error) == ("raised", "run", "ValueError")
    assert finding(wrong, raised) is None


def test_runner_goes_on_after_its_child_ended(runner: Runner) -> None:
    os.kill(runner.pid, 9)
    answer = runner.run(case_of("AbsNode"))
    assert (answer.outcome, answer.error) == ("died", "signal 9")
    assert str(finding(case_of("AbsNode"), answer)).startswith("died")
    assert runner.run(case_of("AbsNode")).outcome == "ran"


def test_runner_ends_a_child_that_does_not_answer() -> None:
    with Runner(timeout_s=0.0) as impatient:
        assert impatient.run(case_of("AbsNode")).outcome == "hung"


@pytest.mark.parametrize(
    ("answer", "is_static", "expected"),
    [
        (Answer("ran", differs=True, kind="AbsNode"), True, "differs"),
        (Answer("ran", unforeseen="shape: expected, got"), True, "unforeseen"),
        (Answer("ran", peak_bytes=1 << 40), True, "memory"),
        (Answer("raised", "run", error="RuntimeError", message="[malloc] Unable to allocate 9 bytes"), True, "memory"),
        (Answer("raised", "run", error="AttributeError", message="no x"), False, "mistake"),
        (Answer("raised", "run", error="IndexError", message="list index out of range"), False, "mistake"),
        (Answer("raised", "run", error="TypeError", message="unsupported operand type(s) for +"), False, "mistake"),
        (Answer("raised", "run", error="ValueError", message="[broadcast_shapes] Shapes"), True, "accepted"),
        (Answer("raised", "run", error="ValueError", message="[broadcast_shapes] Shapes"), False, None),
        (Answer("raised", "run", error="IndexError", message="an index outside -3..2"), True, None),
        (Answer("raised", "load", error="OverflowError", message="too large"), False, "accepted"),
        (Answer("refused", "load", error="ProgramError", message="no"), True, None),
    ],
)
def test_finding_is_told_from_what_may_happen(answer: Answer, is_static: bool, expected: str | None) -> None:
    found = finding(case_of("AbsNode", is_static=is_static), answer)
    assert (found and found.kind_of) == expected


class _Sick(Runner):
    """Finds fault with any program that has an ExpNode."""

    def run(self, case: Case) -> Answer:
        kinds = {node.kind for node in read_payload(case.payload).instruction_chains[0].instructions}
        return Answer("died", kind="ExpNode") if "ExpNode" in kinds else Answer("ran")


def test_shrinking_leaves_the_instruction_that_is_to_blame() -> None:
    case = case_of("AbsNode", "ExpNode", "AbsNode")
    with _Sick() as sick:
        found = finding(case, sick.run(case))
        assert found is not None
        less = read_payload(shrink(sick, case, found).payload)
    assert [node.kind for node in less.instruction_chains[0].instructions] == ["ExpNode"]


def test_replay_runs_a_reproducer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one.pickle", [case_of("AbsNode")], "nothing")
    assert main(["--replay", str(tmp_path / "one.pickle")]) == 0
    assert "AbsNode" in capsys.readouterr().out
