"""The torch op: its answer, its fake, and its life in the exporter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build
from executorch_mlx.extension.llm.cache.op import OP_NAME, update_and_attend

LAYER = LayerConfig(n_kv_heads=2, head_dim=8, v_head_dim=4)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALE = 8**-0.5


@pytest.fixture
def session() -> Iterator[CacheSession]:
    with CacheSession(build("eager", "sequence", CacheConfig(32, [LAYER], "float32"))) as session:
        yield session


def rows(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 4, num_tokens, 8), (1, 2, num_tokens, 8), (1, 2, num_tokens, 4))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


class Attention(torch.nn.Module):
    """Two calls of the op: what an exported model holds."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        first = torch.ops.executorch_mlx.update_and_attend(q, k, v, position, 0, SCALE, torch.float32)
        return first + torch.ops.executorch_mlx.update_and_attend(q + 1, k, v, position, 1, SCALE, torch.float16)


def test_op_over_prefill_and_decode_equals_dense_attention(session: CacheSession) -> None:
    q, k, v = rows(9)
    outs = []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        with session.control.step():
            part = [tensor[:, :, start:stop] for tensor in (q, k, v)]
            outs.append(update_and_attend(*part, torch.arange(start, stop), 0, SCALE, torch.float32))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(torch.cat(outs, dim=2), expected, rtol=1e-5, atol=1e-5)


def test_op_without_a_session_raises_saying_how_to_open_one() -> None:
    with pytest.raises(LookupError, match="CacheSession"):
        update_and_attend(*rows(1), torch.tensor([0]), 0, SCALE, torch.float32)


def test_op_outside_a_step_raises(session: CacheSession) -> None:
    with pytest.raises(RuntimeError, match="outside a step"):
        update_and_attend(*rows(1), torch.tensor([0]), 0, SCALE, torch.float32)


def test_op_for_an_unknown_layer_raises_naming_the_known(session: CacheSession) -> None:
    with pytest.raises(ValueError, match=r"layer 1: .*0\.\.0"), session.control.step():
        update_and_attend(*rows(1), torch.tensor([0]), 1, SCALE, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("column", [False, True])
def test_op_with_any_form_of_positions_equals_dense_attention(
    session: CacheSession, dtype: torch.dtype, column: bool
) -> None:
    q, k, v = rows(5)
    position = torch.arange(5, dtype=dtype)
    with session.control.step():
        out = update_and_attend(q, k, v, position[:, None] if column else position, 0, SCALE, torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert session.control.position == 5


@pytest.mark.parametrize("position", [torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), torch.tensor([0])])
def test_op_with_unusable_positions_raises_and_changes_nothing(session: CacheSession, position: torch.Tensor) -> None:
    with pytest.raises((ValueError, TypeError), match="positions"), session.control.step():
        update_and_attend(*rows(2), position, 0, SCALE, torch.float32)
    assert session.control.position == 0


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_op_with_any_dtypes_answers_in_out_dtype(q_dtype: torch.dtype, out_dtype: torch.dtype, kv_dtype: str) -> None:
    q, k, v = rows(4, q_dtype)
    cache = build("eager", "sequence", CacheConfig(32, [LAYER], kv_dtype))
    with CacheSession(cache), cache.step():
        out = update_and_attend(q, k, v, torch.arange(4), 0, SCALE, out_dtype)
    assert out.dtype is out_dtype
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_op_on_meta_tensors_has_the_declared_shape_and_dtype(num_tokens: int, out_dtype: torch.dtype) -> None:
    q, k, v = (tensor.to("meta") for tensor in rows(num_tokens))
    position = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    out = update_and_attend(q, k, v, position, 0, SCALE, out_dtype)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (1, 4, num_tokens, 4), out_dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_op_under_torchs_own_checks_passes(session: CacheSession, num_tokens: int, transposed: bool) -> None:
    """Within one step a repeated call advances nothing: the checks may run the op as often as they like."""
    q, k, v = rows(num_tokens)
    if transposed:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    arguments = (q, k, v, torch.arange(num_tokens), 0, SCALE, torch.float32)
    with session.control.step():
        torch.library.opcheck(update_and_attend, arguments)


def test_op_leaves_its_arguments_unchanged(session: CacheSession) -> None:
    arguments = (*rows(3), torch.arange(3))
    before = [tensor.clone() for tensor in arguments]
    with session.control.step():
        out = update_and_attend(*arguments, 0, SCALE, torch.float32)
        out.zero_()
    with session.control.step():
        update_and_attend(*rows(3, seed=1), torch.arange(3, 6), 0, SCALE, torch.float32)
    for tensor, copy in zip(arguments, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_op_through_export_and_decompositions_survives_and_runs(dynamic: bool) -> None:
    q, k, v = rows(4)
    tokens = torch.export.Dim("tokens", min=1, max=16)
    dims = {2: tokens}
    shapes = {"q": dims, "k": dims, "v": dims, "position": {0: tokens}} if dynamic else None
    exported = torch.export.export(
        Attention(), (q, k, v, torch.arange(4)), dynamic_shapes=shapes, strict=False
    ).run_decompositions()
    calls = [node for node in exported.graph.nodes if node.target is torch.ops.executorch_mlx.update_and_attend.default]
    assert [node.args[4] for node in calls] == [0, 1]
    assert [node.meta["val"].dtype for node in calls] == [torch.float32, torch.float16]

    config = CacheConfig(32, [LAYER, LAYER], "float32")
    answers = []
    for module in (exported.module(), Attention()):
        cache = build("eager", "sequence", config)
        with CacheSession(cache), cache.step():
            answers.append(module(q, k, v, torch.arange(4)))
        assert cache.position == 4
    torch.testing.assert_close(*answers, rtol=1e-6, atol=1e-6)


def test_op_name_is_in_the_projects_own_namespace() -> None:
    assert OP_NAME == "executorch_mlx::update_and_attend"
    assert torch.ops.executorch_mlx.update_and_attend.default._schema.is_mutable is False
