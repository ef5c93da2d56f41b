"""Linear layers whose weight each token chooses: what is fused, what is left alone, and that both are right."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.passes import fuse_experts
from oracles.small_programs import num_delegates

EXPERT_LINEAR = "executorch_mlx.expert_linear.default"
EXPERTS, INNER, OUTER = 4, 6, 5


class Experts(nn.Module):
    """The form that transformers' ``batched_mm`` writes; subclasses vary it."""

    ids_dtype = torch.int64

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(self.shape(), generator=generator))

    def shape(self) -> tuple[int, ...]:
        return EXPERTS, OUTER, INNER

    def forward(self, x, ids):
        return torch.bmm(self.weight[ids], x.unsqueeze(-1)).squeeze(-1)


class NarrowIds(Experts):
    ids_dtype = torch.int32


class Transposed(Experts):
    def shape(self):
        return EXPERTS, INNER, OUTER

    def forward(self, x, ids):
        return torch.bmm(x.unsqueeze(1), self.weight[ids]).squeeze(1)


class WithBiasInPlace(Experts):
    def forward(self, x, ids):
        return super().forward(x, ids).add_(1.0)


class ComputedIds(Experts):
    """Ids that the program computes, of the two experts that a router prefers."""

    def forward(self, x, ids):
        chosen = torch.topk(x[:, :EXPERTS].softmax(-1), 2)[1].reshape(-1)
        return super().forward(x.repeat_interleave(2, dim=0), chosen) + ids.sum()


class ComputedWeight(Experts):
    def forward(self, x, ids):
        return torch.bmm((self.weight * 2)[ids], x.unsqueeze(-1)).squeeze(-1)


class SeveralTokensEach(Experts):
    def forward(self, x, ids):
        return torch.bmm(self.weight[ids], torch.stack([x, x + 1], -1)).sum(-1)


class TurnedAfterTheChoice(Experts):
    def shape(self):
        return EXPERTS, INNER, OUTER

    def forward(self, x, ids):
        return torch.bmm(self.weight[ids].transpose(1, 2), x.unsqueeze(-1)).squeeze(-1)


FUSED = (Experts, NarrowIds, Transposed, WithBiasInPlace, ComputedIds, ComputedWeight)
UNFUSED = (SeveralTokensEach, TurnedAfterTheChoice)


def inputs(model: Experts, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INNER, generator=generator)
    return x, torch.randint(0, EXPERTS, (rows,), generator=generator).to(model.ids_dtype)


@pytest.mark.parametrize("model", [*FUSED, *UNFUSED], ids=lambda model: model.__name__)
def test_experts_in_an_executorch_program_give_eager_results(model: type[Experts]) -> None:
    experts = model().eval()
    n = torch.export.Dim("n", min=2, max=40)
    program = torch.export.export(experts, inputs(experts, 7), dynamic_shapes=({0: n}, {0: n}), strict=False)
    fused = MLXPartitioner(outline=False).transform_for_pre_decomposition(program)
    targets = [str(node.target) for node in fused.graph.nodes]
    assert targets.count(EXPERT_LINEAR) == (model in FUSED)
    assert ("aten.index.Tensor" in targets) == (model in UNFUSED)
    content = bytes(to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    assert num_delegates(content) == 1
    method = load_program(content).load_method("forward")
    for rows in (7, 2, 40):
        (got,) = method.execute(list(inputs(experts, rows)))
        torch.testing.assert_close(got, experts(*inputs(experts, rows)).detach())


def test_fuse_experts_in_half_precision_keeps_the_dtype() -> None:
    experts = Transposed().bfloat16().eval()
    x, ids = inputs(experts, 7)
    program = torch.export.export(experts, (x.bfloat16(), ids))
    fuse_experts(program)
    program.validate()
    expected = experts(x.bfloat16(), ids)
    torch.testing.assert_close(program.module()(x.bfloat16(), ids), expected)
    content = bytes(to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    (got,) = load_program(content).load_method("forward").execute([x.bfloat16(), ids])
    torch.testing.assert_close(got, expected.detach(), rtol=2e-2, atol=2e-2)


def test_fuse_experts_leaves_a_choice_by_mask_alone() -> None:
    experts = Experts().eval()
    mask = torch.tensor([True, False, True, True])
    program = torch.export.export(experts, (torch.ones(3, INNER), mask), strict=False)
    fuse_experts(program)
    assert EXPERT_LINEAR not in [str(node.target) for node in program.graph.nodes]
    x = torch.arange(3.0 * INNER).reshape(3, INNER)
    torch.testing.assert_close(program.module()(x, mask), experts(x, mask))
