"""Runs a graph on what is known of its slots before there are any numbers: that each is written before it is read, and
what shape, dtype and size it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .dtypes import SCALAR_TYPE_NAMES
from .errors import ProgramError
from .rules import Call, results_of
from .schema import Graph, Node, TensorMeta, Tid, Vid
from .types import ANY, UNKNOWN, Range, TensorType, Type, exactly, joined

MAX_RANK = 16
MAX_SIZE = 2**31 - 1
MAX_CHAIN_DEPTH = 32
MAX_VISITS = 1 << 20
# Instructions of one run, those of scans counted as often as they run.
MAX_STEPS = 1 << 20


@dataclass
class Facts:
    """What is known of a graph's instructions before they run.

    Attributes:
        results: what each instruction writes, by the instruction's id: types in the order of its slots.
        open: ids of the instructions whose rule is to be asked again when they run: too little is known of their
            operands, or their results may need more memory than there is.
    """

    results: dict[int, list[Type]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)


class Flow:
    """Walks the chains as they run and keeps what is known of each slot so far.

    A slot's state before anything ran: constants, buffers and inputs are defined, all else is not. Temporaries may be
    written more than once (exporters reuse them).
    """

    def __init__(self, graph: Graph, max_bytes: float) -> None:
        self._graph = graph
        self._max_bytes = max_bytes
        self._num_tensors = graph.num_tensors
        self._visits = 0
        self._may_write_constants = False
        self._facts = Facts()

    def run(self) -> Facts:
        """Return what is known.

        Raises:
            ProgramError: a slot out of range, read before it is written or written where it must not be, or an
                instruction that cannot be run on what its operands are known to be.
        """
        graph = self._graph
        scope = _Scope()
        for index in (*range(graph.num_constant_tensors), *self._graph.buffer_tensors):
            known = _described(graph.tensor_meta[index])
            require(
                known.bytes.low <= self._max_bytes, f"tensor {index}: {known} takes more than {self._max_bytes} bytes"
            )
            scope.own[Tid(index)] = known
        if graph.init_chain_idx >= 0:
            self._may_write_constants = True
            _check_steps(self._chain(graph.init_chain_idx, scope, ()))
            self._may_write_constants = False
            self._check_buffers(scope, "the init chain")
        for entry in graph.input_map:
            scope.own[entry.slot] = (
                _described(graph.tensor_meta[entry.idx], f"t{entry.idx}") if isinstance(entry.slot, Tid) else ANY
            )
        _check_steps(self._chain(graph.main_chain_idx, scope, ()))
        self._check_buffers(scope, "a run")
        for position, entry in enumerate(graph.output_map):
            written = scope.find(entry.slot)
            if written is None:
                raise ProgramError(f"output {position} (slot {entry.idx}) is never written")
            if isinstance(entry.slot, Tid) and entry.idx < len(graph.tensor_meta):
                wanted = _described(graph.tensor_meta[entry.idx])
                require(
                    may_be(written, wanted), f"output {position} is declared as {wanted}, what is written is {written}"
                )
        return self._facts

    def _check_buffers(self, scope: _Scope, when: str) -> None:
        for index in self._graph.buffer_tensors:
            known, wanted = scope[Tid(index)], _described(self._graph.tensor_meta[index])
            require(may_be(known, wanted), f"mutable buffer {index} is {wanted}, and {known} at the end of {when}")

    def _chain(self, index: int, scope: _Scope, path: tuple[int, ...]) -> float:
        """Run a chain; return how many instructions that takes at least."""
        require(index not in path, f"instruction chain {index} runs itself")
        require(len(path) < MAX_CHAIN_DEPTH, f"instruction chains nest deeper than {MAX_CHAIN_DEPTH}")
        path = (*path, index)
        steps: float = 0
        for place, node in enumerate(self._graph.instruction_chains[index].instructions):
            where = f"chain {index}, instruction {place} ({node.kind})"
            written = self._check_slots(node, scope, where)
            call = Call(node, scope.__getitem__)
            try:
                types = results_of(call)
            except ValueError as error:
                raise ProgramError(f"{where}: {error}") from error
            if call.is_open:
                self._facts.open.add(id(node))
            steps += 1
            if node.kind == "IfNode":
                steps += self._if(node, scope, path, where)
            elif node.kind == "ScanNode":
                taken, types = self._scan(node, types, scope, path, where)
                steps += taken
            for slot, known in zip(written, types, strict=True):
                scope.own[slot] = known
            self._note(call, types, where)
        return steps

    def _check_slots(self, node: Node, scope: _Scope, where: str) -> list[Tid | Vid]:
        """Check which slots an instruction names; return those that it writes."""
        first_free = 0 if self._may_write_constants else self._graph.num_constant_tensors
        written = []
        for name, slot in node.slots():
            self._visit()
            limit = self._num_tensors if isinstance(slot, Tid) else self._graph.num_values
            if slot.idx >= limit:
                raise ProgramError(f"{where} names {slot}, there are {limit}")
            if node.writes(name):
                if isinstance(slot, Tid) and slot.idx < first_free:
                    raise ProgramError(f"{where} writes constant {slot.idx}")
                written.append(slot)
            elif slot not in scope:
                raise ProgramError(f"{where}: {name} reads {slot}, which nothing has written yet")
        # Rules walk lists of literals, too.
        self._visit(1 + sum(len(value) for value in vars(node).values() if isinstance(value, list)))
        return written

    def _visit(self, count: int = 1) -> None:
        self._visits += count
        require(
            self._visits <= MAX_VISITS,
            f"instruction chains run each other more than {MAX_VISITS} times, operands counted",
        )

    def _note(self, call: Call, types: list[Type], where: str) -> None:
        node = call.node
        try:
            if not is_bounded(call, types, self._max_bytes):
                self._facts.open.add(id(node))
        except ValueError as error:
            raise ProgramError(f"{where}: {error}") from error
        before = self._facts.results.get(id(node))
        self._facts.results[id(node)] = (
            types if before is None else [joined(a, b) for a, b in zip(before, types, strict=True)]
        )

    # -- chains that instructions run ---------------------------------------------

    def _if(self, node: Node, scope: _Scope, path: tuple[int, ...], where: str) -> float:
        entered = [self._entered(index, scope, {}, path, where) for index in (node.then_chain_idx, node.else_chain_idx)]
        (then, then_steps), (other, other_steps) = entered
        for slot in {**then, **other}:
            if slot in scope or (slot in then and slot in other):
                scope.own[slot] = joined(*[own[slot] if slot in own else scope[slot] for own in (then, other)])
        return min(then_steps, other_steps)

    def _scan(
        self, node: Node, sliced: list[Type], scope: _Scope, path: tuple[int, ...], where: str
    ) -> tuple[float, list[Type]]:
        """Run a scan's body; return the instructions it takes, and the types of what the scan writes.

        What one round leaves for the next is known only if it is the same; the rest is forgotten until nothing changes.
        """
        (first, *_), axis = [scope[slot] for slot in node.originals], node.scan_axis
        assert isinstance(first, TensorType), "a Tid names a tensor"
        length = Range(1, math.inf) if first.shape is None else first.shape[axis]
        given = dict(zip(node.sliced, sliced, strict=True))
        changed: dict[Tid | Vid, Type] = {}
        while True:
            own, steps = self._entered(node.body_chain_idx, scope, {**changed, **given}, path, where)
            more = {
                slot: UNKNOWN if isinstance(slot, Tid) else ANY
                for slot, known in own.items()
                if slot in scope and slot not in given and slot not in changed and known != scope[slot]
            }
            if not more:
                break
            changed |= more
        for slot, known in own.items():
            if slot in scope and slot not in given:
                scope.own[slot] = known
        left = {**given, **own}
        missing = [slot for slot in node.outputs if slot not in left and slot not in scope]
        require(not missing, f"ScanNode: its body never writes {missing}")
        stacked = [
            self._stacked(left[slot] if slot in left else scope[slot], axis, length, where) for slot in node.outputs
        ]
        by_field: dict[str, list[Type]] = {"sliced": [left[slot] for slot in node.sliced], "outputs": stacked}
        names = [name for name, _ in node.slots() if node.writes(name)]
        in_order = {name: iter(types) for name, types in by_field.items()}
        return steps * max(length.low, 1), [next(in_order[name]) for name in names]

    @staticmethod
    def _stacked(known: Type, axis: int, length: Range, where: str) -> Type:
        assert isinstance(known, TensorType), "a Tid names a tensor"
        if known.shape is None:
            return known
        rank = len(known.shape) + 1
        require(-rank <= axis < rank, f"{where}: a result {known} cannot be stacked along axis {axis}")
        place = axis % rank
        return TensorType((*known.shape[:place], length, *known.shape[place:]), known.dtype)

    def _entered(
        self, index: int, scope: _Scope, given: dict[Tid | Vid, Type], path: tuple[int, ...], where: str
    ) -> tuple[dict[Tid | Vid, Type], float]:
        """Run a chain that an instruction runs; return what it wrote, and the instructions it took."""
        require(0 <= index < len(self._graph.instruction_chains), f"{where} runs chain {index}")
        inner = _Scope(scope, given)
        steps = self._chain(index, inner, path)
        return inner.own, steps


class _Scope:
    """What is known at a point of a chain: what it wrote itself, and all that was known where it was entered."""

    def __init__(self, outer: _Scope | None = None, given: dict[Tid | Vid, Type] | None = None) -> None:
        self._outer = outer
        self._given = given or {}
        self.own: dict[Tid | Vid, Type] = {}

    def find(self, slot: Tid | Vid) -> Type | None:
        """Return what is known of a slot, None where nothing has written it."""
        scope: _Scope | None = self
        while scope is not None:
            known = scope.own.get(slot) or scope._given.get(slot)
            if known is not None:
                return known
            scope = scope._outer
        return None

    def __contains__(self, slot: Tid | Vid) -> bool:
        return self.find(slot) is not None

    def __getitem__(self, slot: Tid | Vid) -> Type:
        known = self.find(slot)
        assert known is not None, "what instructions read has been written"
        return known


def _check_steps(steps: float) -> None:
    require(steps <= MAX_STEPS, f"a run takes {steps} instructions, at most {MAX_STEPS} are run")


def is_bounded(call: Call, results: Sequence[Type], max_bytes: float) -> bool:
    """Return whether what an instruction makes fits into memory and MLX's shapes, whatever is not known of it.

    Args:
        call: the instruction, of which a rule has been asked.
        results: what it writes.
        max_bytes: how much one tensor may take, and all that the instruction takes besides.

    Raises:
        ValueError: it never does.
    """
    fits = [_is_bounded(known, max_bytes) for known in results]
    if call.scratch.low > max_bytes:
        raise ValueError(f"it takes {call.scratch.low} bytes or more besides its result, there are {max_bytes}")
    return all(fits) and call.scratch.high <= max_bytes


def _is_bounded(known: Type, max_bytes: float) -> bool:
    if not isinstance(known, TensorType):
        return True
    taken = known.bytes
    if known.shape is not None and len(known.shape) > MAX_RANK:
        raise ValueError(f"its result {known} has {len(known.shape)} axes, at most {MAX_RANK} are run")
    if taken.low > max_bytes:
        raise ValueError(f"its result {known} takes {taken.low} bytes or more, there are {max_bytes}")
    if known.shape is not None and any(size.low > MAX_SIZE for size in known.shape):
        raise ValueError(f"its result {known} has an axis of more than {MAX_SIZE} elements")
    longest = math.inf if known.shape is None else max((size.high for size in known.shape), default=0)
    return taken.high <= max_bytes and longest <= MAX_SIZE


def may_be(known: Type, wanted: TensorType) -> bool:
    """Return whether a tensor may have the shape of another type; its dtype may be converted."""
    if not isinstance(known, TensorType) or known.shape is None or wanted.shape is None:
        return True
    return len(known.shape) == len(wanted.shape) and all(map(Range.meets, known.shape, wanted.shape))


def require(holds: bool, message: str) -> None:
    """Raise ProgramError with a message unless something holds."""
    if not holds:
        raise ProgramError(message)


def _described(meta: TensorMeta | None, name: str = "") -> TensorType:
    """Return what a description says; its lower bounds are the tracer's, to which 0 and 1 are special.

    Args:
        meta: the description.
        name: the tensor's, from which sizes that are not known get theirs.
    """
    if meta is None:
        return UNKNOWN
    sizes = (
        exactly(dim.value)
        if dim.value >= 0
        else Range(0, dim.max_value if dim.max_value >= 0 else math.inf, f"{name}.{axis}")
        for axis, dim in enumerate(meta.shape)
    )
    return TensorType(tuple(sizes), SCALAR_TYPE_NAMES[meta.scalar_type])
