"""A program that is delegated whole crosses the exporter as one call; what cannot, goes the ordinary way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.pass_base import ExportPass, PassResult
from torch import nn
from torch.export import Dim, ExportedProgram

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.outline import restored
from oracles.plain_models import PlainAttentionModel, export_flat
from oracles.small_programs import MAX_ROWS, Affine, Counting, Function, num_delegates, outside_the_delegate

UNCHECKED = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


class Sample(NamedTuple):
    """A program: its model, and for each size of the dynamic axis the inputs."""

    model: nn.Module
    inputs: Callable[[int], tuple[Any, ...]]
    # The axis of each input that is dynamic; None where the input is fixed.
    dynamic: tuple[int | None, ...] | None = (0,)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


def one(n: int) -> tuple[Any, ...]:
    return (values(n, 4, seed=n),)


def two(n: int) -> tuple[Any, ...]:
    return values(n, 4, seed=n), values(n, 4, seed=n + 100)


WEIGHT = values(4, 4, seed=7)


class Constants(nn.Module):
    """A tied parameter, two buffers of which one is not in the state dict, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("passing", torch.arange(4.0) * 0.5, persistent=False)
        self.plain = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x) + self.kept) * self.passing + self.plain
        return out


class KeywordsAndContainers(nn.Module):
    def forward(self, x: torch.Tensor, *, of: dict[str, torch.Tensor]) -> Any:
        return {"last": x * of["b"], "first": [x - of["a"]]}


def several_outputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    return y - x, x @ WEIGHT, x > y, x.argmax(-1), y.to(torch.float16), x.sum([0, 1]), x.reshape(-1, 2, 2)


def permuted_outputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x + y, x - y
    c = a * b
    return c, a, b


# Delegated whole: each is one call.
WHOLE = {
    "one_output": Sample(Affine(), one),
    "several_outputs": Sample(Function(several_outputs), two, (0, 0)),
    "permuted_outputs": Sample(Function(permuted_outputs), two, (0, 0)),
    "first_input_unused": Sample(Function(lambda x, y: y * 2), two, (0, 0)),
    "last_input_unused": Sample(Function(lambda x, y: (x * 2, x - 1)), two, (0, 0)),
    "inputs_in_another_order": Sample(
        Function(lambda x, y, z: (z - y, z * x)), lambda n: (*two(n), *one(n)), (0, 0, 0)
    ),
    "input_that_gives_only_its_size": Sample(
        Function(lambda x, y: (torch.arange(x.shape[0]), y * 2)), lambda n: (values(n, 2), values(3, 4)), (0, None)
    ),
    "two_dynamic_axes": Sample(
        Function(lambda x, y: (y + 1, x + 1, (y * x.sum(0)).abs())),
        lambda n: (values(n, 4), values(MAX_ROWS + 1 - n, 4, seed=1)),
        (0, 0),
    ),
    "last_axis_dynamic": Sample(Function(lambda x: x.exp()), lambda n: (values(2, n),), (1,)),
    "static": Sample(Affine(), lambda n: one(2), None),
    "outputs_that_share_memory": Sample(Function(lambda x: (lambda y: (y, y.view(-1, 2, 2)))(x + 1)), one),
    "output_that_is_a_view_of_an_input": Sample(Function(lambda x: x.view(-1, 2, 2)), one),
    "output_of_constants_only": Sample(Function(lambda x: (x + 1, WEIGHT * 2)), one),
    "integers_and_bools": Sample(
        Function(lambda i, b: (i + 1, torch.logical_not(b))),
        lambda n: (torch.arange(4 * n).view(n, 4), values(n, 4) > 0),
        (0, 0),
    ),
    "constants_of_all_kinds": Sample(Constants(), one),
    "size_that_is_doubled": Sample(Function(lambda x: torch.cat([x, x], 0) * 2), one),
    "sizes_that_grow": Sample(Function(lambda x: (x + 1, F.pad(torch.cat([x, x, x], 0), (0, 0, 2, 1)))), one),
    "transposed_output": Sample(Function(lambda x: (x + 1).transpose(0, 1)), one),
    "operand_changed_in_place": Sample(Function(lambda x: (x + 1).add_(2)), one),
    "constant_made_in_place": Sample(Function(lambda x: x[:, torch.tensor([3, 0])] * 2), one),
    "parts_in_another_order": Sample(Function(lambda x: (x + 1).split([1, 2, 1], 1)[::-1]), one),
}


def traced(sample: Sample, n: int = 3) -> ExportedProgram:
    shapes: Any = None
    if sample.dynamic is not None:
        example = sample.inputs(n)
        varied = [None if dim is None else value.shape[dim] for value, dim in zip(example, sample.dynamic, strict=True)]
        sizes = {size: Dim(f"n{size}", min=1, max=MAX_ROWS) for size in {*varied} - {None}}
        shapes = tuple(
            None if dim is None else {dim: sizes[size]} for dim, size in zip(sample.dynamic, varied, strict=True)
        )
        shapes = {"inputs": shapes} if isinstance(sample.model, Function) else shapes
    with torch.no_grad():
        return torch.export.export(sample.model.eval(), sample.inputs(n), dynamic_shapes=shapes, strict=False)


def operators(program: ExportedProgram) -> list[str]:
    """The names of all calls but those that pick one of several results."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [name for name in names if "getitem" not in name]


def is_one_call(program: ExportedProgram) -> bool:
    return len(operators(program)) == 1 and operators(program)[0].startswith("executorch_mlx.outlined")


def lowered(program: Any, partitioner: Any = None, config: EdgeCompileConfig | None = None, **options: Any) -> bytes:
    partitioner = [MLXPartitioner()] if partitioner is None else partitioner
    edge = to_edge_transform_and_lower(
        program, partitioner=partitioner, compile_config=copy.deepcopy(config), **options
    )
    return bytes(edge.to_executorch().buffer)


def assert_equal(outputs: Any, expected: Any) -> None:
    expected = expected if isinstance(expected, (list, tuple)) else (expected,)
    assert len(outputs) == len(expected)
    for out, want in zip(outputs, expected, strict=True):
        assert (out.dtype, out.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(out, want.detach())


def assert_runs_right(content: bytes, sample: Sample, method: str = "forward") -> None:
    run = load_program(content).load_method(method)
    for n in (3, 1, MAX_ROWS) if sample.dynamic else (3,):
        inputs = sample.inputs(n)
        assert_equal(run.execute(list(inputs)), sample.model(*inputs))


# -- delegated whole ---------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_program_delegated_whole_gives_eager_results_at_each_size(name: str) -> None:
    sample = WHOLE[name]
    content = lowered(traced(sample))
    assert num_delegates(content) == 1
    assert_runs_right(content, sample)


@pytest.mark.parametrize("name", ["one_output", "several_outputs", "permuted_outputs", "inputs_in_another_order"])
def test_program_delegated_whole_without_checks_and_orders_of_dimensions_is_right(name: str) -> None:
    sample = WHOLE[name]
    content = lowered(traced(sample), config=UNCHECKED)
    assert num_delegates(content) == 1
    assert_runs_right(content, sample)


@pytest.mark.parametrize("name", WHOLE)
def test_program_delegated_whole_is_one_call_that_computes_the_same(name: str) -> None:
    sample = WHOLE[name]
    partitioner = MLXPartitioner()
    program = partitioner.transform_for_pre_decomposition(traced(sample))
    assert is_one_call(program)
    program.validate()
    for n in (3, 1, MAX_ROWS) if sample.dynamic else (3,):
        inputs = sample.inputs(n)
        got = program.module()(*inputs)
        assert_equal(got if isinstance(got, (list, tuple)) else [got], sample.model(*inputs))


def test_program_with_keywords_and_containers_keeps_their_order() -> None:
    x, of = values(2, 3), {"a": values(2, 3, seed=1), "b": values(2, 3, seed=2)}
    program = torch.export.export(KeywordsAndContainers(), (x,), {"of": of})
    partitioner = MLXPartitioner()
    outlined = partitioner.transform_for_pre_decomposition(program)
    assert is_one_call(outlined)
    torch.testing.assert_close(outlined.module()(x, of=of), {"last": x * of["b"], "first": [x - of["a"]]})
    method = load_program(lowered(program)).load_method("forward")
    assert_equal(method.execute([x, of["a"], of["b"]]), (x * of["b"], x - of["a"]))


def test_language_model_whose_rotations_are_fused_is_one_call_and_right() -> None:
    model = PlainAttentionModel()
    partitioner = MLXPartitioner()
    assert is_one_call(partitioner.transform_for_pre_decomposition(export_flat(model)))
    content = lowered(export_flat(model), config=UNCHECKED)
    assert num_delegates(content) == 1
    method = load_program(content).load_method("forward")
    for n in (5, 1, 64):
        tokens, position = torch.arange(n)[None] % 32, torch.arange(n)
        (got,) = method.execute([tokens, position])
        torch.testing.assert_close(got, model(tokens, position).detach(), rtol=1e-4, atol=1e-4)


class NamedLikeBuiltins(nn.Module):
    def forward(self, max: torch.Tensor, id: torch.Tensor, device: torch.Tensor) -> Any:  # noqa: A002
        return max - device, id * device


@pytest.mark.parametrize("outline", [True, False])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [(nn.Linear(4, 4), one(3)), (NamedLikeBuiltins(), (*two(3), *one(3)))],
    ids=["input", "several"],
)
def test_inputs_may_have_names_of_python_s_own(model: nn.Module, inputs: tuple[Any, ...], outline: bool) -> None:
    program = torch.export.export(model, inputs)
    method = load_program(lowered(program, [MLXPartitioner(outline=outline)])).load_method("forward")
    assert_equal(method.execute(list(inputs)), model(*inputs))


def test_program_delegated_whole_refuses_more_rows_than_exported_for() -> None:
    method = load_program(lowered(traced(WHOLE["one_output"]))).load_method("forward")
    with pytest.raises(ValueError, match="exceeds the program's bound"):
        method.execute([values(MAX_ROWS + 1, 4)])


def test_program_delegated_whole_with_a_record_for_debugging_is_right() -> None:
    sample = WHOLE["several_outputs"]
    assert_runs_right(lowered(traced(sample), generate_etrecord=True), sample)


# -- not outlined ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["several_outputs", "first_input_unused", "constants_of_all_kinds"])
def test_outline_false_leaves_the_operators_and_gives_the_same_results(name: str) -> None:
    sample = WHOLE[name]
    program = traced(sample)
    partitioner = MLXPartitioner(outline=False)
    kept = operators(partitioner.transform_for_pre_decomposition(program))
    assert kept
    assert all(operator.startswith("aten.") for operator in kept)
    content = lowered(program, [partitioner])
    assert num_delegates(content) == 1
    assert_runs_right(content, sample)


class Recorded(ExportPass):
    """Notes each operator that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        self.seen += [node.target.__name__ for node in graph_module.graph.nodes if node.op == "call_function"]
        return PassResult(graph_module, False)


@pytest.mark.parametrize("is_by_method", [False, True])
def test_outline_false_shows_the_operators_to_transform_passes(is_by_method: bool) -> None:
    sample, recorded = WHOLE["permuted_outputs"], Recorded()
    passes: Any = {"forward": [recorded]} if is_by_method else [recorded]
    content = lowered(traced(sample), [MLXPartitioner(outline=False)], transform_passes=passes)
    assert sorted(name.split(".")[1] for name in recorded.seen) == ["add", "mul", "sub"]
    assert_runs_right(content, sample)


def test_transform_passes_that_see_one_call_leave_it_right() -> None:
    sample, recorded = WHOLE["several_outputs"], Recorded()
    content = lowered(traced(sample), transform_passes=[recorded])
    assert not any(name.startswith("aten.") for name in recorded.seen)
    assert_runs_right(content, sample)


def same_result_twice(x: torch.Tensor) -> Any:
    y = x + 1
    return y, y * 3, y


# Each goes the ordinary way.
ORDINARY = {
    "undelegated_operator": Sample(Function(lambda x: outside_the_delegate(x) + 1), one),
    "output_is_an_input": Sample(Function(lambda x: (x, x + 1)), one),
    "output_is_a_constant": Sample(Function(lambda x: (x + 1, WEIGHT)), one),
    "same_result_twice": Sample(Function(same_result_twice), one),
    "size_of_two_inputs": Sample(
        Function(lambda x, y: torch.cat([x, y], 0) * 2),
        lambda n: (values(n, 4), values(MAX_ROWS + 1 - n, 4, seed=1)),
        (0, 0),
    ),
    "size_that_is_squared": Sample(Function(lambda x: (x[:, None] * x[None]).reshape(-1, 4)), one),
    "no_input_used": Sample(Function(lambda x: WEIGHT + 1), one),
    "number_read_from_an_input": Sample(
        Function(lambda x, y: x * y.item()), lambda n: (*one(n), torch.tensor(n + 1)), (0, None)
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_program_that_cannot_be_outlined_goes_the_ordinary_way_and_is_right(name: str) -> None:
    sample = ORDINARY[name]
    program = traced(sample)
    partitioner = MLXPartitioner()
    ordinary = operators(partitioner.transform_for_pre_decomposition(program))
    assert not any(operator.startswith("executorch_mlx.outlined") for operator in ordinary)
    assert_runs_right(lowered(program, [partitioner]), sample)


def test_program_that_returns_a_size_goes_the_ordinary_way_and_is_right() -> None:
    sample = Sample(Function(lambda x: (x + 1, x.shape[0])), one)
    method = load_program(lowered(traced(sample))).load_method("forward")
    for n in (3, 1, MAX_ROWS):
        got, size = method.execute(list(one(n)))
        torch.testing.assert_close(got, one(n)[0] + 1)
        assert size == n


@pytest.mark.parametrize("number", [2.5, 3, None], ids=str)
def test_program_with_a_fixed_input_that_is_no_tensor_is_right(number: Any) -> None:
    function = Function(lambda x, y: x + 1 if y is None else x * y)
    program = torch.export.export(function, (values(2, 3), number), strict=False)
    method = load_program(lowered(program)).load_method("forward")
    x = values(2, 3, seed=5)
    assert_equal(method.execute([x, number]), function(x, number))


def test_program_with_a_number_that_varies_is_not_outlined() -> None:
    shapes = {"inputs": (None, Dim.DYNAMIC)}
    program = torch.export.export(Function(lambda x, y: x * y), (values(2, 3), 3), dynamic_shapes=shapes, strict=False)
    assert operators(MLXPartitioner().transform_for_pre_decomposition(program)) == ["aten.mul.Tensor"]


def test_program_that_keeps_a_buffer_up_to_date_is_not_outlined() -> None:
    program = torch.export.export(Counting(), (values(2, 3),)).run_decompositions({})
    partitioner = MLXPartitioner()
    ordinary = operators(partitioner.transform_for_pre_decomposition(program))
    assert not any(operator.startswith("executorch_mlx.outlined") for operator in ordinary)


# -- the graph put aside ---------------------------------------------------------------------


def test_graph_put_aside_comes_back_in_the_order_of_the_program_that_calls_it() -> None:
    sample, partitioner = WHOLE["inputs_in_another_order"], MLXPartitioner()
    program = partitioner.transform_for_pre_decomposition(traced(sample))
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    call = next(node for node in program.graph.nodes if node.op == "call_function")
    output = program.graph.output_node()
    results = output.args[0]
    inputs = sample.inputs(2)
    expected = sample.model(*inputs)
    # Each anew from the same graph: what one lowering does to it is not seen by the next.
    for order, picks in (((2, 0, 1), (1, 0)), ((0, 1, 2), (0, 1)), ((1, 0, 2), (1,)), ((0, 2, 1), (1, 0))):
        for index in order:
            call.prepend(places[index])
        output.args = (tuple(results[index] for index in picks),)
        graph_module = restored(program).graph_module
        graph_module.graph.lint()
        graph_module.recompile()
        got = graph_module(*[inputs[index] for index in order])
        assert_equal(got, [expected[index] for index in picks])


def test_program_that_calls_nothing_put_aside_is_restored_as_it_is() -> None:
    program = traced(WHOLE["one_output"])
    assert restored(program) is program


def test_call_returns_memory_of_its_own() -> None:
    sample, partitioner = WHOLE["output_that_is_a_view_of_an_input"], MLXPartitioner()
    program = partitioner.transform_for_pre_decomposition(traced(sample))
    (x,) = sample.inputs(2)
    before = x.clone()
    program.module()(x).zero_()
    assert torch.equal(x, before)


# -- several programs, and how long things live --------------------------------------------


def affine(value: float) -> Sample:
    """The same names and shapes with other weights."""
    model = Affine()
    nn.init.constant_(model.linear.weight, value)
    return Sample(model, one)


def test_partitioner_may_be_gone_before_to_executorch() -> None:
    sample = WHOLE["several_outputs"]
    partitioners = [MLXPartitioner()]
    gone = weakref.ref(partitioners[0])
    edge = to_edge_transform_and_lower(traced(sample), partitioner=partitioners)
    del partitioners
    gc.collect()
    assert gone() is None
    duplicate = copy.deepcopy(edge)
    assert_runs_right(bytes(edge.to_executorch().buffer), sample)
    assert_runs_right(bytes(duplicate.to_executorch().buffer), sample)


def test_weights_are_freed_with_the_partitioner_and_its_results() -> None:
    model = Affine()
    weight = weakref.ref(model.linear.weight)
    partitioner = MLXPartitioner()
    edge = to_edge_transform_and_lower(traced(Sample(model, one)), partitioner=[partitioner])
    content = bytes(edge.to_executorch().buffer)
    assert_runs_right(content, Sample(model, one))
    del model, partitioner, edge
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("is_shared", [False, True], ids=["one_partitioner_each", "one_partitioner"])
def test_methods_lowered_at_once_keep_their_own_graphs(is_shared: bool) -> None:
    samples = {"forward": affine(0.5), "second": affine(-2.0), "third": WHOLE["permuted_outputs"]}
    programs = {name: traced(sample) for name, sample in samples.items()}
    partitioner: Any = [MLXPartitioner()] if is_shared else {name: [MLXPartitioner()] for name in samples}
    content = lowered(programs, partitioner)
    assert num_delegates(content) == 3
    for name, sample in samples.items():
        assert_runs_right(content, sample, name)


def test_programs_lowered_in_turns_keep_their_own_graphs() -> None:
    samples = [affine(0.5), affine(-2.0)]
    edges = [to_edge_transform_and_lower(traced(sample), partitioner=[MLXPartitioner()]) for sample in samples]
    contents = [bytes(edge.to_executorch().buffer) for edge in reversed(edges)]
    for content, sample in zip(reversed(contents), samples, strict=True):
        assert_runs_right(content, sample)


def test_partitioner_used_for_two_lowerings_serves_both() -> None:
    samples, partitioner = [affine(0.5), WHOLE["permuted_outputs"], affine(-2.0)], MLXPartitioner()
    contents = [lowered(traced(sample), [partitioner]) for sample in samples]
    for content, sample in zip(contents, samples, strict=True):
        assert_runs_right(content, sample)


def test_program_lowered_twice_gives_the_same_results() -> None:
    sample = WHOLE["constants_of_all_kinds"]
    program = traced(sample)
    for _ in range(2):
        assert_runs_right(lowered(program), sample)


def test_copy_of_an_outlined_program_computes_the_same() -> None:
    sample, partitioner = WHOLE["several_outputs"], MLXPartitioner()
    program = partitioner.transform_for_pre_decomposition(traced(sample))
    for duplicate in (copy.deepcopy(program), program.run_decompositions({})):
        inputs = sample.inputs(2)
        assert_equal(duplicate.module()(*inputs), sample.model(*inputs))


@pytest.mark.parametrize(
    "make",
    [
        lambda: traced(WHOLE["several_outputs"]),
        lambda: traced(WHOLE["constants_of_all_kinds"]),
        lambda: traced(ORDINARY["undelegated_operator"]),
        lambda: export_flat(PlainAttentionModel()),
    ],
    ids=["whole", "constants", "ordinary", "language_model"],
)
def test_lowering_leaves_the_exported_program_as_it_was(make: Callable[[], ExportedProgram]) -> None:
    program = make()

    def described() -> tuple[Any, ...]:
        stored = {**program.state_dict, **program.constants}
        return (
            program.graph_module.code,
            str(program.graph),
            str(program.graph_signature),
            str(program.range_constraints),
            {name: (id(tensor), tensor.clone()) for name, tensor in stored.items()},
        )

    *before, constants_before = described()
    partitioner = MLXPartitioner()
    partitioner.transform_for_pre_decomposition(program)
    lowered(program, [partitioner])
    *after, constants_after = described()
    assert after == before
    assert constants_after.keys() == constants_before.keys()
    for name, (identity, tensor) in constants_after.items():
        assert identity == constants_before[name][0]
        assert torch.equal(tensor, constants_before[name][1])


def test_running_a_graph_whose_partitioner_is_gone_is_an_error_that_says_so() -> None:
    exported = torch.export.export(torch.nn.SiLU(), (torch.rand(2, 3),), strict=False)
    program = MLXPartitioner().transform_for_pre_decomposition(exported)
    gc.collect()
    with pytest.raises(RuntimeError, match="its MLXPartitioner held, which is gone"):
        program.module()(torch.rand(2, 3))


def test_a_pass_that_changes_an_outlined_program_is_an_error_that_says_so() -> None:
    class Negated(ExportPass):
        def call(self, module: torch.fx.GraphModule) -> PassResult:
            graph = module.graph
            output = graph.output_node()
            (result,) = output.args[0]
            with graph.inserting_before(output):
                negated = graph.call_function(exir_ops.edge.aten.neg.default, (result,))
            negated.meta = dict(result.meta)
            output.args = ((negated,),)
            return PassResult(module, True)

    exported = torch.export.export(torch.nn.SiLU(), (values(2, 3),), strict=False)
    partitioner = MLXPartitioner()
    with pytest.raises(RuntimeError, match="a pass has changed a program that goes to the delegate whole"):
        to_edge_transform_and_lower(exported, transform_passes=[Negated()], partitioner=[partitioner])
