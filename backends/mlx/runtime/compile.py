"""Compiles a verified graph into a Python callable, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..program import Facts, Graph, Node, ProgramError, Tid, Vid, verify_graph
from ..program.dtypes import SCALAR_TYPE_NAMES
from ..program.verify import static_shape
from .device import DTYPES, MEMORY_BYTES, is_cpu, mx
from .expand import Expansion
from .fuse import Fusion, Product
from .guard import guarded
from .kernels import KERNELS, At, Extent, Step, StepState, check_extent
from .kernels.products import expanded_product, fused_product
from .trace import Tracer

# What is worth making of a constant once instead of in each run: a linear layer's transposed weight, scales that are
# stored in half precision.
_FOLDED = ("AsTypeNode", "TransposeNode")

# Instructions that hand their operand's numbers on.
_SAME_NUMBERS = frozenset(
    {"AsTypeNode", "BroadcastToNode", "ContiguousNode", "ExpandDimsNode", "IdCopyNode", "ReshapeNode", "SliceNode"}
    | {"SqueezeNode", "TransposeNode"}
)


class CompiledProgram:
    """A delegate's graph as a function of its inputs.

    Calling it builds MLX's lazy graph and evaluates nothing but what the program itself reads (positions, sizes from
    data): evaluate the outputs and what the cache's ``release()`` returns together.

    A program's mutable buffers keep what a run has written only if ``commit`` follows it; ``check`` tells of indices
    that were computed and point outside of their tensors, for which the outputs hold other elements of these.

    Attributes:
        graph: the program.
        uses_cache: whether any instruction attends over a KV cache.
        extents: of the last run's computed indices, what ``check`` looks at.
    """

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[int, mx.array],
        facts: Facts | None = None,
        *,
        allow_kernels: bool = False,
        expansion: Expansion | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        """Compile.

        Args:
            graph: the graph.
            constants: an array per constant tensor slot.
            facts: what ``verify_graph`` said of it; by default it is asked.
            allow_kernels: whether kernels run whose source comes with the program.
            expansion: its quantized weights in float32, where they are to be.
            fusion: its products that are computed at once, where they are to be; ``constants`` lacks what they hold.

        Raises:
            ProgramError: a graph that cannot be run, or an instruction that this runtime does not know.
        """
        self.graph = graph
        facts = verify_graph(graph, MEMORY_BYTES) if facts is None else facts
        check_supported(graph, allow_kernels=allow_kernels)
        nodes = graph.instruction_chains[graph.main_chain_idx].instructions
        every = [node for chain in graph.instruction_chains for node in chain.instructions]
        unused: frozenset[int] = frozenset() if expansion is None else expansion.unused
        products: Mapping[int, Product] = {}
        if fusion is not None:
            unused, products = unused | fusion.unused, fusion.products
        # Other programs find these only as long as someone holds them.
        held = [*products.values(), *(() if expansion is None else expansion.factors.values())]
        self._shared = [product.weight for product in held]
        self._shared += [product.bias for product in products.values() if product.bias is not None]
        self.uses_cache = any(node.kind == "UpdateAndAttendNode" for node in every)

        def compiled(node: Node, at: At) -> Step:
            if id(node) in products:
                return fused_product(products[id(node)], at)
            factor = None if expansion is None else expansion.factors.get(id(node))
            step = KERNELS[node.kind](node, at) if factor is None else expanded_product(node, at, factor)
            return guarded(step, node, at) if id(node) in facts.open else step

        def compiled_chain(index: int, at: At) -> list[Step]:
            chain = graph.instruction_chains[index].instructions
            return [compiled(node, at) for node in chain if id(node) not in unused]

        known = _known(graph, every)
        folded = _folded_nodes(graph, [node for node in nodes if id(node) not in unused], every)
        fixed = frozenset([*map(Tid, range(graph.num_constant_tensors)), *(node.out for node in folded)])
        at = At(graph.num_tensors, known, fixed, compiled_chain)
        # The last entry is the run's StepState.
        self._initial: list[Any] = [None] * (graph.num_tensors + graph.num_values + 1)
        for index, array in constants.items():
            self._initial[index] = array
        self._buffers = graph.buffer_tensors
        for index in self._buffers:
            meta = graph.tensor_meta[index]
            assert meta is not None, "the verifier has checked that buffers are described"
            self._initial[index] = mx.zeros(static_shape(index, meta), DTYPES[meta.scalar_type])
        state = self._initial[-1] = StepState(None)
        if graph.init_chain_idx >= 0:
            # It may write constants: to its steps there are none.
            for step in At(graph.num_tensors, known, frozenset(), compiled_chain).chain(graph.init_chain_idx):
                step(self._initial)
            check_extents(state.extents)
        self._written: dict[int, mx.array] = {}
        self.extents: list[Extent] = []
        for node in folded:
            compiled(node, at)(self._initial)
        skip = unused | {id(node) for node in folded}
        self._steps = [compiled(node, at) for node in nodes if id(node) not in skip]
        self._tracer = None if is_cpu() or not self.uses_cache else Tracer(graph, self._run)
        self._inputs = [at(entry.slot) for entry in graph.input_map]
        self._outputs = [at(entry.slot) for entry in graph.output_map]

    def __call__(
        self,
        inputs: Sequence[Any],
        cache: Any = None,
        *,
        numbers: Mapping[int, Any] | None = None,
        reads_inputs: bool = True,
    ) -> list[Any]:
        """Run the program.

        Args:
            inputs: an MLX array or a number per input, in the order of the graph's input map, as the graph describes
                them: delegates compare what they are given.
            cache: an MLX cache with a step open, where the program attends.
            numbers: of inputs that are integers and known on the host, by their place: the same as numpy arrays.
            reads_inputs: see ``StepState``.

        Returns:
            A lazy MLX array or a number per output.
        """
        if len(inputs) != len(self._inputs):
            raise ValueError(f"the program takes {len(self._inputs)} inputs, got {len(inputs)}")
        self._written, self.extents = {}, []
        state = StepState(cache, reads_inputs=reads_inputs)
        for index, known in (numbers or {}).items():
            state.know(self.graph.input_map[index].slot, inputs[index], known)
        if self._tracer is not None and cache is not None:
            outputs = self._tracer(inputs, state)
            if outputs is not None:
                self.extents = state.extents
                return outputs
        return self._run(inputs, state)

    def _run(self, inputs: Sequence[Any], state: StepState) -> list[Any]:
        env = self._initial.copy()
        for index, value in zip(self._inputs, inputs, strict=True):
            env[index] = value
        env[-1] = state
        for step in self._steps:
            step(env)
        self.extents = state.extents
        for index in self._buffers:
            if env[index].shape != self._initial[index].shape:
                raise ValueError(
                    f"the program leaves a mutable buffer of shape {list(env[index].shape)}, expected"
                    f" {list(self._initial[index].shape)}"
                )
        self._written = {index: env[index].astype(self._initial[index].dtype) for index in self._buffers}
        return [env[index] for index in self._outputs]

    def pending(self) -> list[mx.array]:
        """Return what is to be evaluated with the outputs of the last run: what ``check`` and ``commit`` look at."""
        extents = [array for least, most, *_ in self.extents for array in (least, most)]
        return [*self._written.values(), *extents]

    def check(self) -> None:
        """Raise IndexError where the last run has computed an index that lies outside of what it indexes."""
        check_extents(self.extents)

    def commit(self) -> None:
        """Keep what the last run has written into the mutable buffers."""
        for index, array in self._written.items():
            self._initial[index] = array
        self._written = {}


def check_extents(extents: list[Extent]) -> None:
    """Raise IndexError where the least or the most of an array of indices lies outside of its bounds."""
    for least, most, low, high in extents:
        check_extent(least.item(), most.item(), low, high)


def check_supported(graph: Graph, *, allow_kernels: bool) -> None:
    """Raise ProgramError naming what this runtime cannot run, or may not, if there is anything."""
    nodes = [node for chain in graph.instruction_chains for node in chain.instructions]
    foreign = sorted({node.name for node in nodes if node.kind == "MetalKernelNode"})
    if foreign and not (allow_kernels and mx.metal.is_available()):
        remedy = "there is no Metal here" if allow_kernels else "load_program(..., allow_kernels=True) runs it on Metal"
        raise ProgramError(
            f"the program brings Metal source of its own ({', '.join(foreign)}), which is not run: {remedy}; or export"
            " it without custom kernels"
        )
    unknown = sorted({node.kind for node in nodes} - KERNELS.keys())
    if unknown:
        raise ProgramError(
            f"this runtime does not implement {', '.join(unknown)}; the program needs it: export the model without"
            " these operators in the delegate"
        )
    described = [meta for meta in graph.tensor_meta if meta is not None]
    if any(SCALAR_TYPE_NAMES[meta.scalar_type] == "float64" for meta in described):
        raise ProgramError("the program has float64 tensors, which MLX takes for float32: export it in float32")
    init = graph.instruction_chains[graph.init_chain_idx].instructions if graph.init_chain_idx >= 0 else []
    if any(node.kind == "UpdateAndAttendNode" for node in init):
        raise ProgramError("the program attends over a KV cache while it is loaded, before there can be one")


def _known(graph: Graph, nodes: list[Node]) -> frozenset[Tid | Vid]:
    """Constants, inputs, and what is the same numbers in another shape or dtype."""
    found = {entry.slot for entry in graph.input_map} | {Tid(index) for index in range(graph.num_constant_tensors)}
    for node in nodes:
        if node.kind in _SAME_NUMBERS and node.x in found:
            found.add(node.out)
    return frozenset(found)


def _folded_nodes(graph: Graph, nodes: list[Node], every: list[Node]) -> list[Node]:
    """Nodes whose result is the same in each run and whose slot nothing else writes, nor holds what runs leave."""
    writes = Counter(slot for node in every for name, slot in node.slots() if node.writes(name))
    writes.update(entry.slot for entry in graph.input_map)
    writes.update(Tid(index) for index in graph.buffer_tensors)
    return [
        node
        for node in nodes
        if node.kind in _FOLDED and node.x.idx < graph.num_constant_tensors and writes[node.out] == 1
    ]
