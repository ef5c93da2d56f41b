"""Small models in plain torch, as a function of one flat step, to export and to run eagerly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


def rotate(x: Tensor, position: Tensor, theta: float = 100.0) -> Tensor:
    """Rotate [1, H, n, D] by positions [n], halves against each other."""
    dim = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2) / dim)
    angles = position[:, None].float() * frequencies
    table = torch.cat([angles, angles], dim=-1)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return x * table.cos() + torch.cat([-second, first], dim=-1) * table.sin()


class PlainAttentionModel(nn.Module):
    """Embedding, attention layers with residuals, and an output layer.

    ``attend(q, k, v, position)`` is what a test varies: q [1, H, n, D], k and v [1, H_kv, n, D].
    """

    def __init__(self, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 8, vocab: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = heads * dim
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(width, heads * dim),
                    "k": nn.Linear(width, kv_heads * dim),
                    "v": nn.Linear(width, kv_heads * dim),
                    "o": nn.Linear(width, width),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        """Causal attention with grouped heads."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def encode(self, x: Tensor, position: Tensor) -> Tensor:
        """Apply the positional encoding."""
        return rotate(x, position)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(1, -1, heads, self.dim).transpose(1, 2)

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        """Return logits [1, n, vocab] of tokens [1, n] at positions [n]."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            q = self.encode(self.split(layer["q"](x), self.heads), position)
            k = self.encode(self.split(layer["k"](x), self.kv_heads), position)
            v = self.split(layer["v"](x), self.kv_heads)
            attended = self.attend(q, k, v, position).transpose(1, 2)
            x = x + layer["o"](attended.reshape(1, -1, self.heads * self.dim))
        return self.head(x)


def export_flat(model: nn.Module, *, tokens: int = 5, max_tokens: int = 64) -> torch.export.ExportedProgram:
    """Export a model of (input_ids [1, n], position [n]) with a dynamic n."""
    n = torch.export.Dim("n", min=1, max=max_tokens)
    example = (torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens))
    with torch.no_grad():
        return torch.export.export(model.eval(), example, dynamic_shapes=({1: n}, {0: n}), strict=False)
