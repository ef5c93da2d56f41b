"""Fuzzes programs: makes cases, runs them in a child process, and keeps what should not have happened.

    python test/fuzz/programs.py --minutes 30 --out out/fuzz
    python test/fuzz/programs.py --replay out/fuzz/FILE

See docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from fuzz.cases import make_case  # noqa: E402  the samples of nodes lie in that folder
from fuzz.chained import KINDS  # noqa: E402
from fuzz.choosers import SeededChooser  # noqa: E402
from fuzz.runner import Answer, Case, Data, Runner  # noqa: E402

from executorch_mlx.backends.mlx.program import (  # noqa: E402
    Graph,
    Node,
    ProgramError,
    Tid,
    read_payload,
    write_payload,
)
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_NAMES  # noqa: E402

MAX_PEAK_BYTES = 4 << 30
_SHRINK_RUNS, _SHRINK_SECONDS = 200, 20.0
_KEPT_PER_KEY = 3

# Exceptions that tell of a mistake in the runtime itself, whatever the program.
_MISTAKES = {"AssertionError", "AttributeError", "KeyError", "NameError", "RecursionError", "SystemError"}
_MISTAKES |= {"StopIteration", "UnboundLocalError"}
_MISTAKEN_MESSAGES = re.compile(
    r"(IndexError: (list|tuple|string)( assignment)? index out of range|IndexError: pop from"
    r"|TypeError: (unsupported operand|bad operand|'.*' object (is not|does not|has no)|'.*' not supported between"
    r"|.*NoneType|.*required positional|.*unexpected keyword|.*positional argument))"
)
# What cannot be known before a call: its inputs, what is in its tensors, and the cache.
_ABOUT_A_CALL = re.compile(
    r"^(delegate input|the constant|an input holds an index|the program takes|.*no session is active"
    r"|.*[Ii]ndex(es)? .*(outside|out of (range|bounds)))"
)

# What no instruction is to blame for.
_ABOUT_THE_WHOLE = re.compile(r"^(delegate output|MLX imported)")


@dataclass(frozen=True)
class Finding:
    """What should not have happened.

    Attributes:
        kind_of: "died", "hung", "memory", "mistake", "differs", "unforeseen", or, of the weaker kind, "accepted".
        node: the kind of the node at work.
        detail: signal, exception or message, without the numbers in it.
    """

    kind_of: str
    node: str
    detail: str

    @property
    def is_weak(self) -> bool:
        """Whether it is a program that was accepted and that MLX then refused for what could be known before."""
        return self.kind_of == "accepted"

    def __str__(self) -> str:
        return f"{self.kind_of}: {self.node or '-'}: {self.detail}"


def finding(case: Case, answer: Answer) -> Finding | None:
    """Return what is wrong with an answer, if anything is."""
    if answer.outcome in ("died", "hung"):
        return Finding(answer.outcome, answer.kind, answer.error)
    if answer.peak_bytes > MAX_PEAK_BYTES:
        return Finding("memory", answer.kind, f"more than {MAX_PEAK_BYTES >> 30} GiB")
    if answer.error == "MemoryError" or "nable to allocate" in answer.message or "bad_alloc" in answer.message:
        return Finding("memory", answer.kind, _without_numbers(answer.message))
    if answer.unforeseen:
        return Finding("unforeseen", answer.kind, answer.unforeseen.partition(":")[0])
    if answer.differs:
        return Finding("differs", answer.kind, "two runs, two results")
    if answer.outcome != "raised":
        return None
    message = _without_numbers(answer.message)
    if answer.error in _MISTAKES or _MISTAKEN_MESSAGES.match(f"{answer.error}: {answer.message}"):
        return Finding("mistake", answer.kind, f"{answer.error}: {message} ({answer.frame})")
    is_call = _ABOUT_A_CALL.match(answer.message) or answer.kind == "UpdateAndAttendNode"
    if not is_call and (answer.stage == "load" or _is_static(case)):
        node = "" if _ABOUT_THE_WHOLE.match(answer.message) else answer.kind
        return Finding("accepted", node, f"{answer.error}: {message}")
    return None


def _without_numbers(message: str) -> str:
    """Return a message's first line, the same for all sizes, shapes and dtypes."""
    message = re.sub(r"\b(bool|bfloat16|(u?int|float)\d+)\b", "T", message)
    return re.sub(r"[\[(]([^\[\]()]*\d[^\[\]()]*)?[\])]|(?<!\w)-?\d+", "N", message.partition("\n")[0])[:160]


def _is_static(case: Case) -> bool:
    """Whether all shapes of a program follow from what it declares."""
    graph = read_payload(case.payload)
    first = graph.num_constant_tensors
    metas = graph.tensor_meta[first : first + graph.num_input_tensors]
    return (
        all(meta is not None and all(dim.value >= 0 for dim in meta.shape) for meta in metas)
        and all(isinstance(entry.slot, Tid) for entry in graph.input_map)
        and all(node.kind != "ItemIntNode" for node in _nodes(graph))
    )


def _nodes(graph: Graph) -> Iterator[Node]:
    for chain in graph.instruction_chains:
        yield from chain.instructions


# -- reproducers ----------------------------------------------------------------


def save(path: Path, cases: Sequence[Case], text: str) -> None:
    """Write a reproducer, and what it is beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(list(cases)))
    path.with_suffix(".txt").write_text(text)


def described(case: Case) -> str:
    """Return a case as text: instructions, and the tensors and numbers that they get."""
    graph = read_payload(case.payload)
    lines = [
        f"chain {index}: {node!r}"
        for index, chain in enumerate(graph.instruction_chains)
        for node in chain.instructions
    ]
    used = {slot for node in _nodes(graph) for _, slot in node.slots()}
    first = graph.num_constant_tensors
    places = {entry.slot: value for entry, value in zip(graph.input_map, case.inputs, strict=False)}
    constants = {
        named.slot.slot: case.constants[named.name] for named in graph.named_slots if named.name in case.constants
    }
    for role, slots in (("constant", constants), ("input", places)):
        lines += [f"{slot} is {role} {_shown(value)}" for slot, value in slots.items() if slot in used]
    for index, meta in enumerate(graph.tensor_meta):
        if meta is not None and Tid(index) in used and index >= first:
            dims = [dim.value if dim.value >= 0 else f"{dim.min_value}..{dim.max_value}" for dim in meta.shape]
            lines.append(f"{Tid(index)} is declared {SCALAR_TYPE_NAMES.get(meta.scalar_type)} {dims}")
    buffers = first + graph.num_input_tensors + graph.num_output_tensors
    lines.append(
        f"outputs {[entry.slot for entry in graph.output_map]}, init chain {graph.init_chain_idx},"
        f" {graph.num_mutable_buffer_tensors} buffers from {buffers} on"
    )
    return "\n".join(lines) + "\n"


def _shown(value: Data | int | float) -> str:
    if not isinstance(value, Data):
        return repr(value)
    name, numbers = SCALAR_TYPE_NAMES[value.scalar_type], value.numbers()
    more = " ..." if numbers.size > 12 else ""
    return f"{name} {list(value.shape)}: {' '.join(str(number) for number in numbers[:12])}{more}"


def _smaller(case: Case) -> Iterator[Case]:
    """Yield the case without one of its instructions, and without branches and scans around others."""
    graph = read_payload(case.payload)
    for chain_index, chain in enumerate(graph.instruction_chains):
        for place in reversed(range(len(chain.instructions))):
            node = chain.instructions[place]
            inner = [getattr(node, name) for name in ("then_chain_idx", "body_chain_idx") if name in node.__dict__]
            bodies = [graph.instruction_chains[index].instructions for index in inner if index != chain_index]
            for instead in ([], *bodies):
                less = deepcopy(graph)
                less.instruction_chains[chain_index].instructions[place : place + 1] = deepcopy(instead)
                yield _with_graph(case, less)
    for place in reversed(range(len(graph.output_map))):
        less = deepcopy(graph)
        del less.output_map[place]
        yield replace(case, payload=write_payload(less))


def _with_graph(case: Case, graph: Graph) -> Case:
    """Return the case with this graph, which puts out what is still there."""
    written = {slot for node in _nodes(graph) for name, slot in node.slots() if node.writes(name)}
    given = {entry.slot for entry in graph.input_map}
    graph.output_map = [entry for entry in graph.output_map if entry.slot in written | given]
    return replace(case, payload=write_payload(graph))


def shrink(runner: Runner, case: Case, found: Finding) -> Case:
    """Return the case with as few instructions and outputs as show the same finding."""
    runs, until, is_smaller = 0, time.monotonic() + _SHRINK_SECONDS, True
    while is_smaller:
        is_smaller = False
        for less in _smaller(case):
            runs += 1
            if runs > _SHRINK_RUNS or time.monotonic() > until:
                return case
            if finding(less, runner.run(less)) == found:
                case, is_smaller = less, True
                break
    return case


# -- long runs --------------------------------------------------------------------


@dataclass
class Tally:
    """What a run has seen so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: Counter[Finding] = field(default_factory=Counter)

    def add(self, case: Case, answer: Answer) -> None:
        """Count an answer."""
        self.outcomes[answer.outcome] += 1
        self.ran.update(answer.kinds)
        if answer.outcome == "refused":
            try:
                self.refused.update({node.kind for node in _nodes(read_payload(case.payload))})
            except ProgramError:
                self.refused["(unreadable)"] += 1
        if answer.outcome == "raised":
            self.errors[answer.error] += 1

    def line(self, seconds: float) -> str:
        """Return a line of progress."""
        count, strong = sum(self.outcomes.values()), [it for it in self.findings if not it.is_weak]
        outcomes = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        return (
            f"{seconds:.0f} s: {count} cases ({count / max(seconds, 0.1):.0f}/s): {outcomes};"
            f" {len(self.ran.keys() & set(KINDS))} of {len(KINDS)} kinds ran,"
            f" {len(self.refused.keys() & set(KINDS))} were in what was refused;"
            f" {len(strong)} findings, {len(self.findings) - len(strong)} weak ones"
        )


def fuzz(minutes: float, seed: int, out: Path | None, progress_s: float = 30.0) -> Tally:
    """Run cases that follow from the seed, one after the other."""
    tally, start, shown = Tally(), time.monotonic(), 0.0
    with Runner() as runner:
        index, case = 0, make_case(SeededChooser(f"{seed}:0"))
        while (elapsed := time.monotonic() - start) < 60 * minutes:
            if elapsed - shown > progress_s:
                shown = elapsed
                print(tally.line(elapsed), flush=True)
            runner.send(case)
            following = make_case(SeededChooser(f"{seed}:{index + 1}"))  # while the child works
            history, answer = runner.history, runner.receive()
            tally.add(case, answer)
            found = finding(case, answer)
            if found is not None:
                tally.findings[found] += 1
                if tally.findings[found] <= _KEPT_PER_KEY:
                    _keep(runner, case, history, answer, found, out, f"{seed}-{index}", tally.findings[found] == 1)
            index, case = index + 1, following
    print(tally.line(time.monotonic() - start))
    return tally


def _keep(
    runner: Runner,
    case: Case,
    history: list[Case],
    answer: Answer,
    found: Finding,
    out: Path | None,
    name: str,
    is_first: bool,
) -> None:
    """Write a finding's reproducer, and the smallest one of the first of its like; say that there is one."""
    cases, note = [case], ""
    if found.kind_of == "died":
        again = finding(case, runner.run(case))
        if again is None or again.kind_of != "died":
            cases, note = history, "alone it does not: what the child was given before it comes first\n"
    if is_first:
        if not note:
            cases = [shrink(runner, case, found)]
        print(f"finding {name}: {found} {answer.unforeseen}\n{described(cases[-1])}{note}", flush=True)
    if out is not None:
        text = f"{found}\n{answer.unforeseen}{answer.frame}\n{answer.message}\n\n{note}{described(cases[-1])}"
        save(out / f"{found.kind_of}-{found.node or 'any'}-{name}.pickle", cases, text)


def replay(path: Path) -> int:
    """Run a reproducer; return 1 if it still finds something."""
    cases: list[Case] = pickle.loads(path.read_bytes())
    status = 0
    with Runner() as runner:
        for index, case in enumerate(cases):
            answer = runner.run(case)
            found = finding(case, answer)
            if index == len(cases) - 1:
                print(described(case))
                print(answer)
            if found is not None:
                print(f"case {index} of {len(cases)}: {found}")
                status = 1
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for reproducers")
    parser.add_argument("--strict", action="store_true", help="count weak findings too")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one reproducer")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay)
    tally = fuzz(options.minutes, options.seed, options.out)
    print(f"exceptions: {dict(tally.errors.most_common())}")
    print(f"never ran: {sorted(set(KINDS) - tally.ran.keys())}")
    for found, count in sorted(tally.findings.items(), key=lambda item: (item[0].is_weak, str(item[0]))):
        print(f"{count:6} {found}")
    return int(any(options.strict or not found.is_weak for found in tally.findings))


if __name__ == "__main__":
    sys.exit(main())
