"""Which attentions become ``update_and_attend``, and that what they compute stays the same."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from executorch_mlx.backends.mlx.passes import AttentionNotRewritableError, rewrite_attention
from executorch_mlx.extension.llm.cache import CacheConfig, CacheSession, LayerConfig, build
from executorch_mlx.extension.llm.cache.op import OP_NAME
from oracles.plain_models import PlainAttentionModel, export_flat

VOCAB = 32


def visible(position: torch.Tensor, window: int | None = None) -> torch.Tensor:
    distance = position[:, None] - position[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


class BoolMask(PlainAttentionModel):
    def attend(self, q, k, v, position):
        mask = visible(position)[None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class FloatMask(PlainAttentionModel):
    def attend(self, q, k, v, position):
        mask = torch.zeros(1, 1, position.shape[0], position.shape[0])
        mask = mask.masked_fill(~visible(position), -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def windowed(window: int) -> type[PlainAttentionModel]:
    class Windowed(PlainAttentionModel):
        def attend(self, q, k, v, position):
            mask = visible(position, window)[None, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return Windowed


def masked(rule) -> type[PlainAttentionModel]:
    """A model whose mask is causal and, besides, rule(query positions [n, 1], key positions [1, n])."""

    class Masked(PlainAttentionModel):
        def attend(self, q, k, v, position):
            queries, keys = position[:, None], position[None, :]
            mask = (keys <= queries) & rule(queries, keys)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], enable_gqa=True)

    return Masked


class WindowInBuffer(PlainAttentionModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor(100))

    def attend(self, q, k, v, position):
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class RepeatedByExpand(PlainAttentionModel):
    def attend(self, q, k, v, position):
        def repeated(x):
            groups = self.heads // self.kv_heads
            return x[:, :, None].expand(1, self.kv_heads, groups, -1, self.dim).reshape(1, self.heads, -1, self.dim)

        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)


class RepeatInterleaved(PlainAttentionModel):
    def attend(self, q, k, v, position):
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class OwnScale(PlainAttentionModel):
    def attend(self, q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True)


class PositionsWithBatchAxis(PlainAttentionModel):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids[0])


ACCEPTED = {
    "is_causal": (PlainAttentionModel, None),
    "bool_mask": (BoolMask, None),
    "float_mask": (FloatMask, None),
    "window_1": (windowed(1), 1),
    "window_5": (windowed(5), 5),
    "window_47": (windowed(47), 47),
    "window_past_the_probe": (windowed(48), 48),
    "window_4096": (windowed(4096), 4096),
    "window_in_a_buffer": (WindowInBuffer, 100),
    "window_of_negative_distance": (masked(lambda q, k: k - q > -128), 128),
    "far_window_of_negative_distance": (masked(lambda q, k: k - q > -4096), 4096),
    "far_window_by_sum": (masked(lambda q, k: k >= q + (-4095)), 4096),
    "window_at_most": (masked(lambda q, k: q - k <= 47), 48),
    "window_of_halves": (masked(lambda q, k: (q - k) // 2 < 64), 128),
    "far_window_of_floats": (masked(lambda q, k: (q - k).float() < 4096.0), 4096),
    "far_window_in_a_vector": (masked(lambda q, k: q - k < torch.tensor([4096])), 4096),
    "heads_repeated_by_expand": (RepeatedByExpand, None),
    "heads_repeat_interleaved": (RepeatInterleaved, None),
    "own_scale": (OwnScale, None),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rewrite_attention_run_eagerly_in_chunks_equals_the_model_at_once(name: str) -> None:
    make, window = ACCEPTED[name]
    model = make()
    rewritten = rewrite_attention(export_flat(model))
    assert [(layer.n_kv_heads, layer.head_dim, layer.window) for layer in rewritten.layers] == [(2, 8, window)] * 2
    targets = [str(node.target) for node in rewritten.program.graph.nodes]
    assert targets.count(f"{OP_NAME.replace('::', '.')}.default") == 2
    assert not any("scaled_dot_product" in target or "_assert_tensor_metadata" in target for target in targets)

    ids = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
    layers = [
        LayerConfig(layer.n_kv_heads, layer.head_dim, layer.v_head_dim, layer.window) for layer in rewritten.layers
    ]
    cache = build("eager", "sequence", CacheConfig(20, layers, "float32", max_write=7))
    run = rewritten.program.module()
    with torch.no_grad(), CacheSession(cache):
        outputs = []
        for start, stop in ((0, 7), (7, 12), (12, 13), (13, 20)):
            with cache.step():
                outputs.append(run(ids[:, start:stop], torch.arange(start, stop)))
        expected = model(ids, torch.arange(20))
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_rewrite_attention_positions_with_a_batch_axis_are_flattened() -> None:
    n = torch.export.Dim("n", min=1, max=64)
    example = (torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None])
    model = PositionsWithBatchAxis().eval()
    program = torch.export.export(model, example, dynamic_shapes=({1: n}, {1: n}), strict=False)
    rewritten = rewrite_attention(program)
    cache = build("eager", "sequence", CacheConfig(20, [LayerConfig(2, 8)] * 2, "float32"))
    ids = torch.arange(6)[None]
    with torch.no_grad(), CacheSession(cache), cache.step():
        got = rewritten.program.module()(ids, torch.arange(6)[None])
        torch.testing.assert_close(got, model(ids, torch.arange(6)[None]), rtol=1e-5, atol=1e-5)


def test_rewrite_attention_does_not_change_the_program_given() -> None:
    program = export_flat(PlainAttentionModel())
    before = str(program.graph)
    rewrite_attention(program)
    assert str(program.graph) == before


class SharedKeys(PlainAttentionModel):
    """The second layer attends over the first one's keys and values."""

    second_window: int | None = None

    def forward(self, input_ids, position):
        x = self.embedding(input_ids)
        first, second = self.layers
        k = self.encode(self.split(first["k"](x), self.kv_heads), position)
        v = self.split(first["v"](x), self.kv_heads)
        for layer, window in ((first, None), (second, self.second_window)):
            q = self.encode(self.split(layer["q"](x), self.heads), position)
            mask = visible(position, window)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
            x = x + layer["o"](attended.reshape(1, -1, self.heads * self.dim))
        return self.head(x)


class SharedKeysOtherWindow(SharedKeys):
    second_window = 3


def test_rewrite_attention_layers_that_share_keys_share_a_cache() -> None:
    model = SharedKeys().eval()
    rewritten = rewrite_attention(export_flat(model))
    assert len(rewritten.layers) == 1
    cache = build("eager", "sequence", CacheConfig(20, [LayerConfig(2, 8)], "float32"))
    ids = torch.arange(9)[None]
    with torch.no_grad(), CacheSession(cache):
        outputs = []
        for start, stop in ((0, 4), (4, 9)):
            with cache.step():
                outputs.append(rewritten.program.module()(ids[:, start:stop], torch.arange(start, stop)))
        torch.testing.assert_close(torch.cat(outputs, 1), model(ids, torch.arange(9)), rtol=1e-5, atol=1e-5)


# -- refusals -----------------------------------------------------------------


class NoMask(PlainAttentionModel):
    def attend(self, q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Alibi(PlainAttentionModel):
    def attend(self, q, k, v, position):
        distance = position[:, None] - position[None, :]
        mask = torch.where(distance >= 0, -0.5 * distance.float(), -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], enable_gqa=True)


class MaskFromTokens(PlainAttentionModel):
    def forward(self, input_ids, position):
        self.pads = input_ids[0] == 0
        return super().forward(input_ids, position)

    def attend(self, q, k, v, position):
        mask = visible(position) & ~self.pads[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class WrittenOut(PlainAttentionModel):
    def attend(self, q, k, v, position):
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)).masked_fill(~visible(position), -math.inf)
        return scores.softmax(-1) @ v


class Dropout(PlainAttentionModel):
    def attend(self, q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5, enable_gqa=True)


class Blockwise(PlainAttentionModel):
    def attend(self, q, k, v, position):
        mask = visible(position) & (position[:, None] // 8 == position[None, :] // 8)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class MaskPerHead(PlainAttentionModel):
    def attend(self, q, k, v, position):
        mask = torch.stack([visible(position, 2 + head) for head in range(self.heads)])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True)


class AntiCausal(PlainAttentionModel):
    def attend(self, q, k, v, position):
        mask = position[:, None] <= position[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class PositionsNotWired(PlainAttentionModel):
    def encode(self, x, position):
        return super().encode(x, torch.arange(x.shape[2]))

    def attend(self, q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(position), enable_gqa=True)


class Sinks(PlainAttentionModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_parameter("sinks", nn.Parameter(torch.zeros(4)))


REFUSED = {
    "no_mask": (NoMask, "no mask and is not causal"),
    "alibi": (Alibi, "adds a bias"),
    "mask_from_tokens": (MaskFromTokens, "depends on the input 'input_ids'"),
    "written_out": (WrittenOut, "written out as matmul and softmax"),
    "dropout": (Dropout, "dropout 0.5"),
    "blockwise_mask": (Blockwise, "neither causal nor causal within a sliding window"),
    "chunks_of_64": (masked(lambda q, k: q // 64 == k // 64), "neither causal"),
    "chunks_of_8192": (masked(lambda q, k: q // 8192 == k // 8192), "neither causal"),
    "window_and_first_tokens": (masked(lambda q, k: (k > q - 128) | (k < 4)), "neither causal"),
    "far_window_and_first_tokens": (masked(lambda q, k: (k > q - 4096) | (k < 4)), "neither causal"),
    "far_window_of_halves": (masked(lambda q, k: (q - k) // 2 < 4096), "neither causal"),
    "far_window_of_a_product": (masked(lambda q, k: (q - k) // 47 < 100), "neither causal"),
    "a_break_at_100": (masked(lambda q, k: (q < 100) | (k >= 100)), "neither causal"),
    "a_break_at_5000": (masked(lambda q, k: (q < 5000) | (k >= 5000)), "neither causal"),
    "mask_per_head": (MaskPerHead, "differs between heads"),
    "anti_causal": (AntiCausal, "neither causal"),
    "positions_not_wired": (PositionsNotWired, "nothing but its attention masks used the input 'position'"),
    "shared_keys_with_different_windows": (SharedKeysOtherWindow, "their windows differ"),
    "dropped_sinks": (Sinks, "sinks were dropped"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rewrite_attention_what_a_cache_cannot_serve_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    program = export_flat(make())
    with pytest.raises(AttentionNotRewritableError, match=reason) as caught:
        rewrite_attention(program)
    assert caught.value.module in str(caught.value)


def test_rewrite_attention_static_token_axis_is_refused() -> None:
    program = torch.export.export(
        PlainAttentionModel().eval(), (torch.zeros(1, 1, dtype=torch.long), torch.arange(1)), strict=False
    )
    with pytest.raises(AttentionNotRewritableError, match=r"token axis is static \(n = 1\)"):
        rewrite_attention(program)


def test_rewrite_attention_without_attention_is_refused() -> None:
    class Mlp(nn.Module):
        def forward(self, input_ids, position):
            return input_ids + position

    with pytest.raises(AttentionNotRewritableError, match="calls no scaled_dot_product_attention"):
        rewrite_attention(export_flat(Mlp()))


@pytest.mark.parametrize(("name", "match"), [("tokens", "expected one of tokens"), ("input_ids", r"positions \[n\]")])
def test_rewrite_attention_wrong_position_input_is_an_error(name: str, match: str) -> None:
    class TwoRows(PlainAttentionModel):
        def forward(self, input_ids, position):
            return super().forward(input_ids[:1], position)

    n = torch.export.Dim("n", min=1, max=64)
    example = (torch.zeros(2, 5, dtype=torch.long), torch.arange(5))
    program = torch.export.export(TwoRows().eval(), example, dynamic_shapes=({1: n}, {0: n}), strict=False)
    with pytest.raises(ValueError, match=match):
        rewrite_attention(program, position=name)
